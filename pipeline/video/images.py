"""Still images as blocks: whole for models that follow the aspect ratio, tiles and a thumbnail for those that want squares."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.blocks import BlockPlanner
from engine.geometry import FrameGeometry
from engine.types import FrameGroup, VideoBlock
from pipeline.video.config import DecodeConfig
from pipeline.video.container import LIBRARY_ERRORS, check_regular_file, refuse, refusing
from pipeline.video.probe import VideoProbe

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
_ORIENTATION_TAG = 0x0112


def probe_image(path: str) -> VideoProbe | None:
    """What a still image is; None when the file isn't one. Reads its header only."""
    with _pillow_warnings() as notes:
        found = _probe_image(path)
    return found and replace(found, warnings=(*found.warnings, *notes))


@contextmanager
def _pillow_warnings() -> Iterator[list[str]]:
    """Collects what Pillow complains of, in place of printing it."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            yield notes
        finally:
            notes += dict.fromkeys(f"image file: {str(warning.message).strip()}" for warning in caught)


def _probe_image(path: str) -> VideoProbe | None:
    try:
        image = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        return None
    except Image.DecompressionBombError as error:
        raise refuse(path, f"is too large an image ({error})", "scale it down") from error
    except LIBRARY_ERRORS:
        return None
    with image, refusing(path, "reading its header"):
        sideways = image.getexif().get(_ORIENTATION_TAG, 1) >= 5
        width_px, height_px = image.size[::-1] if sideways else image.size
        pictures = getattr(image, "n_frames", 1)
        return VideoProbe(
            path=path,
            kind="image",
            container=str(image.format).lower(),
            codec=str(image.format).lower(),
            pix_fmt=image.mode,
            width_px=width_px,
            height_px=height_px,
            size_bytes=os.path.getsize(path),
            warnings=(f"{pictures} pictures in one {image.format} file; the first is read",) if pictures > 1 else (),
        )


class ImageSource:
    """One image as groups; the same door as `VideoSource`."""

    decoder = "pillow"
    seconds_per_group: float | None = None

    def __init__(self, probe: VideoProbe, geometry: FrameGeometry, decode: DecodeConfig) -> None:
        self.probe = probe
        self.geometry = geometry.for_images().limited(decode.min_frame_px, decode.max_frame_px)
        self.frames_read = 0
        self.warnings = list(probe.warnings)
        if probe.width_px * probe.height_px > decode.max_source_px:
            limit = f"decode.max_source_px={decode.max_source_px}"
            raise refuse(probe.path, f"is {probe.width_px}x{probe.height_px} px, more than {limit}", "raise it, or scale the image down")
        with refusing(probe.path, "sizing it for the model"):
            self._columns, self._rows = self._grid()
            self.frame_size_px = self.geometry.target_size(probe.height_px, probe.width_px)

    def predicted_groups(self) -> int:
        """Groups this image makes: its tiles and thumbnail, or 1."""
        tiles = self._columns * self._rows
        return tiles + 1 if tiles > 1 else 1

    def predicted_tokens(self) -> int:
        """Tokens this image costs."""
        return self.predicted_groups() * self.geometry.group_tokens(*self.frame_size_px)

    def __iter__(self) -> Iterator[FrameGroup]:
        self.warnings = list(self.probe.warnings)
        self.frames_read = 0
        picture = np.ascontiguousarray(self._load().transpose(2, 0, 1))[None]
        self.frames_read = 1
        with refusing(self.probe.path, "resizing"):
            for tile in self._tiles(picture):
                yield FrameGroup(np.repeat(tile, self.geometry.frames_per_group, axis=0))

    def blocks(self, block_tokens: int, media: int = 0, first_group: int = 0) -> Iterator[VideoBlock]:
        """The image in blocks of at most `block_tokens`, whole groups each, from a group on."""
        groups = itertools.islice(self, first_group, None)
        return BlockPlanner(block_tokens, self.geometry.group_tokens).blocks(groups, kind="image", media=media, first_group=first_group)

    def _grid(self) -> tuple[int, int]:
        if self.geometry.fixed_px is None or self.geometry.max_tiles <= 1:
            return 1, 1
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        side = self.geometry.fixed_px
        return get_optimal_tiled_canvas((self.probe.height_px, self.probe.width_px), (side, side), 1, self.geometry.max_tiles)

    def _tiles(self, picture: np.ndarray) -> Iterator[np.ndarray]:
        if self._columns * self._rows == 1:
            yield self.geometry.resize(picture)
            return
        from torchvision.transforms.v2 import functional as tvf

        side = self.geometry.fixed_px or 0
        canvas = tvf.resize(
            torch.from_numpy(picture), [side * self._rows, side * self._columns], interpolation=self.geometry.resample, antialias=True
        ).numpy()
        for row in range(self._rows):
            for column in range(self._columns):
                yield canvas[..., row * side : (row + 1) * side, column * side : (column + 1) * side]
        yield self.geometry.resize(picture)

    def _load(self) -> np.ndarray:
        refused = refusing(self.probe.path, "decoding the image", "copy or upload it again")
        with refused, _pillow_warnings() as notes, Image.open(self.probe.path, formats=FORMATS) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):
                self.warnings.append(f"16-bit grey ({upright.mode}) was reduced to 8 bits")
                upright = Image.fromarray((np.asarray(upright).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
            picture = np.asarray(upright.convert("RGB"))
        self.warnings += [note for note in notes if note not in self.warnings]
        return picture


def open_image(path: str | os.PathLike[str], geometry: FrameGeometry, decode: DecodeConfig | None = None) -> ImageSource:
    """An image, ready to be read as groups or blocks; EXIF orientation applied.

    Args:
        path: a local JPEG, PNG, WebP, BMP or TIFF file.
        geometry: the model's frame rules. With `fixed_px`: at most `max_tiles` tiles, then a thumbnail when there is more than
            one, a group each, as the processor cuts them. Otherwise one group: the image repeated to fill it.
        decode: only its pixel limits matter here.

    Raises:
        InputError: absent, no image, damaged, or too large.
    """
    name = check_regular_file(path)
    found = probe_image(name)
    if found is None:
        raise refuse(name, "isn't an image of a known kind", f"convert it to one of {', '.join(FORMATS)}")
    return ImageSource(found, geometry, decode or DecodeConfig())
