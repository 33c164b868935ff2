"""Opens a local media file with PyAV, guarded: only known containers, only that one file, errors in words."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from engine.errors import InputError, ReelkeepError

# A file's content, not its name, chooses FFmpeg's reader, and playlists (concat, HLS, DASH) make it open other files. Only these may.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,flv,live_flv,asf,ogg,ivf,mxf,nut,rm,dv,vob,mp3,wav,aac,flac,aiff"

LIBRARY_ERRORS = (
    av.FFmpegError,
    OSError,
    ValueError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    LookupError,
    EOFError,
    SyntaxError,
    struct.error,
    zlib.error,
)
"""What FFmpeg's and Pillow's readers raise on broken files; a TypeError or AttributeError would be a mistake of ours."""


def refuse(path: str, reason: str, remedy: str) -> InputError:
    """The one form of a file's refusal: file, reason, remedy."""
    return InputError(f"{path}: {reason}; {remedy}")


def words(error: BaseException) -> str:
    """What a library's error says, without the file's name and number."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]


@contextmanager
def refusing(path: str, doing: str, remedy: str = "check that the file plays, or convert it with ffmpeg") -> Iterator[None]:
    """Turn whatever a media library raises into an `InputError` that names the file."""
    try:
        yield
    except ReelkeepError:
        raise
    except LIBRARY_ERRORS as error:
        raise refuse(path, f"{doing} failed: {words(error)}", remedy) from error


def check_regular_file(path: str | os.PathLike[str]) -> str:
    """The path as text, once it is known to be a readable file with something in it.

    Raises:
        InputError: absent, a folder, a pipe or device, empty, or unreadable.
    """
    name = os.fspath(path)
    try:
        status = os.stat(name)
    except (OSError, ValueError) as error:
        raise refuse(name, f"can't be read: {words(error)}", "check the path and its permissions") from error
    if not stat.S_ISREG(status.st_mode):
        raise refuse(name, "isn't a regular file", "give the path of a video or image file")
    if status.st_size == 0:
        raise refuse(name, "is empty (0 bytes)", "copy or upload it again")
    if not os.access(name, os.R_OK):
        raise refuse(name, "can't be read: permission denied", "check its permissions")
    return name


def open_container(path: str, timeout_s: float) -> InputContainer:
    """Open for reading.

    Args:
        path: a local file, already checked.
        timeout_s: give up when opening, or one read, takes longer.

    Raises:
        InputError: not a known container, damaged beyond opening, or too slow.
    """
    try:
        return av.open(
            "file:" + str(Path(path).absolute()),
            options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"},
            timeout=timeout_s,
            metadata_errors="replace",
        )
    except av.error.ExitError as error:
        raise refuse(path, f"took longer than {timeout_s:g} s to open", "check the disk, or raise decode.stall_timeout_s") from error
    except av.error.ArgumentError as error:
        raise refuse(path, "isn't in a container that can be read", "convert it: ffmpeg -i FILE out.mp4") from error
    except av.error.InvalidDataError as error:
        reason = "isn't a video, or is damaged or cut off so that its index is missing"
        raise refuse(path, reason, "copy or upload it again, or convert it with ffmpeg") from error
    except LIBRARY_ERRORS as error:
        raise refuse(path, f"can't be opened: {words(error)}", "check that the file plays, or convert it with ffmpeg") from error


def is_cover_art(stream: VideoStream) -> bool:
    """Whether the stream is a picture attached to an audio file."""
    return bool(stream.disposition & Disposition.attached_pic)


def best_video_stream(container: InputContainer, path: str) -> VideoStream:
    """The stream a player would show.

    Raises:
        InputError: there is none (audio only), or its codec is unknown.
    """
    streams = [stream for stream in container.streams.video if not is_cover_art(stream)]
    if not streams:
        held = "audio only" if container.streams.audio else "no video stream"
        raise refuse(path, f"has nothing to see ({held})", "leave it out, or give the file that has the picture")
    best = container.streams.best("video")
    chosen = best if isinstance(best, VideoStream) and not is_cover_art(best) else streams[0]
    if chosen.codec_context is None:
        raise refuse(path, "is in a codec that can't be decoded", "convert it: ffmpeg -i FILE -c:v libx264 out.mp4")
    return chosen


def has_presentation_times(container: InputContainer) -> bool:
    """False for AVI: FFmpeg guesses the times, wrongly with B-frames; decoding times are delayed by the reordering, but in order."""
    return container.format.name != "avi"
