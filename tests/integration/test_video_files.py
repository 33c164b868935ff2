"""Real and made files, good and broken: right frames at right times against ffmpeg's own list, or an error with a reason."""

from __future__ import annotations

import bisect
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.errors import InputError
from engine.geometry import FrameGeometry
from jobs.bench._clips import make_clip, repeat_clip
from jobs.bench.decode import measure_apart
from pipeline.video.config import DecodeConfig
from pipeline.video.decord_reader import DecordReader
from pipeline.video.probe import VideoProbe, probe
from pipeline.video.pyav_reader import PyAVReader
from pipeline.video.reader import DecoderRefusedError
from pipeline.video.sampling import tolerance_s
from pipeline.video.source import VideoSource, open_video
from tests.support import videos
from tests.support.videos import ffmpeg_end_s, ffmpeg_frames, ffmpeg_times_s, make_video, read_number

SHARED = Path(__file__).parents[3] / "shared" / "data" / "videos"
GEOMETRY = FrameGeometry(frames_per_group=2, unit_px=28, min_px=4 * 28 * 28, max_px=40 * 28 * 28)


@dataclass(frozen=True)
class Good:
    """A file that must be read.

    Attributes:
        frames: how many ffmpeg finds.
        start_s: time of the first.
        size: (height, width) upright.
        notes: words that the warnings must hold.
        numbered: whether each frame shows its number.
        decord: whether decord reads it too, when asked to; otherwise PyAV must take over and say so.
        difference: largest mean difference from ffmpeg's pixels, in grey levels; 10-bit and odd sizes are rounded another way.
    """

    frames: int
    start_s: float
    size: tuple[int, int]
    notes: tuple[str, ...] = ()
    numbered: bool = False
    decord: bool = True
    difference: float = 0.01


REAL = {
    "animated.gif": Good(4, 0.0, (48, 64), decord=False),
    "av1_video.mkv": Good(125, 0.0, (360, 640), decord=False),
    "discard_first_keyframe.mp4": Good(25, 0.0, (64, 64), decord=False),
    "h264_10bits.mp4": Good(30, 0.0, (200, 200), difference=4.0),
    "h265_video.mp4": Good(10, 0.0, (128, 128)),
    "nasa_13013.mp4": Good(390, 0.0, (270, 480), notes=("2 video streams; stream 3, the best (480x270), is read",)),
    "nasa_13013_rotated.mp4": Good(17, 0.0, (480, 270)),
    "test_non_zero_start.mp4": Good(12, 8.3330078125, (112, 200)),
    "testsrc2_mpeg4.avi": Good(30, 0.0, (720, 1280)),
    "testsrc2_odd_height_and_width_vp9.mp4": Good(25, 0.0, (241, 321), difference=2.0),
    "testsrc2_vp9.webm": Good(30, 0.0, (720, 1280)),
}

FRONT = {"movflags": "faststart"}
INTERLACED = {"preset": "ultrafast", "x264-params": "interlaced=1"}
ANAMORPHIC = {"preset": "ultrafast", "x264-params": "sar=64/45"}

MADE: dict[str, tuple[Callable[[Path], object], Good]] = {
    "plain.mp4": (lambda p: make_video(p, audio=True), Good(50, 0.0, (96, 128), numbered=True)),
    "plain.mkv": (lambda p: make_video(p), Good(50, 0.0, (96, 128), numbered=True)),
    "vp8.webm": (lambda p: make_video(p, codec="libvpx"), Good(50, 0.0, (96, 128), numbered=True)),
    "av1.mkv": (lambda p: make_video(p, codec="libsvtav1"), Good(50, 0.0, (96, 128), numbered=True, decord=False)),
    "hevc10.mp4": (
        lambda p: make_video(p, codec="libx265", pix_fmt="yuv420p10le"),
        Good(50, 0.0, (96, 128), numbered=True, difference=2.0),
    ),
    "variable.mp4": (videos.make_variable_rate, Good(40, 0.0, (96, 128), numbered=True)),
    "variable.mkv": (videos.make_variable_rate, Good(40, 0.0, (96, 128), ("stretches without frames",), numbered=True)),
    "one.mp4": (lambda p: make_video(p, frames=1), Good(1, 0.0, (96, 128), ("the last group was filled",), numbered=True)),
    "odd.mp4": (lambda p: make_video(p, height_px=97, width_px=131, pix_fmt="yuv444p"), Good(50, 0.0, (97, 131), numbered=True)),
    "interlaced.mp4": (lambda p: make_video(p, options=INTERLACED), Good(50, 0.0, (96, 128), ("interlaced",), numbered=True)),
    "anamorphic.mp4": (lambda p: make_video(p, options=ANAMORPHIC), Good(50, 0.0, (96, 128), ("aren't square (64:45)",), numbered=True)),
    "bframes.avi": (lambda p: make_video(p), Good(50, 0.08, (96, 128), numbered=True, decord=False)),
    "stream.ts": (lambda p: make_video(p), Good(50, 0.08, (96, 128), numbered=True, decord=False)),
    "mpeg2.mpg": (lambda p: make_video(p, codec="mpeg2video"), Good(50, 0.54, (96, 128), numbered=True, decord=False, difference=0.5)),
    "fragmented.mp4": (
        lambda p: make_video(p, container_options={"movflags": "frag_keyframe+empty_moov"}),
        Good(50, 0.08, (96, 128), numbered=True),
    ),
    "offset.mkv": (
        lambda p: videos.run_ffmpeg(p, "-itsoffset", "100", "-i", str(p.parent / "plain.mp4"), "-c", "copy", "-copyts"),
        Good(50, 100.0, (96, 128), numbered=True),
    ),
    "turned90.mp4": (lambda p: videos.make_oriented(p, p.parent / "plain.mp4", "-display_rotation", "90"), Good(50, 0.0, (128, 96))),
    "turned180.mp4": (lambda p: videos.make_oriented(p, p.parent / "plain.mp4", "-display_rotation", "180"), Good(50, 0.0, (96, 128))),
    "turned270.mp4": (lambda p: videos.make_oriented(p, p.parent / "plain.mp4", "-display_rotation", "270"), Good(50, 0.0, (128, 96))),
    "mirrored.mp4": (lambda p: videos.make_oriented(p, p.parent / "plain.mp4", "-display_hflip"), Good(50, 0.0, (96, 128), decord=False)),
    "upside.mp4": (lambda p: videos.make_oriented(p, p.parent / "plain.mp4", "-display_vflip"), Good(50, 0.0, (96, 128), decord=False)),
    "turned_mirrored.mp4": (
        lambda p: videos.make_oriented(p, p.parent / "plain.mp4", "-display_rotation", "90", "-display_hflip"),
        Good(50, 0.0, (128, 96), decord=False),
    ),
    "front.mp4": (lambda p: make_video(p, frames=100, container_options=FRONT), Good(100, 0.0, (96, 128), numbered=True)),
    "cut_front.mp4": (
        lambda p: videos.make_truncated(p, p.parent / "front.mp4", 0.6),
        Good(51, 0.0, (96, 128), ("cut off: frames end at 2.040 s, though the file's header says 4.000 s",), numbered=True, decord=False),
    ),
    "hundred.mkv": (lambda p: make_video(p, frames=100), Good(100, 0.0, (96, 128), numbered=True)),
    "cut.mkv": (
        lambda p: videos.make_truncated(p, p.parent / "hundred.mkv", 0.6),
        Good(58, 0.0, (96, 128), ("cut off: frames end at 2.400 s, though the file's header says 4.000 s",)),
    ),
    "hole.mkv": (
        lambda p: videos.make_damaged(p, p.parent / "hundred.mkv", 0.4, 0.5),
        Good(62, 0.0, (96, 128), ("stretches without frames",)),
    ),
}


def _make_text(path: Path) -> None:
    path.write_text("not a video\n" * 500)


def _make_playlist(path: Path) -> None:
    path.write_text("ffconcat version 1.0\nfile plain.mp4\n")


def _make_pictureless(path: Path) -> None:
    """A sound header whose frames are zeros."""
    data = bytearray((path.parent / "one.mp4").read_bytes())
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def _make_hls(path: Path) -> None:
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:2,\nplain.mp4\n#EXT-X-ENDLIST\n")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent.mp4": (lambda p: None, "can't be read: No such file or directory; check the path and its permissions"),
    "empty.mp4": (lambda p: p.write_bytes(b""), "is empty (0 bytes); copy or upload it again"),
    "folder.mp4": (lambda p: p.mkdir(), "isn't a regular file; give the path of a video or image file"),
    "pipe.mp4": (os.mkfifo, "isn't a regular file; give the path of a video or image file"),
    "text.mp4": (_make_text, "isn't a video, or is damaged or cut off so that its index is missing; copy or upload it again"),
    "noise.mp4": (lambda p: p.write_bytes(random.Random(0).randbytes(50_000)), "isn't "),
    "sound.mp4": (videos.make_audio_only, "has nothing to see (audio only); leave it out, or give the file that has the picture"),
    "cut.mp4": (
        lambda p: videos.make_truncated(p, p.parent / "plain.mp4", 0.6),
        "cut off so that its index is missing; copy or upload it again",
    ),
    "playlist.mp4": (_make_playlist, "isn't in a container that can be read; convert it"),
    "hls.mp4": (_make_hls, "isn't "),
    "pictureless.mp4": (_make_pictureless, "no frame of its h264 stream can be decoded"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every made file, good and broken."""
    made = tmp_path_factory.mktemp("videos")
    for name, (make, _) in {**MADE, **BROKEN}.items():
        make(made / name)
    return made


def _known(name: str, folder: Path) -> tuple[Path, Good]:
    if name in MADE:
        return folder / name, MADE[name][1]
    if not SHARED.is_dir():
        pytest.skip(f"the real videos aren't at {SHARED}")
    return SHARED / name, REAL[name]


def _shown(times_s: list[float], wanted_s: float, tolerance: float) -> int:
    return max(0, bisect.bisect_right(times_s, wanted_s + tolerance) - 1)


def _expected_times(found: VideoProbe, path: Path, fps: float) -> list[float]:
    """What fps sampling must give, from ffmpeg's list: written apart from the project's own sampling."""
    times_s, end_s = ffmpeg_times_s(path), ffmpeg_end_s(path)
    expected, count = [], 0
    while (wanted_s := times_s[0] + count / fps) < end_s - 1e-9 or count == 0:
        expected.append(times_s[_shown(times_s, wanted_s, tolerance_s(found))])
        count += 1
    return expected


def _samples(source: VideoSource) -> list[tuple[float, np.ndarray]]:
    return list(source._samples(0))


def _sampled(source: VideoSource) -> list[float]:
    return [time_s for time_s, _ in _samples(source)]


def test_the_table_names_every_real_file() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the real videos aren't at {SHARED}")
    assert {path.name for path in SHARED.iterdir()} == set(REAL)


@pytest.mark.parametrize("name", [*REAL, *MADE])
def test_every_frame_is_ffmpeg_s_own(name: str, folder: Path) -> None:
    path, good = _known(name, folder)
    found = probe(path)
    theirs_s, theirs = ffmpeg_times_s(path), ffmpeg_frames(path, *good.size)
    assert len(theirs_s) == len(theirs) == good.frames
    assert (found.height_px, found.width_px) == good.size
    assert found.start_s == pytest.approx(good.start_s, abs=1e-9)
    samples = list(PyAVReader(found, DecodeConfig()).at(theirs_s))
    assert [time_s for time_s, _ in samples] == pytest.approx(theirs_s, abs=1e-6)
    worst = max(np.abs(frame.astype(np.int16) - theirs[i]).mean() for i, (_, frame) in enumerate(samples))
    assert worst <= good.difference
    if good.numbered:
        assert [read_number(frame) for _, frame in samples] == list(range(good.frames))


@pytest.mark.parametrize("fps", [7.0, 0.9])
@pytest.mark.parametrize("name", [*REAL, *MADE])
def test_sampling_by_rate_gives_the_frames_shown_at_those_times(name: str, fps: float, folder: Path) -> None:
    path, good = _known(name, folder)
    source = open_video(path, GEOMETRY, DecodeConfig(fps=fps))
    groups = list(source)
    expected = _expected_times(source.probe, path, fps)
    assert [g.time_s for g in groups] == pytest.approx(expected[::2], abs=1e-6)
    assert source.frames_read == len(expected)
    assert source.seconds_per_group == pytest.approx(2 / fps)
    assert {g.frames.shape for g in groups} == {(2, 3, *source.frame_size_px)}
    assert any("last group was filled" in w for w in source.warnings) == (len(expected) % 2 == 1)
    for note in good.notes:
        if "last group" not in note:
            assert any(note in w for w in source.warnings), source.warnings
    if not any("cut off" in note for note in good.notes) and "variable" not in name and "mpeg2" not in name:
        assert source.predicted_groups() == len(groups)


@pytest.mark.parametrize("name", [*REAL, *MADE])
def test_a_number_of_frames_is_spread_evenly(name: str, folder: Path) -> None:
    path, good = _known(name, folder)
    source = open_video(path, GEOMETRY, DecodeConfig(sampling="frames", frames=6))
    times_s = ffmpeg_times_s(path)
    found = source.probe
    wanted = [found.start_s + (k + 0.5) * found.duration_s / 6 for k in range(6)]
    if any("cut off" in note for note in good.notes):
        wanted = [w for w in wanted if w < times_s[-1] + 0.04]
    expected = [times_s[_shown(times_s, w, tolerance_s(found))] for w in wanted]
    assert _sampled(source) == pytest.approx(expected, abs=1e-6)
    assert source.seconds_per_group == pytest.approx(found.duration_s / 6 * 2)


@pytest.mark.parametrize("name", [*REAL, *MADE])
def test_keyframes_alone_are_ffmpeg_s_keyframes(name: str, folder: Path) -> None:
    path, good = _known(name, folder)
    source = open_video(path, GEOMETRY, DecodeConfig(sampling="keyframes"))
    assert source.seconds_per_group is None
    samples = _samples(source)
    times_s, theirs = ffmpeg_times_s(path), ffmpeg_frames(path, *good.size)
    for time_s, frame in samples:
        (at,) = [i for i, t in enumerate(times_s) if abs(t - time_s) < 1e-6]
        assert np.abs(frame.astype(np.int16) - theirs[at]).mean() <= good.difference
    if good.numbered and "cut" not in name and "variable" not in name and "av1" not in name and "hevc" not in name and "vp8" not in name:
        assert [read_number(frame) for _, frame in samples] == list(range(0, good.frames, 10))


@pytest.mark.parametrize("name", [*REAL, *MADE])
def test_decord_gives_the_same_or_hands_over_and_says_so(name: str, folder: Path) -> None:
    path, good = _known(name, folder)
    ours = list(open_video(path, GEOMETRY, DecodeConfig(fps=7.0)))
    source = open_video(path, GEOMETRY, DecodeConfig(fps=7.0, decoder="decord"))
    theirs = list(source)
    assert [g.time_s for g in theirs] == [g.time_s for g in ours]
    assert max(np.abs(a.frames.astype(np.int16) - b.frames).mean() for a, b in zip(ours, theirs, strict=True)) < 5
    handed_over = any("pyav instead of decord" in w for w in source.warnings)
    assert (source.decoder == "decord") == good.decord == (not handed_over)


@pytest.mark.parametrize("sampling", ["fps", "frames", "keyframes"])
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_file_is_refused_with_file_reason_and_remedy(name: str, sampling: str, folder: Path) -> None:
    with pytest.raises(InputError) as refused:
        list(open_video(folder / name, GEOMETRY, DecodeConfig(sampling=sampling)))  # type: ignore[arg-type]
    text = str(refused.value)
    assert text.startswith(f"{folder / name}: ") and BROKEN[name][1] in text and "; " in text and "\n" not in text


def test_damage_in_the_middle_costs_only_what_it_hit(folder: Path, tmp_path: Path) -> None:
    path = videos.make_damaged(tmp_path / "hole.mp4", folder / "front.mp4", 0.4, 0.6)
    source = open_video(path, GEOMETRY, DecodeConfig(fps=5.0))
    samples = _samples(source)
    assert source.frames_read == 20
    assert any("damaged packets that couldn't be decoded" in w for w in source.warnings)
    for at in (0, 1, 2, 3, 4, 16, 17, 18, 19):
        assert samples[at][0] == pytest.approx(at / 5) and read_number(samples[at][1]) == at * 5
    keys = open_video(path, GEOMETRY, DecodeConfig(sampling="keyframes"))
    assert len(_sampled(keys)) == 7 and any("keyframes that gave no picture: 3" in w for w in keys.warnings)


def test_open_groups_of_pictures_are_read_right_by_both(tmp_path: Path) -> None:
    options = {"preset": "ultrafast", "x264-params": "open-gop=1:bframes=3:b-adapt=0:keyint=10:min-keyint=10"}
    path = make_video(tmp_path / "open.mp4", frames=100, options=options)
    for decoder in ("pyav", "decord"):
        for decode in (DecodeConfig(fps=1.7), DecodeConfig(sampling="frames", frames=9), DecodeConfig(start_s=1.9, fps=5.0)):
            source = open_video(path, GEOMETRY, decode.model_copy(update={"decoder": decoder}))
            samples = _samples(source)
            assert source.decoder == decoder and len(samples) in (7, 9, 11)
            assert [read_number(frame) for _, frame in samples] == [round(time_s * 25) for time_s, _ in samples]


def test_decord_fails_midway_and_pyav_goes_on_from_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = DecordReader._frame

    def failing(self: DecordReader, index: int) -> np.ndarray:
        if index > 20:
            raise DecoderRefusedError("made to fail")
        return frame(self, index)

    monkeypatch.setattr(DecordReader, "_frame", failing)
    source = open_video(folder / "front.mp4", GEOMETRY, DecodeConfig(fps=5.0, decoder="decord"))
    assert [read_number(picture) for _, picture in _samples(source)] == list(range(0, 100, 5))
    assert source.decoder == "pyav" and "decoded by pyav instead of decord from frame 5 on: made to fail" in source.warnings


def test_start_and_end_are_in_the_file_s_own_clock(folder: Path) -> None:
    decode = DecodeConfig(fps=5.0, start_s=100.9, end_s=101.5)
    samples = _samples(open_video(folder / "offset.mkv", GEOMETRY, decode))
    assert [round(time_s, 3) for time_s, _ in samples] == [100.88, 101.08, 101.28]
    assert [read_number(frame) for _, frame in samples] == [22, 27, 32]
    keys = _samples(open_video(folder / "offset.mkv", GEOMETRY, decode.model_copy(update={"sampling": "keyframes"})))
    assert [(round(time_s, 3), read_number(frame)) for time_s, frame in keys] == [(101.2, 30)]


def test_a_source_can_be_read_twice_and_left_early(folder: Path) -> None:
    source = open_video(folder / "plain.mp4", GEOMETRY, DecodeConfig(fps=5.0))
    first = next(iter(source))
    assert source.frames_read == 2
    again = list(source)
    assert len(again) == 5 and source.frames_read == 10
    np.testing.assert_array_equal(first.frames, again[0].frames)


def test_blocks_hold_whole_groups_and_are_decoded_only_when_asked_for(folder: Path) -> None:
    source = open_video(folder / "front.mp4", GEOMETRY, DecodeConfig(fps=5.0))
    group_tokens = GEOMETRY.group_tokens(*source.frame_size_px)
    blocks = source.blocks(block_tokens=3 * group_tokens + 1)
    assert source.frames_read == 0
    first = next(blocks)
    assert source.frames_read == 6 and first.groups == 3 and first.frames.shape[0] == 6
    rest = list(blocks)
    assert [b.groups for b in rest] == [3, 3, 1] and [b.first_group for b in rest] == [3, 6, 9]
    assert all(b.seconds_per_group == pytest.approx(0.4) and b.kind == "video" for b in [first, *rest])
    assert source.predicted_tokens() == 10 * group_tokens


def test_a_change_of_frame_size_is_scaled_and_noted(tmp_path: Path) -> None:
    make_video(tmp_path / "a.ts", frames=25)
    make_video(tmp_path / "b.ts", frames=25, height_px=192, width_px=256)
    (tmp_path / "both.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    source = open_video(tmp_path / "both.ts", GEOMETRY, DecodeConfig(fps=10.0))
    assert {g.frames.shape[-2:] for g in source} == {source.frame_size_px}
    assert any("change size" in w or "lies before the frame in front" in w for w in source.warnings)


def test_frames_beyond_the_limit_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"128x96 px, more than decode\.max_source_px=5000; raise it"):
        list(open_video(folder / "plain.mp4", GEOMETRY, DecodeConfig(max_source_px=5000)))


def test_a_stream_without_frames_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_video(folder / "front.mp4", GEOMETRY, DecodeConfig(sampling="keyframes", stall_timeout_s=50.0))
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr("pipeline.video.frame_stream.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(InputError, match=r"gave no frame for 50 s after .*; check that the file plays, or raise decode\.stall_timeout_s"):
        list(source)


@pytest.mark.parametrize("name", ["plain.mp4", "plain.mkv", "stream.ts", "bframes.avi", "av1.mkv"])
def test_random_damage_gives_frames_or_a_refusal_and_never_anything_else(name: str, folder: Path, tmp_path: Path) -> None:
    whole = (folder / name).read_bytes()
    outcomes = set()
    for seed in range(40):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice([1, 10, 100])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path = tmp_path / name
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(1, len(data))])])
        sampling = chance.choice(["fps", "frames", "keyframes"])
        try:
            source = open_video(path, GEOMETRY, DecodeConfig(sampling=sampling, fps=5.0, frames=4))  # type: ignore[arg-type]
            taken = sum(1 for _, _ in zip(range(500), source, strict=False))
            outcomes.add("frames" if taken else "nothing")
        except InputError as error:
            assert str(error).startswith(f"{path}: ") and "; " in str(error)
            outcomes.add("refused")
    assert outcomes == {"frames", "refused"}


@pytest.mark.parametrize(
    ("codec", "ending"),
    [("libx264", "mp4"), ("libx264", "mkv"), ("libx264", "avi"), ("libx264", "ts"), ("libx265", "mp4"), ("libvpx-vp9", "mkv")],
)
def test_sparse_sampling_of_a_long_file_finds_the_right_frames(codec: str, ending: str, tmp_path: Path) -> None:
    clip = make_video(tmp_path / "clip.mp4", frames=250, gop=25, codec=codec)
    path = tmp_path / f"long.{ending}"
    videos.run_ffmpeg(path, "-i", str(repeat_clip(tmp_path / "source.mp4", clip, 12)), "-c", "copy")
    times_s = ffmpeg_times_s(path)
    assert len(times_s) == 3000
    for decode in (DecodeConfig(fps=0.11), DecodeConfig(sampling="frames", frames=7), DecodeConfig(fps=0.2, start_s=61.3, end_s=90.0)):
        samples = _samples(open_video(path, GEOMETRY, decode))
        assert len(samples) in (6, 7, 14)
        for time_s, frame in samples:
            at = _shown(times_s, time_s, 1e-6)
            assert times_s[at] == pytest.approx(time_s, abs=1e-6)
            assert read_number(frame) == at % 250


def test_memory_is_the_same_for_ten_and_for_sixty_minutes(tmp_path: Path) -> None:
    clip = make_clip(tmp_path / "clip.mp4", seconds=4)
    measured = {}
    for minutes in (10, 60):
        path = repeat_clip(tmp_path / f"{minutes}.mp4", clip, minutes * 15)
        measured[minutes] = measure_apart(path, {"fps": 0.1})
        assert measured[minutes]["frames"] == minutes * 6
        path.unlink()
    assert measured[60]["peak_bytes"] < 1.2 * measured[10]["peak_bytes"]
    # The imports weigh more than decoding does; without them the bound is the sharper one.
    assert measured[60]["growth_bytes"] < 1.2 * measured[10]["growth_bytes"] + 24 * 2**20
