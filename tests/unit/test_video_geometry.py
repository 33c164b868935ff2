"""Frames and images come out exactly as the models' own processors would resize and cut them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLVideoProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

from engine.errors import InputError
from engine.geometry import FrameGeometry
from pipeline.video.config import DecodeConfig
from pipeline.video.images import open_image
from pipeline.video.source import open_media, open_video
from tests.support.videos import make_video

QWEN = FrameGeometry(frames_per_group=2, unit_px=28, min_px=4 * 28 * 28, max_px=20 * 28 * 28)
INTERNVL = FrameGeometry(frames_per_group=1, unit_px=28, fixed_px=56, max_tiles=6)


def _picture(height_px: int, width_px: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height_px, width_px, 3), np.uint8)


def _frames(count: int, height_px: int, width_px: int) -> np.ndarray:
    return np.stack([_picture(height_px, width_px, seed).transpose(2, 0, 1) for seed in range(count)])


@pytest.mark.parametrize("size", [(120, 160), (97, 131), (480, 270), (28, 28), (20, 300), (84, 140)])
def test_resize_equals_the_qwen_video_processor(size: tuple[int, int]) -> None:
    frames = _frames(2, *size)
    processor = Qwen2VLVideoProcessor(
        size={"shortest_edge": QWEN.min_px, "longest_edge": QWEN.max_px}, do_rescale=False, do_normalize=False, do_convert_rgb=False
    )
    theirs = processor(videos=[torch.from_numpy(frames)], return_tensors="pt")
    grid_t, grid_h, grid_w = theirs["video_grid_thw"][0].tolist()
    patches = theirs["pixel_values_videos"].reshape(grid_t, grid_h // 2, grid_w // 2, 2, 2, 3, 2, 14, 14)
    pixels = patches.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(2, 3, grid_h * 14, grid_w * 14)
    ours = QWEN.resize(frames)
    assert ours.dtype == np.uint8 and ours.shape[-2:] == QWEN.target_size(*size)
    np.testing.assert_array_equal(ours, pixels.numpy())


@pytest.mark.parametrize("size", [(120, 160), (97, 131), (56, 56), (20, 300)])
def test_resize_equals_the_internvl_video_processor(size: tuple[int, int]) -> None:
    frames = _frames(3, *size)
    processor = InternVLVideoProcessor(size={"height": 56, "width": 56}, do_rescale=False, do_normalize=False, do_convert_rgb=False)
    theirs = processor(videos=[torch.from_numpy(frames)], return_tensors="pt")["pixel_values_videos"][0]
    np.testing.assert_array_equal(INTERNVL.resize(frames), theirs.numpy())


def _their_tiles(picture: np.ndarray) -> np.ndarray:
    """What the InternVL image processor makes of a picture, before normalisation."""
    try:
        from transformers import GotOcr2ImageProcessorFast as Processor
    except ImportError:
        from transformers import GotOcr2ImageProcessor as Processor
    processor = Processor(
        size={"height": 56, "width": 56},
        crop_to_patches=True,
        min_patches=1,
        max_patches=INTERNVL.max_tiles,
        do_rescale=False,
        do_normalize=False,
    )
    return processor(images=[Image.fromarray(picture)], return_tensors="pt")["pixel_values"].numpy()


@pytest.mark.parametrize("size", [(112, 168), (56, 56), (300, 100), (90, 91), (40, 400), (1000, 1000)])
def test_tiles_and_thumbnail_equal_the_internvl_image_processor(tmp_path: Path, size: tuple[int, int]) -> None:
    picture = _picture(*size)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    source = open_image(tmp_path / "picture.png", INTERNVL)
    groups = list(source)
    theirs = _their_tiles(picture)
    assert source.predicted_groups() == len(groups) == len(theirs)
    np.testing.assert_array_equal(np.concatenate([g.frames for g in groups]), theirs)


def test_a_qwen_image_is_one_group_that_repeats_it(tmp_path: Path) -> None:
    Image.fromarray(_picture(100, 150)).save(tmp_path / "picture.png")
    source = open_image(tmp_path / "picture.png", QWEN)
    (block,) = source.blocks(block_tokens=64)
    assert block.kind == "image" and block.seconds_per_group is None and block.groups == 1
    assert block.frames.shape == (2, 3, *QWEN.target_size(100, 150))
    np.testing.assert_array_equal(block.frames[0], block.frames[1])
    assert source.predicted_tokens() == QWEN.group_tokens(*block.frames.shape[-2:])


def test_tiles_are_planned_into_blocks_of_whole_tiles(tmp_path: Path) -> None:
    Image.fromarray(_picture(112, 168)).save(tmp_path / "picture.png")
    blocks = list(open_image(tmp_path / "picture.png", INTERNVL).blocks(block_tokens=8))
    assert [b.groups for b in blocks] == [2, 2, 2, 1] and [b.first_group for b in blocks] == [0, 2, 4, 6]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    picture = np.zeros((64, 96, 3), np.uint8)
    picture[:32, :48] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(picture).save(tmp_path / "picture.png", exif=exif)
    source = open_image(tmp_path / "picture.png", replace(QWEN, unit_px=16, max_px=10**6))
    (group,) = source
    with Image.open(tmp_path / "picture.png") as image:
        turned = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}[orientation]
        expected = np.asarray(image if turned is None else image.transpose(turned))
    assert (source.probe.height_px, source.probe.width_px) == expected.shape[:2]
    np.testing.assert_array_equal(group.frames[0], expected.transpose(2, 0, 1))


@pytest.mark.parametrize(("mode", "name"), [("L", "g.png"), ("RGBA", "a.webp"), ("P", "p.png"), ("CMYK", "c.jpg"), ("I;16", "i.png")])
def test_every_pixel_mode_becomes_rgb(tmp_path: Path, mode: str, name: str) -> None:
    if mode == "I;16":
        image = Image.fromarray((np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64))
    else:
        image = Image.fromarray(_picture(64, 64)).convert(mode)
    image.save(tmp_path / name)
    source = open_media(tmp_path / name, QWEN)
    (group,) = source
    assert group.frames.shape[:2] == (2, 3) and group.frames.dtype == np.uint8 and group.frames.std() > 5
    assert any("16-bit" in w for w in source.warnings) == (mode == "I;16")


def test_several_pictures_in_one_file_are_noted(tmp_path: Path) -> None:
    pictures = [Image.fromarray(_picture(64, 64, seed)) for seed in range(3)]
    pictures[0].save(tmp_path / "moving.webp", save_all=True, append_images=pictures[1:])
    source = open_media(tmp_path / "moving.webp", QWEN)
    assert len(list(source)) == 1 and "3 pictures in one WEBP file; the first is read" in source.warnings


def test_a_damaged_image_is_refused_by_name(tmp_path: Path) -> None:
    Image.fromarray(_picture(200, 200)).save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:6000])
    with pytest.raises(InputError, match=r"half\.jpg: decoding the image failed: .*truncated.*; copy or upload it again"):
        list(open_image(tmp_path / "half.jpg", QWEN))


def test_images_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (300, 200)).save(tmp_path / "picture.png")
    with pytest.raises(InputError, match=r"300x200 px, more than decode\.max_source_px=1000; raise it"):
        open_image(tmp_path / "picture.png", QWEN, DecodeConfig(max_source_px=1000))
    Image.new("RGB", (2100, 10)).save(tmp_path / "strip.png")
    with pytest.raises(InputError, match=r"strip\.png: sizing it for the model failed: .*aspect ratio"):
        open_image(tmp_path / "strip.png", QWEN)


def test_images_and_videos_are_told_apart_by_content(tmp_path: Path) -> None:
    video = make_video(tmp_path / "video.jpg.mp4", frames=5).rename(tmp_path / "video.jpg")
    Image.new("RGB", (64, 64)).save(tmp_path / "picture.png")
    image = (tmp_path / "picture.png").rename(tmp_path / "picture.mp4")
    assert open_media(video, QWEN).probe.kind == "video"
    assert open_media(image, QWEN).probe.kind == "image"
    with pytest.raises(InputError, match=r"picture\.mp4: is an image; open it as one"):
        open_video(image, QWEN)
    with pytest.raises(InputError, match=r"video\.jpg: isn't an image of a known kind; convert it"):
        open_image(video, QWEN)


def test_pixel_limits_of_the_settings_override_the_processor_s(tmp_path: Path) -> None:
    path = make_video(tmp_path / "v.mp4", frames=5, height_px=280, width_px=280)
    small = open_video(path, QWEN, DecodeConfig(max_frame_px=4 * 28 * 28))
    assert small.frame_size_px == (56, 56) and next(iter(small)).frames.shape[-2:] == (56, 56)
    fixed = open_video(path, INTERNVL, DecodeConfig(max_frame_px=4 * 28 * 28))
    assert any("have no effect" in w for w in fixed.warnings)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tiff", "a.bmp"])
def test_random_damage_gives_a_picture_or_a_refusal_and_never_anything_else(tmp_path: Path, name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(_picture(80, 120)).save(tmp_path / name, exif=exif)
    whole = (tmp_path / name).read_bytes()
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice([1, 10, 100])):
            # Headers matter most: half of the hits go there.
            data[chance.randrange(chance.choice([200, len(data)]))] = chance.randrange(256)
        path = tmp_path / f"{seed}_{name}"
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(1, len(data))])])
        try:
            assert len(list(open_media(path, QWEN))) >= 1
        except InputError as error:
            assert str(error).startswith(f"{path}: ") and "; " in str(error)
