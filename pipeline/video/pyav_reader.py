"""Decodes with PyAV (FFmpeg's libraries): real timestamps, edit lists, damage survived, memory of a few frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from av.video.frame import VideoFrame

from pipeline.video.config import DecodeConfig
from pipeline.video.container import refuse, refusing
from pipeline.video.frame_stream import FrameStream
from pipeline.video.orientation import Orientation
from pipeline.video.probe import VideoProbe
from pipeline.video.reader import Sample
from pipeline.video.sampling import tolerance_s

LONGEST_HOLD_S = 3600.0
"""A frame isn't repeated over a longer leap of the timestamps: that is damage, and would fill the budget with one picture."""


class PyAVReader:
    """One pass over one file; see `FrameReader`."""

    name = "pyav"

    def __init__(self, probe: VideoProbe, decode: DecodeConfig) -> None:
        self.warnings: list[str] = []
        self.read_to_s = probe.start_s
        self.exhausted = False
        self._probe = probe
        self._decode = decode
        self._first_size: tuple[int, int] | None = None
        self._orientation: Orientation | None = None
        self._rotation_deg = 0

    def at(self, times_s: Iterable[float]) -> Iterator[Sample]:
        """See `FrameReader.at`. Skips over keyframe intervals in which nothing is wanted, where the container has an index."""
        tolerance = tolerance_s(self._probe)
        with refusing(self._probe.path, "decoding"), FrameStream(self._probe, self._decode) as stream:
            held = ahead = None
            picture: Sample | None = None
            for wanted_s in times_s:
                if stream.worth_seeking(wanted_s, ahead if ahead is not None else held):
                    held, ahead = stream.seek(wanted_s, held)
                while held is None or ahead is not None:
                    if ahead is not None and held is not None and stream.time_s(ahead) > wanted_s + tolerance:
                        break
                    held, ahead = held if ahead is None else ahead, stream.next_frame()
                    if held is None and ahead is None:
                        break
                if held is None:
                    break
                held_s = stream.time_s(held)
                if ahead is None and wanted_s > held_s + tolerance and wanted_s >= stream.end_s(held):
                    break
                if ahead is not None and wanted_s - held_s > LONGEST_HOLD_S:
                    self.warnings.append(f"timestamps leap from {held_s:.3f} s to {stream.time_s(ahead):.3f} s; what follows was left out")
                    break
                if picture is None or picture[0] != held_s:
                    picture = held_s, self._upright_rgb(held)
                self.read_to_s = stream.end_s(held)
                yield picture
            self._close(stream, held if ahead is None else None)

    def keyframes(self, start_s: float, end_s: float) -> Iterator[Sample]:
        """See `FrameReader.keyframes`."""
        tolerance = tolerance_s(self._probe)
        with refusing(self._probe.path, "decoding"), FrameStream(self._probe, self._decode, keyframes_only=True) as stream:
            if stream.worth_seeking(start_s, None):
                stream.jump(start_s)
            while (frame := stream.next_frame()) is not None:
                time_s = stream.time_s(frame)
                if time_s >= end_s:
                    break
                if time_s >= start_s - tolerance:
                    yield time_s, self._upright_rgb(frame)
            self._close(stream, None)
            self.read_to_s = stream.packets_end_s

    def _close(self, stream: FrameStream, last: VideoFrame | None) -> None:
        self.exhausted = stream.ended
        if last is not None:
            self.read_to_s = stream.end_s(last)
        self.warnings.extend(stream.notes())

    def _upright_rgb(self, frame: VideoFrame) -> np.ndarray:
        if frame.width * frame.height > self._decode.max_source_px:
            raise refuse(
                self._probe.path,
                f"has frames of {frame.width}x{frame.height} px, more than decode.max_source_px={self._decode.max_source_px}",
                "raise it, or scale the video down",
            )
        if self._first_size is None:
            self._first_size = frame.width, frame.height
        width, height = self._first_size
        if (frame.width, frame.height) != self._first_size:
            note = f"frames change size within the stream; all are scaled to the first one's {width}x{height}"
            if note not in self.warnings:
                self.warnings.append(note)
        # Looking at a frame's side data ties the frame into a reference cycle that only the garbage collector frees: not for every frame.
        if self._orientation is None or frame.rotation != self._rotation_deg:
            self._orientation, self._rotation_deg = Orientation.of(frame), frame.rotation
        return self._orientation.apply(frame.to_ndarray(format="rgb24", width=width, height=height))
