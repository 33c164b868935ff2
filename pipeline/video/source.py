"""One video as ordered, timestamped frame groups, with the memory of a few frames however slow the consumer."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator

import numpy as np

from engine.blocks import BlockPlanner
from engine.geometry import FrameGeometry
from engine.types import FrameGroup, VideoBlock
from pipeline.video.config import DecodeConfig
from pipeline.video.container import refuse, refusing
from pipeline.video.decord_reader import DecordReader
from pipeline.video.images import ImageSource
from pipeline.video.probe import VideoProbe, probe
from pipeline.video.prompt import PromptSource, is_prompt
from pipeline.video.pyav_reader import PyAVReader
from pipeline.video.reader import DecoderRefusedError, FrameReader, Sample
from pipeline.video.sampling import predicted_frames, spacing_s, wanted_times_s, window_s

SHORTFALL_S = 0.5
"""A file that ends this much before its header says is called cut off."""


def choose_reader(found: VideoProbe, decode: DecodeConfig, warnings: list[str]) -> FrameReader:
    """The decoder for one file; a fallback is written into `warnings`.

    auto is PyAV. Right frames rank above speed: asked for scattered frames, decord gave others now and then (MPEG-TS, HEVC, fragmented and
    variable-rate files), so here it reads on frame by frame; and it hides edit lists, loses damaged files and can't read AV1 or GIF.
    By `python -m jobs.bench decode`, 10 minutes of 720p H.264 with a keyframe every 2 s, processor time as a ratio to PyAV at 1 fps, and
    memory over the imports:

        1 fps      pyav 1.00,  77 MiB    decord 2.65, 362 MiB   (1.81 by its own seeking, which gives wrong frames)
        64 frames  pyav 0.16,  72 MiB    decord 2.46, 439 MiB
        keyframes  pyav 0.20,  75 MiB
    """
    if decode.decoder == "decord":
        try:
            return DecordReader(found, decode)
        except DecoderRefusedError as refused:
            warnings.append(f"decoded by pyav instead of decord: {refused}")
    return PyAVReader(found, decode)


class VideoSource:
    """Frame groups of one video, at the size the model wants.

    Iterate it, or its `blocks`. Nothing is decoded before it is asked for, and only the group in hand is kept.

    Attributes:
        probe: what the file is.
        geometry: the model's frame rules, the configured pixel limits applied.
        seconds_per_group: nominal spacing of groups; None for keyframes, whose spacing is irregular.
        decoder: name of the decoder in use.
        warnings: everything besides the plain path; grows while iterating, complete at exhaustion.
        frames_read: frames handed out so far, padding not counted, those left out at the start counted.
        frame_size_px: (height, width) of every frame.
    """

    def __init__(self, found: VideoProbe, geometry: FrameGeometry, decode: DecodeConfig) -> None:
        self.probe = found
        self.geometry = geometry.limited(decode.min_frame_px, decode.max_frame_px)
        self._decode = decode
        window_s(found, decode)
        spacing = spacing_s(found, decode)
        self.seconds_per_group = None if spacing is None else spacing * geometry.frames_per_group
        with refusing(found.path, "sizing its frames for the model"):
            self.frame_size_px = self.geometry.target_size(found.height_px, found.width_px)
        self._begin()

    def _begin(self) -> None:
        self.frames_read = 0
        self.warnings = [*self.probe.warnings, *_config_notes(self.probe, self.geometry, self._decode)]
        self._reader: FrameReader | None = choose_reader(self.probe, self._decode, self.warnings)
        self.decoder = self._reader.name

    def predicted_groups(self) -> int:
        """Groups that iterating will give, by the header: for planning, longest first, and the position limit."""
        return math.ceil(predicted_frames(self.probe, self._decode) / self.geometry.frames_per_group)

    def predicted_tokens(self) -> int:
        """Visual tokens that iterating will give, by the header, group texts included."""
        return self.predicted_groups() * self.geometry.group_tokens(*self.frame_size_px)

    def __iter__(self) -> Iterator[FrameGroup]:
        """All groups."""
        return self.groups()

    def groups(self, first: int = 0) -> Iterator[FrameGroup]:
        """Groups in order, from one on; the last is padded by repeating its last frame, as the model's processor does.

        Args:
            first: groups to leave out, undecoded where the file lets itself be sought; the rest are the same as without.

        Raises:
            InputError: damaged from the start, stalled, or nothing in it between start and end.
        """
        size = self.geometry.frames_per_group
        samples = self._samples(first * size)
        while chunk := list(itertools.islice(samples, size)):
            if missing := size - len(chunk):
                self.warnings.append(f"the last group was filled by repeating its last frame {missing} time{'s' * (missing > 1)}")
                chunk += [chunk[-1]] * missing
            frames = np.stack([frame.transpose(2, 0, 1) for _, frame in chunk])
            with refusing(self.probe.path, "resizing"):
                resized = self.geometry.resize(frames)
            yield FrameGroup(resized, chunk[0][0])

    def blocks(self, block_tokens: int, media: int = 0, first_group: int = 0) -> Iterator[VideoBlock]:
        """The video in blocks of at most `block_tokens`, whole groups each, from a group on."""
        planner = BlockPlanner(block_tokens, self.geometry.group_tokens)
        groups = self.groups(first_group)
        return planner.blocks(groups, seconds_per_group=self.seconds_per_group, kind="video", media=media, first_group=first_group)

    def _samples(self, first: int) -> Iterator[Sample]:
        if self._reader is None:
            self._begin()
        self.frames_read = first
        reader, self._reader = self._reader, None
        assert reader is not None
        try:
            yield from self._count(self._read(reader, first))
        except DecoderRefusedError as refused:
            self.warnings.append(f"decoded by pyav instead of decord from frame {self.frames_read} on: {refused}")
            reader = PyAVReader(self.probe, self._decode)
            self.decoder = reader.name
            yield from self._count(self._read(reader, self.frames_read))
        self.warnings.extend(reader.warnings)
        self._check_end(reader)

    def _read(self, reader: FrameReader, skip: int) -> Iterator[Sample]:
        if self._decode.sampling == "keyframes":
            return itertools.islice(reader.keyframes(*window_s(self.probe, self._decode)), skip, None)
        return reader.at(itertools.islice(wanted_times_s(self.probe, self._decode), skip, None))

    def _count(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self.frames_read += 1
            yield sample

    def _check_end(self, reader: FrameReader) -> None:
        if self.frames_read == 0:
            raise refuse(self.probe.path, "gave no frame between start and end", "widen decode.start_s and decode.end_s, or check the file")
        wanted_to_s = min(self.probe.end_s, self._decode.end_s if self._decode.end_s is not None else math.inf)
        if reader.exhausted and wanted_to_s - reader.read_to_s > SHORTFALL_S:
            self.warnings.append(f"cut off: frames end at {reader.read_to_s:.3f} s, though the file's header says {self.probe.end_s:.3f} s")


def _config_notes(found: VideoProbe, geometry: FrameGeometry, decode: DecodeConfig) -> Iterator[str]:
    if decode.sampling == "fps" and found.fps and decode.fps > found.fps * 1.01:
        yield f"decode.fps={decode.fps:g} exceeds the file's {found.fps:g}: frames repeat"
    if geometry.fixed_px is not None and (decode.min_frame_px is not None or decode.max_frame_px is not None):
        yield f"decode.min_frame_px and max_frame_px have no effect: the model takes {geometry.fixed_px}x{geometry.fixed_px} frames"


def open_video(path: str | os.PathLike[str], geometry: FrameGeometry, decode: DecodeConfig | None = None) -> VideoSource:
    """A video, ready to be read as groups or blocks.

    Args:
        path: a local file.
        geometry: the model's frame rules.
        decode: which frames, how large, by which decoder; default `DecodeConfig()`.

    Raises:
        InputError: no video, or one that can't be read as configured; names file, reason and remedy.
    """
    decode = decode or DecodeConfig()
    found = probe(path, decode.stall_timeout_s)
    if found.kind == "image":
        raise refuse(found.path, "is an image", "open it as one (open_image)")
    return VideoSource(found, geometry, decode)


def open_media(
    path: str | os.PathLike[str], geometry: FrameGeometry, decode: DecodeConfig | None = None
) -> VideoSource | ImageSource | PromptSource:
    """A video or an image, whichever the file's content says; or an interleaved prompt, by its name.

    Raises:
        InputError: as `open_video` and `open_image` do.
    """
    decode = decode or DecodeConfig()
    if is_prompt(path):
        return PromptSource(path, geometry, decode)
    found = probe(path, decode.stall_timeout_s)
    return ImageSource(found, geometry, decode) if found.kind == "image" else VideoSource(found, geometry, decode)
