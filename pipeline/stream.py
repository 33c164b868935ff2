"""One video as a stream of messages: what it is, its blocks, what happened. The same stream whoever runs it, wherever."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from engine.errors import InputError, ReelkeepError
from engine.geometry import FrameGeometry
from engine.types import TextPart, VideoBlock
from pipeline.config import JobConfig
from pipeline.storage import Storage, split_s3
from pipeline.task import VideoTask
from pipeline.video import pulse
from pipeline.video.probe import VideoProbe
from pipeline.video.prompt import is_prompt
from pipeline.video.sampling import window_s
from pipeline.video.source import open_media

log = logging.getLogger("reelkeep.stream")

Lost = Literal["", "worker", "reader"]


class StageError(ReelkeepError):
    """A video's failure, with the stage it happened in: fetch, probe, decode, prefill or answer.

    Attributes:
        stage: where.
        reason: one line, for people.
        lost: the process that can't be used any more: "worker" (device out of memory, CUDA context lost), "reader" (the process that
            decoded has died), or "" when all is well but for this video.
        retry: another run may succeed without anything being mended here (storage out of reach).
    """

    def __init__(self, stage: str, reason: str, lost: Lost = "", retry: bool = False) -> None:
        super().__init__(stage, reason, lost, retry)
        self.stage, self.reason, self.lost, self.retry = stage, reason, lost, retry

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@contextmanager
def stage(name: str, video_id: str, lost: Callable[[Exception], Lost] = lambda error: "") -> Iterator[None]:
    """Give every error raised inside a stage and one line of reason; an unforeseen one is logged with its trace."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        if not isinstance(error, ReelkeepError):
            log.exception("unforeseen error", extra={"video_id": video_id, "stage": name})
        raise StageError(name, one_line(error), lost(error), getattr(error, "worth_retrying", False)) from error


def one_line(error: BaseException) -> str:
    """An error in one line: a user's mistake as it says, anything else with its kind in front."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ReelkeepError) else f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class StreamHead:
    """First message: what the file is, once it has been fetched and opened.

    Attributes:
        groups: groups the whole stream should give, by the file's header.
        frame_size_px: (height, width) of its frames.
        span_s: seconds from the first group's start to the last one's end.
    """

    probe: VideoProbe
    groups: int
    frame_size_px: tuple[int, int]
    span_s: float


@dataclass(frozen=True)
class StreamTail:
    """Last message: who decoded, and everything that happened besides the plain path."""

    decoder: str
    warnings: tuple[str, ...]


Message = StreamHead | VideoBlock | TextPart | StreamTail
BlockReader = Callable[[VideoTask, FrameGeometry, JobConfig, int], Iterator[Message]]
"""`read_video`, or something that gives the same from elsewhere."""


def read_video(task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0) -> Iterator[Message]:
    """Fetch, open and decode one video: a head, its blocks in order, a tail. Holds one block at a time.

    Args:
        first_group: groups to leave out at the start, because they were read before.

    Raises:
        StageError: fetching, probing or decoding failed, or no frame came for `decode.stall_timeout_s`.
    """
    with ExitStack() as spooled:
        with stage("fetch", task.video_id):
            path = spooled.enter_context(Storage(config.storage).spool(task.uri))
        timeout_s = config.decode.stall_timeout_s

        def stalled() -> StageError:
            return StageError(
                "decode",
                f"{task.uri}: the decoder gave no sign of life for {timeout_s:g} s and was cut off; "
                "check that the file plays, or raise decode.stall_timeout_s",
            )

        yield from pulse.watched(_decoded(str(path), task, geometry, config, first_group), timeout_s, stalled)


def _decoded(path: str, task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int) -> Iterator[Message]:
    with naming(path, task.uri):
        with stage("probe", task.video_id):
            if is_prompt(path) and split_s3(task.uri) is not None:
                # What comes from a bucket mustn't choose which of this machine's files are read.
                raise InputError(f"{task.uri}: is an interleaved prompt, which names other files; copy it and its images to this machine")
            source = open_media(path, geometry, config.decode)
            groups, spacing_s = source.predicted_groups(), source.seconds_per_group
            first_s, end_s = window_s(source.probe, config.decode)
            span_s = max(0.0, min(end_s, source.probe.end_s) - first_s) if spacing_s is None else groups * spacing_s
            head = StreamHead(source.probe, groups, source.frame_size_px, span_s)
        yield head
        with stage("decode", task.video_id):
            yield from source.blocks(config.engine.block_tokens, first_group=first_group)
    yield StreamTail(source.decoder, tuple(source.warnings))


@contextmanager
def naming(path: str, uri: str) -> Iterator[None]:
    """Let errors speak of the address that the user knows, not of the download's name in the spool."""
    try:
        yield
    except StageError as error:
        raise StageError(error.stage, error.reason.replace(path, uri), error.lost, error.retry) from error


class VideoStream:
    """The consumer's end: the head at once, blocks on demand, the tail at the end.

    Args:
        messages: a stream as `read_video` yields it.
        on_block: called with each block before the consumer gets it.

    Attributes:
        head: what the file is.
        tail: who decoded and what happened; None until the blocks are exhausted.
    """

    def __init__(self, messages: Iterator[Message], on_block: Callable[[VideoBlock], None] = lambda block: None) -> None:
        self._messages = messages
        self._on_block = on_block
        self.tail: StreamTail | None = None
        head = next(messages)
        assert isinstance(head, StreamHead)
        self.head = head

    def blocks(self) -> Iterator[VideoBlock | TextPart]:
        """Yield the blocks in order, and an interleaved prompt's texts between them."""
        for message in self._messages:
            if isinstance(message, VideoBlock | TextPart):
                if isinstance(message, VideoBlock):
                    self._on_block(message)
                yield message
            elif isinstance(message, StreamTail):
                self.tail = message

    def close(self) -> None:
        """Stop reading; whoever decodes is told to stop as well."""
        close = getattr(self._messages, "close", None)
        if close is not None:
            close()
