"""All that differs between model families, in one interface; everything that doesn't is here."""

from __future__ import annotations

import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from engine import attention
from engine.cache import BudgetedCache, CacheShape
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import FrameGeometry
from engine.types import MediaKind, Question, VideoBlock

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class PositionCursor:
    """Where the next token goes.

    Attributes:
        next: the next free rotary position: max(positions so far) + 1.
        media_start: position at which the open media item began.
        media_time_s: time of its first group.
    """

    next: int = 0
    media_start: int = 0
    media_time_s: float = 0.0


@dataclass(frozen=True)
class Encoded:
    """A piece of the prompt, ready for the language model.

    Attributes:
        embeds: (tokens, hidden).
        visual: (tokens,) bool, False for text that comes along with the frames.
        group: (tokens,) int32, index of the group within the media item.
        place: (tokens,) int32, place within the group.
    """

    embeds: Tensor
    visual: Tensor
    group: Tensor
    place: Tensor


class ModelAdapter(ABC):
    """One loaded checkpoint of one family.

    A new family is a new file in engine/models with a subclass named `Adapter`; `model_types` says which checkpoints it opens.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[int] = 1
    default_system_prompt: ClassVar[str | None] = None

    def __init__(self, model: Any, processor: Any, config: EngineConfig):
        self.model, self.processor, self.config = model, processor, config
        self.tokenizer = processor.tokenizer
        self.geometry = self.make_geometry(model.config, processor)
        self.text_config = model.config.get_text_config()
        if any(kind != "full_attention" for kind in getattr(self.text_config, "layer_types", None) or []):
            raise ConfigError(f"engine.model={config.model}: sliding-window layers are not supported; use a checkpoint with full attention")
        attention.register()
        self.text_config._attn_implementation = attention.NAME
        self.kernel = attention.choose_kernel(config.attention, self.device, self.dtype, kv_dimensions(model.config)[2])
        self.cache_argument = "cache" if "cache" in inspect.signature(self.text_model.forward).parameters else "past_key_values"

    # What a family must say

    @classmethod
    @abstractmethod
    def load_model(cls, path: str, **kwargs: Any) -> Any:
        """The Hugging Face model, through its own class."""

    @classmethod
    @abstractmethod
    def make_geometry(cls, model_config: Any, processor: Any) -> FrameGeometry:
        """Frame rules from the checkpoint's configuration and processor, without weights."""

    @abstractmethod
    def encode(self, block: VideoBlock) -> Encoded:
        """Run the vision tower on one block and add the text that frames bring along."""

    @abstractmethod
    def positions(self, block: VideoBlock, piece: Encoded, cursor: PositionCursor) -> Tensor:
        """(tokens, axes) int64 rotary positions of a block, by the rule the family was trained with."""

    @abstractmethod
    def span_positions(self, groups: int, seconds: float, height_px: int, width_px: int) -> int:
        """How many rotary positions a video of so many groups and seconds takes: refuses too long input before work starts."""

    @classmethod
    @abstractmethod
    def opening_text(cls, processor: Any, kind: MediaKind) -> str:
        """Text of special tokens before a media item."""

    @abstractmethod
    def close_text(self, kind: MediaKind) -> str:
        """Text after a media item."""

    # What all families share

    @property
    def text_model(self) -> Any:
        """The decoder without its output layer."""
        return self.model.model.language_model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, keys and values."""
        return self.model.dtype

    @property
    def position_limit(self) -> int:
        """Rotary positions the checkpoint was made for, unless `engine.position_limit` says otherwise."""
        return self.config.position_limit or self.text_config.max_position_embeddings

    @property
    def cache_shape(self) -> CacheShape:
        """What one cache entry of this model is made of."""
        layers, kv_heads, head_dim = kv_dimensions(self.model.config)
        return CacheShape(layers, kv_heads, head_dim, self.axes, self.dtype, self.device)

    def embed_text(self, ids: list[int]) -> Tensor:
        """(tokens, hidden) embeddings of token ids."""
        return self.text_model.get_input_embeddings()(torch.tensor(ids, dtype=torch.long, device=self.device))

    def forward(self, embeds: Tensor, positions: Tensor, cache: BudgetedCache) -> Tensor:
        """Run the decoder over new tokens, storing and evicting in `cache` on the way.

        Args:
            embeds: (batch, tokens, hidden).
            positions: (batch, tokens, axes) int64, always explicit: transformers' defaults count cache entries.

        Returns:
            (batch, tokens, hidden) last hidden states.
        """
        position_ids = positions[..., 0] if self.axes == 1 else positions.permute(2, 0, 1)
        return self.text_model(
            inputs_embeds=embeds,
            position_ids=position_ids,
            attention_mask={"full_attention": None},
            use_cache=True,
            kv_cache=cache,
            **{self.cache_argument: cache},
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """(batch, vocabulary) float32 logits of (batch, hidden) states: only ever of positions that are read."""
        return self.model.lm_head(hidden).float()

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo RoPE: keys (kv_heads, slots, head_dim) written at positions (kv_heads, slots, axes), as float32."""
        cos, sin = self.rotary(keys.float(), positions)
        half = keys.shape[-1] // 2
        x = keys.float()
        turned = torch.cat((x[..., half:], -x[..., :half]), dim=-1)
        return (x * cos + turned * sin) / (cos * cos + sin * sin)

    def rotary(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (rows, slots, head_dim) at positions (rows, slots, axes)."""
        ids = positions[..., 0] if self.axes == 1 else positions.permute(2, 0, 1)
        return self.text_model.rotary_emb(like, ids.to(like.device))

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; a user's text can't smuggle in special tokens, the project's own (`special=True`) can name them."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=not special).input_ids

    def prompt_parts(self) -> tuple[str, str]:
        """What the checkpoint's own chat template puts before and after a user's message."""
        return self.template_parts(self.processor, self.config)

    @classmethod
    def prefix_tokens(cls, processor: Any, config: EngineConfig, kind: MediaKind = "video") -> int:
        """Tokens of a prompt before its first visual one, which are never evicted."""
        texts = (cls.template_parts(processor, config)[0], cls.opening_text(processor, kind))
        return sum(len(processor.tokenizer(text, add_special_tokens=False).input_ids) for text in texts)

    @classmethod
    def template_parts(cls, processor: Any, config: EngineConfig) -> tuple[str, str]:
        """`prompt_parts`, without a model."""
        sentinel = "\x00USER\x00"
        messages = [{"role": "user", "content": [{"type": "text", "text": sentinel}]}]
        system = cls.default_system_prompt if config.system_prompt is None else config.system_prompt
        if system is not None:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        template = processor if getattr(processor, "chat_template", None) else processor.tokenizer
        rendered = template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        head, found, tail = rendered.partition(sentinel)
        if not found:
            raise ConfigError(f"engine.model={config.model}: its chat template drops the user's text; fix chat_template")
        return head, tail

    def question_ids(self, question: Question) -> list[int]:
        """Tokens of a question up to where the answer starts: the text, its options, and the template's end."""
        text = question.text
        if question.options:
            lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, question.options, strict=False)]
            text = "\n".join([text, *lines, "Answer with the option's letter."])
        return self.tokenize(text) + self.tokenize(self.prompt_parts()[1], special=True)

    def letter_ids(self, count: int) -> list[int]:
        """Token ids of the first `count` option letters.

        Raises:
            ConfigError: the tokenizer has no single token for a letter.
        """
        ids = [self.tokenize(letter) for letter in LETTERS[:count]]
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        for letter, tokens in zip(LETTERS, ids, strict=False):
            if len(tokens) != 1 or tokens[0] == unknown:
                raise ConfigError(
                    f"engine.model={self.config.model}: its tokenizer has no single token for option {letter}; ask without options"
                )
        return [tokens[0] for tokens in ids]

    def stop_ids(self) -> set[int]:
        """Token ids that end an answer."""
        ids: set[int] = set()
        for owner in (self.model.generation_config, self.model.config, self.tokenizer):
            eos = getattr(owner, "eos_token_id", None)
            ids |= set(eos) if isinstance(eos, (list, tuple)) else {eos} if eos is not None else set()
        return ids

    def identity(self) -> dict[str, str]:
        """What a stored cache must match: configuration, weights, tokenizer and prompt, each as a digest."""
        weights = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            weights.update(name.encode())
            weights.update(str(tuple(parameter.shape)).encode())
            weights.update(parameter.detach().reshape(-1)[:64].float().cpu().numpy().tobytes())
        plain = {k: v for k, v in self.model.config.to_dict().items() if k not in {"_name_or_path", "transformers_version"}}
        return {
            "model": self.config.model,
            "revision": self.config.revision or "",
            "family": type(self).__module__.rsplit(".", 1)[-1],
            "architecture": digest(json.dumps(plain, sort_keys=True, default=str)),
            "weights": weights.hexdigest()[:16],
            "tokenizer": digest(json.dumps(self.tokenizer.get_vocab(), sort_keys=True)),
            "prompt": digest(self.prompt_parts()[0]),
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def digest(text: str) -> str:
    """First 16 hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kv_dimensions(model_config: Any) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) of any transformers configuration, without loading weights."""
    text = model_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, text.num_key_value_heads, head_dim


def normalised(frames: np.ndarray, processor: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rescale and normalise as the checkpoint's processor does: (frames, 3, height, width) uint8 -> float."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).to(device).float()
    scale = processor.rescale_factor if getattr(processor, "do_rescale", True) else 1.0
    if not getattr(processor, "do_normalize", True):
        return (pixels * scale).to(dtype)
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) / scale for v in (processor.image_mean, processor.image_std))
    return ((pixels - mean) / std).to(dtype)


def advance(cursor: PositionCursor, positions: Tensor) -> PositionCursor:
    """The cursor after tokens at `positions` (tokens, axes)."""
    return replace(cursor, next=max(cursor.next, int(positions.max()) + 1))
