"""Decoded frames in presentation order from one file: survives damage, can be moved to a keyframe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from pipeline.video import pulse
from pipeline.video.config import DecodeConfig
from pipeline.video.container import best_video_stream, has_presentation_times, open_container, refuse, words
from pipeline.video.probe import VideoProbe
from pipeline.video.reader import GAPS, LONG_GAP_S, fault_note
from pipeline.video.sampling import tolerance_s


class FrameStream:
    """A stream of decoded frames in presentation order that survives damage and can be moved."""

    def __init__(self, probe: VideoProbe, decode: DecodeConfig, *, keyframes_only: bool = False) -> None:
        self._probe = probe
        self._timeout_s = decode.stall_timeout_s
        self._keyframes_only = keyframes_only
        self._threads = decode.threads
        self._container, self._stream = self._open()
        self._tick = self._stream.time_base or Fraction(1, av.time_base)
        self._frame_s = 1.0 / probe.fps if probe.fps else 0.0
        dated = has_presentation_times(self._container)
        self._by_decoding_time = not dated and not keyframes_only
        self._delay_ticks = 0 if dated else round(probe.start_s / float(self._tick))
        self._unanswered = 0
        self._may_seek = self._load_index()
        self._last_s: float | None = None
        self._next_dts: int | None = None
        self.packets_end_s = probe.start_s
        self._faults: dict[str, tuple[int, float]] = {}
        self._broken_off: str | None = None
        self._restart()

    def _open(self) -> tuple[InputContainer, VideoStream]:
        container = open_container(self._probe.path, self._timeout_s)
        stream = best_video_stream(container, self._probe.path)
        context = stream.codec_context
        # Frame threading has hung together with torch; slices of one frame haven't.
        context.thread_type, context.thread_count = "SLICE", self._threads
        if self._keyframes_only:
            context.skip_frame = "NONKEY"
        return container, stream

    def _load_index(self) -> bool:
        """Whether the container tells where keyframes are; without an index a jump may land between them, so there is none."""
        if "matroska" in self._container.format.name:
            try:
                # Matroska reads its index only once something is sought.
                self._container.seek(self._ticks(self._probe.start_s), stream=self._stream, backward=True)
            except av.FFmpegError:
                self._container.close()
                self._container, self._stream = self._open()
                return False
        return len(self._stream.index_entries) > 1

    def __enter__(self) -> FrameStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def _restart(self) -> None:
        self.ended = False
        self._frames = self._decoded()

    def next_frame(self) -> VideoFrame | None:
        """The next frame, or None at the end."""
        return next(self._frames, None)

    def time_s(self, frame: VideoFrame) -> float:
        """Presentation time in seconds."""
        return float((frame.pts or 0) * self._tick)

    def end_s(self, frame: VideoFrame) -> float:
        """Time until which a frame is shown when none follows."""
        shown_s = float(frame.duration * self._tick) if frame.duration else self._frame_s
        return self.time_s(frame) + shown_s

    def worth_seeking(self, wanted_s: float, after: VideoFrame | None) -> bool:
        """Whether a keyframe lies between the frame last decoded and the moment wanted, so that frames can be left undecoded."""
        if not self._may_seek:
            return False
        position_s = self._probe.start_s if after is None else self.time_s(after)
        if wanted_s - position_s <= 2 * self._frame_s:
            return False
        entries = self._stream.index_entries
        found = entries.search_timestamp(self._ticks(wanted_s), backward=True, any_frame=False)
        return found >= 0 and float(entries[found].timestamp * self._tick) > position_s

    def seek(self, wanted_s: float, held: VideoFrame | None) -> tuple[VideoFrame | None, VideoFrame | None]:
        """Move to the last keyframe before a moment; back to `held`, and never again, when that lands too late.

        Returns:
            The frame now held (None unless seeking failed) and the one after it.
        """
        faults = dict(self._faults)
        self.jump(wanted_s)
        ahead = self.next_frame()
        if ahead is not None and self.time_s(ahead) <= wanted_s + tolerance_s(self._probe):
            return None, ahead
        self._may_seek, self._faults, self._broken_off = False, faults, None
        back_s = self._probe.start_s if held is None else self.time_s(held)
        self.jump(back_s)
        ahead = self.next_frame()
        if ahead is None or self.time_s(ahead) > back_s + tolerance_s(self._probe):
            self._container.seek(0, backward=True)
            self._restart()
            ahead = self.next_frame()
        return None, ahead

    def jump(self, to_s: float) -> None:
        """Go on decoding from the last keyframe at or before a moment."""
        self._last_s = self._next_dts = None
        self._container.seek(self._ticks(to_s), stream=self._stream, backward=True)
        self._restart()

    def _ticks(self, seconds: float) -> int:
        return int((seconds + tolerance_s(self._probe)) / float(self._tick))

    def _decoded(self) -> Iterator[VideoFrame]:
        waiting_since = time.monotonic()
        for packet in self._packets():
            pulse.beat()
            if packet is not None and packet.pts is not None:
                self._note_packet(packet)
            frames = [] if self._leave_out(packet) else self._decode_packet(packet)
            for frame in frames:
                if self._in_order(frame):
                    waiting_since = time.monotonic()
                    yield frame
                    waiting_since = time.monotonic()
            if time.monotonic() - waiting_since > self._timeout_s:
                reason = f"gave no frame for {self._timeout_s:g} s after {self._last_s or self._probe.start_s:.1f} s of video"
                raise refuse(self._probe.path, reason, "check that the file plays, or raise decode.stall_timeout_s")
        if self._keyframes_only and self._unanswered > 0:
            self._faults["keyframes that gave no picture"] = self._unanswered, self._probe.start_s
        self.ended = True

    def _decode_packet(self, packet: av.Packet | None) -> list[VideoFrame]:
        if self._keyframes_only and packet is not None and packet.pts is not None:
            self._unanswered += not packet.is_discard
            if self._delay_ticks and packet.dts is not None:
                packet.pts = packet.dts + self._delay_ticks
        try:
            frames = self._stream.codec_context.decode(packet)
            self._unanswered -= len(frames)
            return frames
        except av.FFmpegError:
            self._fault("damaged packets that couldn't be decoded", self._position_s(packet))
            return []

    def _leave_out(self, packet: av.Packet | None) -> bool:
        if not self._keyframes_only or packet is None or packet.pts is None or packet.is_keyframe:
            return False
        # The index still knows a keyframe whose data was overwritten.
        entries = self._stream.index_entries
        found = entries.search_timestamp(packet.dts or 0, backward=True, any_frame=True) if self._may_seek else -1
        if found >= 0 and entries[found].timestamp == packet.dts and entries[found].is_keyframe and not packet.is_discard:
            self._unanswered += 1
        return True

    def _note_packet(self, packet: av.Packet) -> None:
        """Keep track of how far the file reaches, and of stretches in which it holds nothing."""
        self.packets_end_s = max(self.packets_end_s, float(((packet.pts or 0) + (packet.duration or 0)) * self._tick))
        if packet.dts is not None:
            if self._next_dts is not None and float((packet.dts - self._next_dts) * self._tick) > LONG_GAP_S:
                self._fault(GAPS, float(self._next_dts * self._tick))
            self._next_dts = packet.dts + (packet.duration or 0)

    def _packets(self) -> Iterator[av.Packet | None]:
        try:
            yield from self._container.demux(self._stream)
        except av.FFmpegError as error:
            self._broken_off = words(error)
            yield None

    def _in_order(self, frame: VideoFrame) -> bool:
        if self._by_decoding_time:
            ascends = frame.dts is not None and (self._last_s is None or float(frame.dts * self._tick) > self._last_s)
            frame.pts = frame.dts if ascends else round(((self._last_s or 0.0) + self._frame_s) / float(self._tick))
        if frame.pts is None:
            after_s = self._probe.start_s - self._frame_s if self._last_s is None else self._last_s
            frame.pts = round((after_s + self._frame_s) / float(self._tick))
            self._fault("frames without a time, given one from the frame rate", after_s)
        time_s = self.time_s(frame)
        if self._last_s is not None and time_s < self._last_s:
            self._fault("frames left out because their time lies before the frame in front of them", time_s)
            return False
        if frame.is_corrupt:
            self._fault("frames decoded from broken data", time_s)
        self._last_s = time_s
        return True

    def _position_s(self, packet: av.Packet | None) -> float:
        if packet is not None and packet.pts is not None:
            return float(packet.pts * self._tick)
        return self._probe.start_s if self._last_s is None else self._last_s

    def notes(self) -> Iterator[str]:
        """What went wrong on the way, in words."""
        for what, (count, first_s) in self._faults.items():
            yield fault_note(what, count, first_s)
        if self._broken_off:
            yield f"reading broke off ({self._broken_off})"

    def _fault(self, what: str, time_s: float) -> None:
        count, first_s = self._faults.get(what, (0, time_s))
        self._faults[what] = count + 1, min(first_s, time_s)
