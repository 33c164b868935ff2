"""What a checkpoint takes in memory, told from its config.json alone: no weights, no torch and no transformers, so a plan costs milliseconds.

What is exact is counted: parameters, keys and values, sizes of frames. What is alive besides at the height of a step is bounded from above
by counting tensors, for the fused attention kernels and KeyDiff; the policies `coverage` and `leverage` take more for a moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.geometry import FrameGeometry

ENTRY_FIELD_BYTES = 4
PUBLISHED = Path(__file__).with_name("published_models.json")
BUNDLED = Path(__file__).parent / "bundled" / "qwen2_5_vl_tiny"
FRAME_TEXT = "\nFrame1000: "

Config = Mapping[str, Any]

_SIZES = (
    "layers",
    "kv_heads",
    "head_dim",
    "heads",
    "hidden",
    "intermediate",
    "vocabulary",
    "max_positions",
    "parameters",
    "patches_per_token",
)


def kv_bytes(dimensions: tuple[int, int, int], tokens: int, element_bytes: int) -> int:
    """Bytes of keys and values of `tokens` tokens in every layer; `dimensions` are (layers, kv_heads, head_dim)."""
    layers, kv_heads, head_dim = dimensions
    return 2 * layers * kv_heads * head_dim * element_bytes * tokens


def peak_kv_bytes(dimensions: tuple[int, int, int], budget_tokens: int, block_tokens: int, element_bytes: int) -> int:
    """Largest number of KV bytes that exist at once: every layer's budget, and the block in one layer (L * M + b entries)."""
    layers, kv_heads, head_dim = dimensions
    return 2 * kv_heads * head_dim * element_bytes * (layers * budget_tokens + block_tokens)


@dataclass(frozen=True)
class Stage:
    """What is alive for each patch at one moment in the vision tower: numbers of the model's dtype, and of float32."""

    own: int
    float32: int = 0


@dataclass(frozen=True)
class Footprint:
    """The sizes of one checkpoint.

    Attributes:
        model_type: family, by the checkpoint's own word.
        layers, kv_heads, head_dim, heads, hidden, intermediate, vocabulary: of the language model.
        max_positions: rotary positions it was made for.
        positions_per_s: positions that a second of video takes; None where each token takes one.
        axes: rotary position axes.
        parameters: of the whole model; tied ones once.
        patches_per_token: patches that become one visual token.
        stages: moments of the vision tower, the largest of which is its peak.
        geometry: frame rules (number of tiles and resampling left at their defaults).
    """

    model_type: str
    layers: int
    kv_heads: int
    head_dim: int
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_positions: int
    positions_per_s: float | None
    axes: int
    parameters: int
    patches_per_token: int
    stages: tuple[Stage, ...]
    geometry: FrameGeometry

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim)."""
        return self.layers, self.kv_heads, self.head_dim

    def vision_bytes(self, visual_tokens: int, element_bytes: int) -> int:
        """Most that is alive in the vision tower while it encodes a block, its input and output included."""
        patch = max(stage.own * element_bytes + stage.float32 * 4 for stage in self.stages)
        return visual_tokens * self.patches_per_token * patch

    def language_bytes(self, tokens: int, element_bytes: int) -> int:
        """Most that is alive in one decoder layer while tokens pass through it, keys and values that are kept not counted."""
        wide = max(self.hidden, self.heads * self.head_dim)
        mlp = element_bytes * (3 * self.intermediate + 7 * self.hidden)
        attention = element_bytes * 8 * wide + 12 * wide  # two partial results are merged in float32
        return tokens * max(mlp, attention)

    def eviction_bytes(self, budget_tokens: int, block_tokens: int, element_bytes: int) -> int:
        """A layer's entries in one piece, and their keys in float32, twice: what scoring takes for a moment."""
        entry = self.head_dim * (2 * element_bytes + 8) + self._description_bytes
        return (budget_tokens + block_tokens) * self.kv_heads * entry

    def description_bytes(self, tokens: int) -> int:
        """Place, group and positions of `tokens` entries in every layer and KV head."""
        return self.layers * self.kv_heads * tokens * self._description_bytes

    def answering_bytes(self, questions: int, question_tokens: int, new_tokens: int, element_bytes: int) -> int:
        """Most that answering a batch adds to the kept entries: the questions' own keys and values, their forward, their logits."""
        slots = question_tokens + new_tokens
        tails = kv_bytes(self.dimensions, questions * slots, element_bytes)
        scores = 12 * questions * self.heads * question_tokens * slots  # plain products in float32, as the questions differ in length
        logits = questions * self.vocabulary * (element_bytes + 4)
        return tails + max(self.language_bytes(questions * question_tokens, element_bytes) + scores, logits)

    def longest_s(self, seconds_per_group: float, position_limit: int | None = None) -> float:
        """Seconds of video until the rotary positions end (frames of square models take one a token)."""
        limit = position_limit or self.max_positions
        if self.positions_per_s is not None:
            return limit / self.positions_per_s
        side = self.geometry.fixed_px or 0
        return limit // self.geometry.group_tokens(side, side) * seconds_per_group

    @property
    def _description_bytes(self) -> int:
        return ENTRY_FIELD_BYTES * (3 + self.axes)


def read_footprint(model: str) -> Footprint:
    """The sizes of a checkpoint.

    Args:
        model: a folder with config.json and the processor's files, `bundled`, or a name in published_models.json.

    Raises:
        ConfigError: no such folder or name, or its configuration lacks something; names what.
    """
    folder = BUNDLED if model == "bundled" else Path(model)
    if os.path.isfile(folder / "config.json"):
        config, processor, frame_text_tokens = _json(folder / "config.json"), _processor(folder), _frame_text_tokens(folder)
    else:
        published = _json(PUBLISHED)["models"]
        by_name = {alias.lower(): entry for name, entry in published.items() for alias in _aliases(name, entry)}
        entry = by_name.get(model.lower())
        if entry is None:
            raise ConfigError(
                f"engine.model={model}: neither a folder with config.json nor a model whose sizes are known here "
                f"({', '.join(published)}); fetch its config.json and processor files into a folder and name that"
            )
        config, processor, frame_text_tokens = entry["config"], entry["processor"], entry.get("frame_text_tokens", 0)
    families = {"qwen2_5_vl": _qwen2_5_vl, "internvl": _internvl}
    family = families.get(str(config.get("model_type")))
    if family is None:
        raise ConfigError(
            f"engine.model={model}: model_type {config.get('model_type')!r} is not supported; supported are {', '.join(families)}"
        )
    try:
        found = family(config, processor, frame_text_tokens)
        geometry = found.geometry
        whole = [geometry.frames_per_group, geometry.unit_px, geometry.min_px, geometry.max_px]
        if any(not isinstance(value, int) or value < 0 for value in whole) or 0 in whole[:2]:
            raise ValueError(f"frames a group, pixels a token, and least and most pixels would be {whole}")
        for name in _SIZES:
            size = getattr(found, name)
            if not isinstance(size, int | float) or not 0 < size <= 1e15:
                raise ValueError(f"{name} would be {size!r:.80}")
        return found
    except KeyError as missing:
        raise ConfigError(
            f"engine.model={model}: its configuration has no {missing.args[0]}; complete config.json or the processor's files"
        ) from None
    except (TypeError, AttributeError, ValueError, ArithmeticError, IndexError) as error:
        raise ConfigError(
            f"engine.model={model}: its configuration can't be read: {error}; compare config.json with the published one"
        ) from None


def _qwen2_5_vl(config: Config, processor: Config, frame_text_tokens: int) -> Footprint:
    vision, text = config["vision_config"], config.get("text_config", config)
    hidden, inner, patch, merge = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"], vision["spatial_merge_size"]
    frames, out = vision["temporal_patch_size"], vision["out_hidden_size"]
    pixels, merged, tables = 3 * frames * patch**2, hidden * merge**2, 2 * hidden // vision["num_heads"] + 8  # cosines, sines, indices
    block = 4 * hidden**2 + 4 * hidden + 3 * hidden * inner + 2 * inner + hidden + 2 * hidden
    tower = pixels * hidden + vision["depth"] * block + hidden + merged**2 + merged + merged * out + out
    size = processor.get("size") or {"shortest_edge": processor["min_pixels"], "longest_edge": processor["max_pixels"]}
    return _footprint(
        config,
        text,
        qkv_bias=True,
        qk_norm=False,
        vision_parameters=tower,
        positions_per_s=vision["tokens_per_second"],
        axes=3,
        patches_per_token=merge**2,
        stages=(
            Stage(2 * pixels + 5 * hidden, 6 * hidden + tables),  # rotary positions, in float32
            Stage(2 * pixels + 12 * hidden, tables),  # attention, windows gathered into a batch
            Stage(2 * pixels + 3 * hidden + 3 * inner, tables),
            Stage(pixels, 3 * pixels),  # normalising
        ),
        geometry=FrameGeometry(frames, patch * merge, size["shortest_edge"], size["longest_edge"]),
    )


def _internvl(config: Config, processor: Config, frame_text_tokens: int) -> Footprint:
    vision, text = config["vision_config"], config["text_config"]
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    (side, *_), (patch, *_) = (v if isinstance(v, list) else [v] for v in (vision["image_size"], vision["patch_size"]))
    shuffle, out, pixels = round(1 / config["downsample_ratio"]), text["hidden_size"], 3 * patch**2
    norm = hidden if vision["norm_type"] == "rms_norm" else 2 * hidden
    block = 4 * hidden**2 + hidden + 2 * hidden * inner + inner + hidden + 2 * norm + 2 * hidden
    block += 3 * hidden * vision["attention_bias"] + 2 * hidden * vision["use_qk_norm"]
    positions = ((side // patch) ** 2 + 1) * hidden * vision["use_absolute_position_embeddings"]
    ends = 0 if vision["use_mean_pooling"] else norm
    tower = hidden + positions + pixels * hidden + hidden + hidden * vision["use_mask_token"] + vision["num_hidden_layers"] * block + ends
    merged = hidden * shuffle**2
    projector = 2 * merged + merged * out + out + out**2 + out
    return _footprint(
        config,
        text,
        qkv_bias=text["attention_bias"],
        qk_norm=True,
        vision_parameters=tower + projector,
        positions_per_s=None,
        axes=1,
        patches_per_token=shuffle**2,
        stages=(
            Stage(2 * pixels + 8 * hidden),
            Stage(2 * pixels + 5 * hidden + 2 * inner),
            Stage(pixels, 3 * pixels),
        ),
        geometry=FrameGeometry(1, patch * shuffle, fixed_px=side, group_text_tokens=frame_text_tokens + 2),
    )


def _footprint(config: Config, text: Config, *, qkv_bias: bool, qk_norm: bool, vision_parameters: int, **rest: Any) -> Footprint:
    """Add the language model, a Qwen2 or Qwen3 decoder in both families."""
    layers, hidden, inner, vocabulary = (text[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    projected = (heads + 2 * kv_heads) * head_dim
    layer = hidden * projected + projected * qkv_bias + heads * head_dim * hidden + 2 * head_dim * qk_norm
    layer += 3 * hidden * inner + 2 * hidden
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return Footprint(
        model_type=config["model_type"],
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        heads=heads,
        hidden=hidden,
        intermediate=inner,
        vocabulary=vocabulary,
        max_positions=text["max_position_embeddings"],
        parameters=vision_parameters + vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden,
        **rest,
    )


def _aliases(name: str, entry: Config) -> list[str]:
    full = [name, *entry.get("aliases", [])]
    return full + [alias.rpartition("/")[2] for alias in full]


def _processor(folder: Path) -> Config:
    """What the processor's files say of video, the newer file before the older."""
    files = [_json(folder / name) for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")]
    inner = files[0].get("video_processor")
    files[0] = inner if isinstance(inner, dict) else {}
    return next((file for file in files if "size" in file or "max_pixels" in file), {})


def _frame_text_tokens(folder: Path) -> int:
    """Tokens of the text before a frame, by the folder's own tokenizer; 0 without one."""
    if not (folder / "tokenizer.json").is_file():
        return 0
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # of that library's own, plain kind
        raise ConfigError(f"{folder / 'tokenizer.json'} can't be read: {error!s:.200}; fetch it again") from None
    return len(tokenizer.encode(FRAME_TEXT, add_special_tokens=False).ids)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}; fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object; fetch it again")
    return content
