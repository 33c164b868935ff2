"""What a file is, without reading it through: its header and its first frame."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from engine.types import MediaKind
from pipeline.video.container import (
    best_video_stream,
    check_regular_file,
    has_presentation_times,
    is_cover_art,
    open_container,
    refuse,
    refusing,
)
from pipeline.video.orientation import Orientation

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_FRAME_PACKETS = 2000
_HDR_TRANSFERS = {16: "PQ", 18: "HLG"}


@dataclass(frozen=True)
class VideoProbe:
    """What is known of a file before it is decoded.

    Attributes:
        path: the file.
        kind: "video" or "image".
        container, codec, pix_fmt: FFmpeg's names, or Pillow's for an image.
        width_px, height_px: size of a frame as shown, rotation applied.
        rotation_deg: clockwise turn that makes a stored frame upright; `mirrored` tells whether it is flipped as well.
        start_s: presentation time of the first frame, in the file's own clock.
        duration_s: from the first frame to the end of the last, as the header says; 0.0 for an image.
        fps: average frames per second; None where the file doesn't say.
        frames: estimate of the number of frames.
        tick_s: unit in which the file keeps times, in seconds.
        interlaced: whether the first frame is stored as two fields.
        video_streams: number of video streams; the best is read.
        warnings: everything noteworthy, in words.
    """

    path: str
    kind: MediaKind
    container: str
    codec: str
    pix_fmt: str
    width_px: int
    height_px: int
    rotation_deg: int = 0
    mirrored: bool = False
    start_s: float = 0.0
    duration_s: float = 0.0
    fps: float | None = None
    frames: int = 1
    tick_s: float = 0.0
    interlaced: bool = False
    video_streams: int = 0
    size_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def end_s(self) -> float:
        """Time at which the last frame ends, as the header says."""
        return self.start_s + self.duration_s


def probe(path: str | os.PathLike[str], timeout_s: float = 120.0) -> VideoProbe:
    """Look at a video or an image.

    Args:
        path: a local file.
        timeout_s: give up when one read takes longer.

    Raises:
        InputError: absent, empty, no video or image, audio only, or nothing in it decodes.
    """
    from pipeline.video.images import probe_image

    name = check_regular_file(path)
    image = probe_image(name)
    if image is not None:
        return image
    with refusing(name, "reading its header"), open_container(name, timeout_s) as container:
        stream = best_video_stream(container, name)
        return _probe_stream(name, container, stream)


def _probe_stream(name: str, container: InputContainer, stream: VideoStream) -> VideoProbe:
    header_end_s = _header_end_s(container, stream)
    tick = stream.time_base or Fraction(1, 1_000_000)
    rate = stream.average_rate or stream.guessed_rate or stream.base_rate
    fps = float(rate) if rate else None
    first = _first_frame(name, container, stream)
    start_s = float(first.pts * tick) if first.pts is not None else 0.0
    end_s = _last_packet_end_s(name) if header_end_s is None else header_end_s
    duration_s = max(0.0, end_s - start_s)
    orientation = Orientation.of(first)
    height_px, width_px = orientation.upright_size(first.height, first.width)
    videos = [s for s in container.streams.video if not is_cover_art(s)]
    return VideoProbe(
        path=name,
        kind="video",
        container=container.format.name,
        codec=stream.codec_context.codec.canonical_name,
        pix_fmt=first.format.name,
        width_px=width_px,
        height_px=height_px,
        rotation_deg=orientation.rotation_deg,
        mirrored=orientation.mirrored,
        start_s=start_s,
        duration_s=duration_s,
        fps=fps,
        frames=stream.frames or max(1, round(duration_s * (fps or 0.0))),
        tick_s=float(tick),
        interlaced=bool(first.interlaced_frame),
        video_streams=len(videos),
        size_bytes=os.path.getsize(name),
        warnings=tuple(_notes(stream, first, orientation, len(videos), header_end_s is None)),
    )


def _header_end_s(container: InputContainer, stream: VideoStream) -> float | None:
    """End of the video track in seconds, from the most specific place that tells; None when the header doesn't."""
    if stream.duration is not None and stream.time_base:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    tag = next((value for key, value in stream.metadata.items() if key.upper().startswith("DURATION")), None)
    if tag is not None:
        try:
            hours, minutes, seconds = tag.split(":")
            return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
        except ValueError:
            pass
    if container.duration is not None:
        return ((container.start_time or 0) + container.duration) / av.time_base
    return None


def _first_frame(name: str, container: InputContainer, stream: VideoStream) -> VideoFrame:
    stream.codec_context.thread_count = 1
    error: Exception | None = None
    for count, packet in enumerate(_packets(container, stream)):
        try:
            for frame in packet.decode():
                assert isinstance(frame, VideoFrame)
                if not has_presentation_times(container):
                    frame.pts = frame.dts
                return frame
        except av.FFmpegError as damage:
            error = damage
        if count >= FIRST_FRAME_PACKETS:
            break
    reason = f"no frame of its {stream.codec_context.name} stream can be decoded" + (f" ({error.strerror})" if error else "")  # type: ignore[attr-defined]
    raise refuse(name, reason, "check that the file plays, or convert it with ffmpeg")


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[av.Packet]:
    try:
        yield from container.demux(stream)
    except av.FFmpegError:
        return


def _last_packet_end_s(name: str) -> float:
    """End of the last packet, found by reading the whole file without decoding: live recordings have no length in their header."""
    end_s = 0.0
    with open_container(name, 120.0) as container:
        stream = best_video_stream(container, name)
        for packet in _packets(container, stream):
            if packet.pts is not None and packet.time_base:
                end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return end_s


def _notes(stream: VideoStream, first: VideoFrame, orientation: Orientation, videos: int, scanned: bool) -> Iterator[str]:
    if videos > 1:
        yield f"{videos} video streams; stream {stream.index}, the best ({first.width}x{first.height}), is read"
    if first.interlaced_frame:
        yield "interlaced: both fields of a frame are shown together, nothing is deinterlaced"
    if orientation.skewed:
        yield f"rotation by {orientation.stored_deg:g} degrees isn't a quarter turn; the nearest one is applied"
    aspect = stream.sample_aspect_ratio
    if aspect and abs(float(aspect) - 1.0) > 0.02:
        yield f"pixels aren't square ({aspect.numerator}:{aspect.denominator}); frames are used as stored"
    if (transfer := _HDR_TRANSFERS.get(int(first.color_trc))) is not None:
        yield f"high dynamic range ({transfer}); colours aren't tone-mapped"
    if scanned:
        yield "the header tells no length; found by reading the file through"


def count_keyframes(path: str) -> int:
    """Number of keyframes of the best stream: from the container's index, else by reading the file without decoding."""
    with refusing(path, "counting keyframes"), open_container(path, 120.0) as container:
        stream = best_video_stream(container, path)
        if stream.frames and len(stream.index_entries) >= stream.frames:
            return sum(entry.is_keyframe and not entry.is_discard for entry in stream.index_entries)
        return sum(packet.is_keyframe and not packet.is_discard and packet.pts is not None for packet in _packets(container, stream))
