"""With a budget as large as the input, block-wise prefill equals transformers' one-shot forward."""

from __future__ import annotations

import pytest
import torch

from engine.types import Question, VideoBlock
from tests.support.prompts import (
    KINDS,
    QUESTION,
    SECONDS_PER_GROUP,
    Media,
    last_logits,
    load_reference,
    make_media,
    reference_inputs,
    stream,
)

pytestmark = pytest.mark.equivalence
FAMILIES = ["qwen2_5_vl", "internvl3_5"]
GROUP_TOKENS = {"qwen2_5_vl": 6, "internvl3_5": 18}


@pytest.fixture(scope="module")
def reference(folders, load_engine):
    """reference(family): transformers' own model with its own attention."""
    models = {}

    def get(family):
        if family not in models:
            models[family] = load_reference(folders[family], load_engine(family).adapter)
        return models[family]

    return get


@pytest.mark.parametrize("block_groups", [1, 3, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_one_shot(family, kind, block_groups, folders, load_engine, reference):
    engine = load_engine(family, budget_tokens=600, block_tokens=GROUP_TOKENS[family] * block_groups)
    items = make_media(engine, KINDS[kind])
    inputs = reference_inputs(folders[family], items)
    with torch.no_grad():
        expected = reference(family)(**inputs, use_cache=False).logits[0, -1]
    compressed = engine.prefill(stream(engine, items))
    assert compressed.trace.total_tokens < 600 and compressed.cache.evictions == 0
    assert (last_logits(engine, compressed) - expected).abs().max() < 1e-4
    assert expected.std() > 0.05, "logits too flat to tell anything"


@pytest.mark.parametrize("family", FAMILIES)
def test_unaligned_blocks_with_room_enough_equal_one_shot(family, folders, load_engine, reference):
    engine = load_engine(family, budget_tokens=600, block_tokens=13, alignment="none")
    items = make_media(engine, "vti")
    with torch.no_grad():
        expected = reference(family)(**reference_inputs(folders[family], items), use_cache=False).logits[0, -1]
    compressed = engine.prefill(stream(engine, items))
    sizes = {b.block_tokens for b in compressed.trace.blocks[1:-1]}
    assert sizes >= {13}
    assert (last_logits(engine, compressed) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["eager", "fused"])
def test_both_kernels_equal_one_shot(attention, folders, load_engine, reference):
    from engine import Engine, EngineConfig

    engine = Engine.load(
        EngineConfig(model=str(folders["qwen2_5_vl"]), device="cpu", attention=attention, budget_tokens=600, block_tokens=12)
    )
    items = make_media(engine, "v")
    with torch.no_grad():
        expected = reference("qwen2_5_vl")(**reference_inputs(folders["qwen2_5_vl"], items), use_cache=False).logits[0, -1]
    assert (last_logits(engine, engine.prefill(stream(engine, items))) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_a_plain_loop_over_the_full_cache(family, folders, load_engine, reference):
    engine = load_engine(family, budget_tokens=600, block_tokens=20, answer={"max_new_tokens": 12})
    items = make_media(engine, KINDS["mixed"])
    inputs = reference_inputs(folders[family], items)
    model, stop = reference(family), engine.adapter.stop_ids()
    ids, positions = inputs.pop("input_ids"), inputs.pop("position_ids")
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < 12:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits[0, -1]
            token = int(logits.argmax())
            if token in stop:
                break
            tokens.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], -1)
            positions = torch.cat([positions, positions[..., -1:].amax() + torch.ones_like(positions[..., -1:])], -1)
    answer = engine.answer(engine.prefill(stream(engine, items)), [Question(QUESTION)])[0]
    assert answer.text == engine.adapter.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert answer.answer_tokens == len(tokens) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_tokens_equal_the_processors(family, folders, load_engine):
    """What the engine feeds the model, text and placeholders counted, is what the checkpoint's processor would feed it."""
    engine = load_engine(family, budget_tokens=900, block_tokens=20)
    items = make_media(engine, KINDS["mixed"])
    expected = reference_inputs(folders[family], items)["input_ids"].shape[1]
    compressed = engine.prefill(stream(engine, items))
    answer = engine.answer(compressed, [Question(QUESTION)])[0]
    assert compressed.trace.total_tokens + answer.prompt_tokens == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_features_block_by_block_equal_all_at_once(family, load_engine):
    engine = load_engine(family)
    media = next(m for m in make_media(engine, "v", groups=9) if isinstance(m, Media))
    per_group = engine.geometry.frames_per_group

    def encode(first: int, last: int) -> torch.Tensor:
        frames = media.frames[first * per_group : last * per_group]
        with torch.inference_mode():
            return engine.adapter.encode(VideoBlock(frames, tuple(range(first, last)), first)).embeds

    whole = encode(0, 9)
    assert (torch.cat([encode(0, 4), encode(4, 5), encode(5, 9)]) - whole).abs().max() < 1e-5
    assert whole.std() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_turned_back_are_the_keys_before_rope(family, load_engine, reference):
    """`unrotate` against the projection's own output, at the positions the cache recorded."""
    engine = load_engine(family, budget_tokens=600, block_tokens=40)
    attention, raw = engine.adapter.text_model.layers[1].self_attn, []
    normalise = getattr(attention, "k_norm", torch.nn.Identity())

    def remember(module, inputs, output):
        raw.append(normalise(output.view(*output.shape[:2], -1, attention.head_dim))[0].transpose(0, 1))

    hook = attention.k_proj.register_forward_hook(remember)
    try:
        cache = engine.prefill(stream(engine, make_media(engine, "vi"))).cache
    finally:
        hook.remove()
    turned_back = engine.adapter.unrotate(cache.keys(1), cache.positions(1))
    assert (turned_back - torch.cat(raw, 1)).abs().max() < 1e-4
    assert (cache.keys(1) - torch.cat(raw, 1)).abs().max() > 0.1, "nothing was turned"


@pytest.mark.parametrize("kind", ["video", "image"])
def test_pixels_equal_the_processors(kind, folders, load_engine):
    """uint8 frames turn into the very patches that transformers' processor makes."""
    from transformers import AutoProcessor

    engine = load_engine("qwen2_5_vl")
    media = make_media(engine, "v" if kind == "video" else "i")[0]
    processor = AutoProcessor.from_pretrained(folders["qwen2_5_vl"])
    if kind == "video":
        expected = processor.video_processor(videos=[torch.from_numpy(media.frames)], return_tensors="pt").pixel_values_videos
        frames = media.frames
    else:
        expected = processor.image_processor(images=[torch.from_numpy(media.frames[0])], return_tensors="pt").pixel_values
        frames = media.frames.repeat(2, axis=0)
    from engine.models.base import normalised

    pixels = normalised(frames, processor.video_processor, torch.device("cpu"), torch.float32)
    patches, _ = engine.adapter._patches(pixels, len(frames) // 2)
    assert patches.shape == expected.shape and (patches - expected).abs().max() < 1e-5


def test_position_rule_in_worked_numbers(load_engine):
    """Prefix of 10 tokens, then a 2 x 3 grid every 0.7 s at 2 positions a second, then text at max + 1."""
    engine = load_engine("qwen2_5_vl")
    from engine.models.base import Encoded, PositionCursor, advance

    index = torch.arange(24)
    piece = Encoded(torch.zeros(24, 64), torch.ones(24, dtype=torch.bool), index // 6, index % 6)
    block = VideoBlock(frames=torch.zeros(8, 3, 56, 84, dtype=torch.uint8).numpy(), times_s=(3.0, 3.7, 4.4, 5.1), seconds_per_group=0.7)
    cursor = PositionCursor(next=10, media_start=10, media_time_s=3.0)
    positions = engine.adapter.positions(block, piece, cursor)
    # floor(0, 1.4, 2.8, 4.2) = 0, 1, 2, 4
    assert positions[::6, 0].tolist() == [10, 11, 12, 14]
    assert positions[:6, 1].tolist() == [10, 10, 10, 11, 11, 11]
    assert positions[:6, 2].tolist() == [10, 11, 12, 10, 11, 12]
    assert advance(cursor, positions).next == 15
    irregular = VideoBlock(frames=block.frames, times_s=(3.0, 3.2, 9.0, 20.5), seconds_per_group=None)
    assert engine.adapter.positions(irregular, piece, cursor)[::6, 0].tolist() == [10, 10, 22, 45]
    # A group interval of half a second must not round to zero, whatever the library's own rule does.
    half = VideoBlock(frames=block.frames, times_s=(0.0, 0.5, 1.0, 1.5), seconds_per_group=0.5)
    assert engine.adapter.positions(half, piece, cursor)[::6, 0].tolist() == [10, 11, 12, 13]
    assert SECONDS_PER_GROUP == 0.7
