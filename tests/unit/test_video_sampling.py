"""Which moments are wanted, without any file."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import InputError
from pipeline.video.config import DecodeConfig
from pipeline.video.probe import VideoProbe
from pipeline.video.sampling import predicted_frames, spacing_s, tolerance_s, wanted_times_s, window_s


def _probe(start_s: float = 0.0, duration_s: float = 10.0, tick_s: float = 1 / 12800, **changes: Any) -> VideoProbe:
    known: dict[str, Any] = {"path": "v.mp4", "kind": "video", "container": "mov", "codec": "h264", "pix_fmt": "yuv420p", "fps": 25.0}
    return VideoProbe(**known, width_px=64, height_px=48, start_s=start_s, duration_s=duration_s, tick_s=tick_s, **changes)


def test_fps_sampling_starts_at_the_first_frame_and_has_no_end() -> None:
    times = wanted_times_s(_probe(start_s=8.25), DecodeConfig(fps=2.0))
    assert list(itertools.islice(times, 5)) == [8.25, 8.75, 9.25, 9.75, 10.25]
    assert next(itertools.islice(times, 100_000, None)) == 8.25 + 100_005 / 2


def test_fps_sampling_does_not_drift() -> None:
    fps = 30000 / 1001
    times = wanted_times_s(_probe(), DecodeConfig(fps=fps))
    assert next(itertools.islice(times, 107_892, None)) == 107_892 / fps


def test_start_and_end_bound_the_window() -> None:
    decode = DecodeConfig(fps=1.0, start_s=2.5, end_s=5.5)
    assert list(wanted_times_s(_probe(), decode)) == [2.5, 3.5, 4.5]
    assert predicted_frames(_probe(), decode) == 3


def test_a_start_before_the_first_frame_means_the_first_frame() -> None:
    assert window_s(_probe(start_s=3.0), DecodeConfig(start_s=-1.0, end_s=5.0)) == (3.0, 5.0)


def test_frames_sampling_takes_the_middles_of_equal_parts() -> None:
    decode = DecodeConfig(sampling="frames", frames=4)
    assert list(wanted_times_s(_probe(start_s=1.0, duration_s=8.0), decode)) == [2.0, 4.0, 6.0, 8.0]
    assert spacing_s(_probe(start_s=1.0, duration_s=8.0), decode) == 2.0


def test_keyframes_have_no_spacing() -> None:
    assert spacing_s(_probe(), DecodeConfig(sampling="keyframes")) is None


@pytest.mark.parametrize(("duration_s", "fps", "frames"), [(10.0, 1.0, 10), (10.2, 1.0, 11), (0.04, 1.0, 1), (0.0, 1.0, 1), (3.0, 0.5, 2)])
def test_predicted_frames_of_fps_sampling(duration_s: float, fps: float, frames: int) -> None:
    assert predicted_frames(_probe(duration_s=duration_s), DecodeConfig(fps=fps)) == frames


@pytest.mark.parametrize("bounds", [{"start_s": 12.5}, {"end_s": 0.0}, {"start_s": 20.0, "end_s": 30.0}])
def test_a_window_outside_the_file_is_refused_by_name(bounds: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"v\.mp4: lies between 0\.000 s and 10\.000 s, outside decode\.start_s=.*; widen them"):
        window_s(_probe(), DecodeConfig(**bounds))


@pytest.mark.parametrize(("tick_s", "expected_s"), [(0.001, 0.0005), (1 / 30, 0.0005), (1 / 90000, 1 / 180000)])
def test_tolerance_is_half_a_tick_but_never_more_than_half_a_millisecond(tick_s: float, expected_s: float) -> None:
    assert tolerance_s(_probe(tick_s=tick_s)) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fps": 0}, "fps"),
        ({"fpz": 1}, "fpz"),
        ({"sampling": "all"}, "sampling"),
        ({"start_s": 5.0, "end_s": 5.0}, "decode.end_s=5.0 must exceed decode.start_s=5.0"),
        ({"min_frame_px": 100, "max_frame_px": 99}, "decode.max_frame_px=99 must be at least decode.min_frame_px=100"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DecodeConfig(**fields)
