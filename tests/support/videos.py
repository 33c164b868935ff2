"""Makes small videos whose every frame shows its own number, and broken files of every kind."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
from av.video.stream import VideoStream

BITS = (4, 3)
"""Rows and columns of the cells that spell a frame's number, white for 1, lowest bit first."""


def numbered_frame(number: int, height_px: int, width_px: int) -> np.ndarray:
    """(height_px, width_px, 3) uint8 RGB showing `number` (below 4096)."""
    rows, columns = BITS
    cells = np.array([(number >> bit) & 1 for bit in range(rows * columns)], np.uint8).reshape(rows, columns) * 255
    picture = np.repeat(np.repeat(cells, -(-height_px // rows), axis=0), -(-width_px // columns), axis=1)[:height_px, :width_px]
    return np.repeat(picture[..., None], 3, axis=2)


def read_number(frame: np.ndarray) -> int:
    """The number that a (height, width, 3) or (3, height, width) frame shows, at any size."""
    grey = frame.mean(axis=0 if frame.shape[0] == 3 else 2)
    rows, columns = BITS
    height, width = grey.shape
    number = 0
    for bit in range(rows * columns):
        row, column = divmod(bit, columns)
        y, x = int((row + 0.5) * height / rows), int((column + 0.5) * width / columns)
        number |= int(grey[y - 1 : y + 2, x - 1 : x + 2].mean() > 127) << bit
    return number


def make_video(
    path: Path,
    frames: int = 50,
    fps: int = 25,
    height_px: int = 96,
    width_px: int = 128,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    gop: int = 10,
    times: Sequence[Fraction] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    audio: bool = False,
) -> Path:
    """Write a video of numbered frames.

    Args:
        times: presentation time of each frame in seconds; default: evenly, at `fps`.
        gop: frames from keyframe to keyframe.
        audio: add a silent track.
    """
    if options is None:
        options = {"preset": "ultrafast", "bf": "2"} if codec == "libx264" else {}
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        assert isinstance(stream, VideoStream)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = height_px, width_px, pix_fmt, gop
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 12800)
        sound = container.add_stream("aac", rate=8000) if audio else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, height_px, width_px), format="rgb24")
            if times is None:
                frame.pts, frame.time_base = number, Fraction(1, fps)
            else:
                frame.pts, frame.time_base = round(times[number] * 12800), Fraction(1, 12800)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            _add_silence(container, sound, frames / fps)
    return path


def _add_silence(container: av.container.OutputContainer, sound: av.AudioStream, seconds: float) -> None:
    for block in range(max(1, int(seconds * 8000) // 1024)):
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate, silence.pts, silence.time_base = 8000, block * 1024, Fraction(1, 8000)
        container.mux(sound.encode(silence))
    container.mux(sound.encode(None))


def variable_times(frames: int) -> list[Fraction]:
    """Presentation times whose spacing changes all the time: 20, 40, 200 ms and a pause of 1.5 s."""
    steps = [Fraction(1, 50), Fraction(1, 25), Fraction(1, 5), Fraction(1, 50), Fraction(3, 2)]
    times = [Fraction(0)]
    while len(times) < frames:
        times.append(times[-1] + steps[len(times) % len(steps)])
    return times


def make_variable_rate(path: Path, frames: int = 40) -> Path:
    """A video of variable frame rate."""
    return make_video(path, frames, times=variable_times(frames))


def make_oriented(path: Path, source: Path, *options: str) -> Path:
    """Remux with a display matrix, e.g. "-display_rotation", "90" or "-display_hflip"."""
    return run_ffmpeg(path, *options, "-i", str(source), "-c", "copy")


def make_truncated(path: Path, source: Path, share: float) -> Path:
    """The first `share` of a file's bytes."""
    data = source.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def make_damaged(path: Path, source: Path, start: float, end: float) -> Path:
    """A file with zeros between two shares of its bytes."""
    data = bytearray(source.read_bytes())
    low, high = int(len(data) * start), int(len(data) * end)
    data[low:high] = bytes(high - low)
    path.write_bytes(data)
    return path


def make_audio_only(path: Path) -> Path:
    """Two seconds of silence."""
    with av.open(str(path), "w") as container:
        _add_silence(container, container.add_stream("aac", rate=8000), 2.0)
    return path


def run_ffmpeg(path: Path, *arguments: str) -> Path:
    """Write `path` with the ffmpeg program."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *arguments, str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


def ffmpeg_times_s(path: Path) -> list[float]:
    """ffmpeg's own list of presentation times of the best video stream, in seconds, in the file's own clock."""
    return [time_s for time_s, _ in _ffmpeg_list(path)]


def ffmpeg_end_s(path: Path) -> float:
    """When ffmpeg lets the last frame end, in seconds."""
    time_s, shown_s = _ffmpeg_list(path)[-1]
    return time_s + shown_s


def _ffmpeg_list(path: Path) -> list[tuple[float, float]]:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "quiet", "-copyts", "-i", str(path), "-an", "-sn", "-dn", "-fps_mode", "passthrough"]
    done = subprocess.run([*command, "-enc_time_base", "demux", "-f", "framecrc", "-"], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    unit = next((Fraction(line.split(":")[1].strip()) for line in lines if line.startswith("#tb 0")), Fraction(1))
    rows = [line.split(",") for line in lines if line and not line.startswith("#")]
    return [(float(int(row[2]) * unit), float(int(row[3]) * unit)) for row in rows]


def ffmpeg_frames(path: Path, height_px: int, width_px: int) -> np.ndarray:
    """ffmpeg's own frames of the best video stream, upright: (frames, height_px, width_px, 3) uint8 RGB."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "quiet", "-i", str(path), "-an", "-sn", "-dn", "-fps_mode", "passthrough"]
    done = subprocess.run([*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, timeout=120)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height_px, width_px, 3)
