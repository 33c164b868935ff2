"""A small picture of each video, for people who browse answers."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from engine.errors import ReelkeepError
from engine.geometry import FrameGeometry
from engine.types import VideoBlock
from pipeline.storage import Storage
from pipeline.video.config import DecodeConfig
from pipeline.video.source import open_media

THUMBNAIL_PX = 160 * 90
_GEOMETRY = FrameGeometry(frames_per_group=1, unit_px=4, min_px=64, max_px=THUMBNAIL_PX, max_tiles=1)
_ONE_FRAME = DecodeConfig(sampling="frames", frames=1, stall_timeout_s=20.0)

log = logging.getLogger("reelkeep.report")


def thumbnails(videos: Iterable[tuple[str, str]], storage: Storage, threads: int = 2) -> dict[str, str]:
    """A JPEG of one frame of each video, as data: URIs; a video that can't be opened has none, which is logged.

    Args:
        videos: (video_id, uri) pairs.
        storage: what reads them; an object in a bucket is downloaded whole for the time it takes.
    """

    def picture(video: tuple[str, str]) -> tuple[str, str | None]:
        try:
            return video[0], _picture(video[1], storage)
        except ReelkeepError as error:
            log.warning("no thumbnail: %s", error, extra={"video_id": video[0]})
            return video[0], None

    with ThreadPoolExecutor(threads) as pool:
        return {video_id: uri for video_id, uri in pool.map(picture, videos) if uri is not None}


def _picture(uri: str, storage: Storage) -> str | None:
    with storage.spool(uri) as path:
        for part in open_media(path, _GEOMETRY, _ONE_FRAME).blocks(1):
            if not isinstance(part, VideoBlock):  # a text of an interleaved prompt
                continue
            image = io.BytesIO()
            Image.fromarray(part.frames[0].transpose(1, 2, 0)).save(image, "JPEG", quality=70)
            return "data:image/jpeg;base64," + base64.b64encode(image.getvalue()).decode()
    return None
