"""An interleaved prompt: texts and images in order, as a JSON document that names the images. For benchmarks of many images."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.geometry import FrameGeometry
from engine.types import TextPart, VideoBlock
from pipeline.video.config import DecodeConfig
from pipeline.video.container import check_regular_file, refuse
from pipeline.video.images import ImageSource, open_image
from pipeline.video.probe import VideoProbe

SUFFIX = ".prompt"
MAX_BYTES = 64 * 2**20
_FORM = 'write {"parts": [{"text": "..."}, {"image": "path"}, ...]} with at least one image'


def is_prompt(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name says that it is an interleaved prompt."""
    return os.fspath(path).endswith(SUFFIX)


def prompt_document(parts: Sequence[dict[str, str]]) -> bytes:
    """The document of parts, each {"text": ...} or {"image": path}."""
    return json.dumps({"parts": list(parts)}, ensure_ascii=False).encode()


class PromptSource:
    """An interleaved prompt as blocks and texts; the same door as `VideoSource` and `ImageSource`.

    Each image is a media item of its own. A relative path starts at the document's folder.

    Raises:
        InputError: no such document, or an image that can't be read.
    """

    decoder = "pillow"
    seconds_per_group: float | None = None

    def __init__(self, path: str | os.PathLike[str], geometry: FrameGeometry, decode: DecodeConfig) -> None:
        name = check_regular_file(path)
        self._parts: list[str | ImageSource] = [
            part if isinstance(part, str) else open_image(Path(name).parent / part, geometry, decode) for part in _parts(name)
        ]
        self._images = [part for part in self._parts if isinstance(part, ImageSource)]
        largest = max(self._images, key=lambda image: image.predicted_tokens())
        self.geometry, self.frame_size_px = largest.geometry, largest.frame_size_px
        size_bytes = sum(image.probe.size_bytes for image in self._images)
        self.probe = VideoProbe(
            path=name,
            kind="image",
            container="prompt",
            codec=largest.probe.codec,
            pix_fmt=largest.probe.pix_fmt,
            width_px=largest.probe.width_px,
            height_px=largest.probe.height_px,
            frames=len(self._images),
            size_bytes=size_bytes,
        )

    @property
    def warnings(self) -> list[str]:
        """What was noticed about any of the images so far, each once."""
        return list(dict.fromkeys(note for image in self._images for note in image.warnings))

    def predicted_groups(self) -> int:
        """Groups of all images."""
        return sum(image.predicted_groups() for image in self._images)

    def predicted_tokens(self) -> int:
        """Visual tokens of all images."""
        return sum(image.predicted_tokens() for image in self._images)

    def blocks(self, block_tokens: int, media: int = 0, first_group: int = 0) -> Iterator[VideoBlock | TextPart]:
        """Texts and blocks in order, from a group on; a text right before that group comes, what stands before it doesn't."""
        before = 0
        for part in self._parts:
            if isinstance(part, str):
                if before >= first_group:
                    yield TextPart(part)
                continue
            groups = part.predicted_groups()
            if before + groups > first_group:
                yield from part.blocks(block_tokens, media, max(0, first_group - before))
            before, media = before + groups, media + 1


def _parts(name: str) -> list[str | Path]:
    """Texts and image paths of a document."""
    if os.path.getsize(name) > MAX_BYTES:
        raise refuse(name, f"is larger than {MAX_BYTES} bytes", "split the prompt")
    try:
        document: Any = json.loads(Path(name).read_bytes())
        parts = [_part(name, part) for part in document["parts"]]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refuse(name, f"isn't an interleaved prompt ({type(error).__name__})", _FORM) from None
    if not any(isinstance(part, Path) for part in parts):
        raise refuse(name, "shows no image", _FORM)
    return parts


def _part(name: str, part: Any) -> str | Path:
    (kind, value), *more = part.items()
    if more or kind not in ("text", "image") or not isinstance(value, str):
        raise refuse(name, f"has a part that is neither a text nor an image: {part!r:.80}", _FORM)
    if kind == "image" and "://" in value:
        raise refuse(name, f"names {value!r:.200}, which is no local file", "copy the images to this machine")
    value.encode()  # a lone surrogate is no text
    return value if kind == "text" else Path(value)
