"""Decodes with decord, where it can be trusted: times and frame numbers come from the container, read with PyAV."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av
import numpy as np

from pipeline.video import pulse
from pipeline.video.config import DecodeConfig
from pipeline.video.container import best_video_stream, open_container, words
from pipeline.video.probe import VideoProbe
from pipeline.video.reader import GAPS, LONG_GAP_S, DecoderRefusedError, Sample, fault_note
from pipeline.video.sampling import tolerance_s

INDEXED_CONTAINERS = ("mov", "matroska", "avi")
"""Where decord was seen to give the frame asked for; in MPEG-TS it gives another, without an error."""


class DecordReader:
    """One pass over one file; see `FrameReader`.

    decord counts times from 0 whatever the file says, returns frames that an edit list hides, and says nothing when it repeats a frame
    in place of a damaged one. So its own times are never used, and a file is refused in which its frames can't be matched to packets.

    Raises:
        DecoderRefusedError: decord isn't installed, can't open the file, or would give wrong frames or times.
    """

    name = "decord"
    warnings: list[str]

    def __init__(self, probe: VideoProbe, decode: DecodeConfig) -> None:
        self.read_to_s = probe.start_s
        self.exhausted = False
        self._probe = probe
        self._position = 0
        if decode.sampling == "keyframes":
            raise DecoderRefusedError("decord decodes other frames besides")
        if probe.container.split(",")[0] not in INDEXED_CONTAINERS:
            raise DecoderRefusedError(f"decord gives wrong frames from {probe.container} files")
        if probe.mirrored:
            raise DecoderRefusedError("decord doesn't mirror frames as the file asks")
        if probe.width_px * probe.height_px > decode.max_source_px:
            raise DecoderRefusedError("the frames are larger than decode.max_source_px")
        self._times_s, self._end_s, self.warnings = _packet_times_s(probe, decode)
        try:
            import decord

            decord.logging.set_level(decord.logging.QUIET)
            self._video = decord.VideoReader(probe.path, ctx=decord.cpu(0), num_threads=decode.threads)
        except ImportError as error:
            raise DecoderRefusedError("decord isn't installed") from error
        except Exception as error:
            raise DecoderRefusedError(f"decord can't open it ({_complaint(error)})") from error
        if len(self._video) != len(self._times_s):
            raise DecoderRefusedError(f"decord counts {len(self._video)} frames, the file holds {len(self._times_s)}")

    def at(self, times_s: Iterable[float]) -> Iterator[Sample]:
        """See `FrameReader.at`."""
        tolerance = tolerance_s(self._probe)
        picture: Sample | None = None
        for wanted_s in times_s:
            index = max(0, bisect.bisect_right(self._times_s, wanted_s + tolerance) - 1)
            if index == len(self._times_s) - 1 and wanted_s > self._times_s[index] + tolerance and wanted_s >= self._end_s:
                break
            self.read_to_s = self._times_s[index]
            if picture is None or self._position != index + 1:
                picture = self._times_s[index], self._frame(index)
            yield picture
        else:
            return
        self.exhausted, self.read_to_s = True, self._end_s

    def keyframes(self, start_s: float, end_s: float) -> Iterator[Sample]:
        """See `FrameReader.keyframes`."""
        raise DecoderRefusedError("decord decodes other frames besides")

    def _frame(self, index: int) -> np.ndarray:
        try:
            # Never by its own seeking or skipping: both give another frame now and then (open groups of pictures; a race with its thread).
            for _ in range(index - self._position):
                pulse.beat()
                self._video.next()
            frame = self._video.next().asnumpy()
            self._position = index + 1
        except Exception as error:
            raise DecoderRefusedError(f"decord fails at frame {index} ({_complaint(error)})") from error
        if frame.shape[:2] != (self._probe.height_px, self._probe.width_px):
            raise DecoderRefusedError(f"decord gives frames of {frame.shape[1]}x{frame.shape[0]} px")
        return frame


def _complaint(error: Exception) -> str:
    """decord's message without its clock, its source file and the path."""
    return re.sub(r"^(\[[\d:]+\] )?\S+:\d+: (\[.*?\] )?", "", words(error))[:80]


def _packet_times_s(probe: VideoProbe, decode: DecodeConfig) -> tuple[list[float], float, list[str]]:
    """Presentation times of the best stream's packets, ascending, the end of the last, and notes on gaps."""
    ticks: list[tuple[int, int]] = []
    with open_container(probe.path, decode.stall_timeout_s) as container:
        stream = best_video_stream(container, probe.path)
        tick = stream.time_base or Fraction(1, av.time_base)
        try:
            for packet in container.demux(stream):
                pulse.beat()
                if packet.size == 0 and packet.pts is None:
                    continue
                if packet.is_discard or packet.is_corrupt or packet.pts is None:
                    raise DecoderRefusedError("decord mishandles its hidden (edit list), damaged or undated frames")
                if probe.container == "avi" and packet.pts != packet.dts:
                    raise DecoderRefusedError("the times of its reordered frames are only known while decoding (AVI)")
                ticks.append((packet.pts, packet.duration or 0))
        except av.FFmpegError as error:
            raise DecoderRefusedError(f"decord would lose a damaged file ({words(error)})") from error
    if not ticks:
        raise DecoderRefusedError("no frames found")
    ticks.sort()
    gaps = [float(end * tick) for end, next_ in zip(map(sum, ticks), ticks[1:], strict=False) if (next_[0] - end) * tick > LONG_GAP_S]
    notes = [fault_note(GAPS, len(gaps), gaps[0])] if gaps else []
    frame_s = 1.0 / probe.fps if probe.fps else 0.0
    last, shown = ticks[-1]
    return [float(pts * tick) for pts, _ in ticks], float(last * tick) + (float(shown * tick) or frame_s), notes
