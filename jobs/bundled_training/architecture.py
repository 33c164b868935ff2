"""All that differs between the bundled models while they are trained, in one interface; the loops know nothing else of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from pipeline.synthetic.script import Script

BUNDLES = Path(__file__).parents[2] / "engine" / "bundled"


class Architecture(ABC):
    """One architecture, with its prompt, its positions, its media and its lessons.

    Attributes:
        name: as `--architecture`.
        prefix: the prompt before the first visual token, as the engine's adapter builds it.
        close: the text between the last visual token and the question.
        axes: axes of a rotary position.
        group_tokens: visual tokens of one group, or of one tile.
        timed: whether groups have times, drawn anew for each lesson.
        has_thumbnail: whether a small copy of the whole picture follows its tiles, as one more group.
        kind_weights: how often each kind of question is drawn.
        lengths: groups a video or picture has at each level of the curriculum.
        short: those of them on which comparing is learnt, where a step costs little; the middle one is watched.
        chunk_groups: groups of each video or picture in the bank.
        bank_groups, vision_steps, language_steps: how much of each a training takes unless told otherwise; the card says what the shipped weights had.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    close: ClassVar[str]
    axes: ClassVar[int]
    group_tokens: ClassVar[int]
    timed: ClassVar[bool]
    has_thumbnail: ClassVar[bool]
    kind_weights: ClassVar[dict[str, float]]
    lengths: ClassVar[tuple[int, ...]]
    short: ClassVar[tuple[int, int, int]]
    chunk_groups: ClassVar[int]
    bank_groups: ClassVar[int]
    vision_steps: ClassVar[int]
    language_steps: ClassVar[int]

    @property
    def bundle(self) -> Path:
        """The folder of the shipped weights."""
        return BUNDLES / f"{self.name}_tiny"

    @abstractmethod
    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with the chat template."""

    @abstractmethod
    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """The processor that is stored with the weights."""

    @abstractmethod
    def build_model(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
        """An untrained model, the same for the same seed."""

    @abstractmethod
    def vision(self, model: Any) -> nn.Module:
        """What the vision stage trains: everything between pixels and the language model."""

    @abstractmethod
    def encode(self, model: Any, frames: Tensor) -> Tensor:
        """Encode many groups in a few batched products.

        Args:
            frames: (groups, frames a group, px, px, 3) uint8, or float in 0..255.

        Returns:
            (groups, group_tokens, hidden), equal to the model's own features of the same groups.
        """

    @abstractmethod
    def through_file(self, rng: np.random.Generator, script: Script) -> np.ndarray:
        """Draw a script, encode it as a file, and read that as the engine's pipeline would.

        Returns:
            (groups, frames a group, px, px, 3) uint8.
        """

    @abstractmethod
    def positions(self, times_s: np.ndarray, start: int) -> np.ndarray:
        """Rotary positions of all visual tokens, (axes, tokens) int64, given each group's time in seconds."""

    def save(self, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write weights (fp16 safetensors), configuration and processor files where `from_pretrained` finds them."""
        half = type(model)(model.config).half()
        half.load_state_dict(model.state_dict())
        half.generation_config.eos_token_id = tokenizer.eos_token_id
        half.generation_config.pad_token_id = tokenizer.pad_token_id
        half.save_pretrained(folder)
        self.build_processor(tokenizer).save_pretrained(folder)


def normalise(frames: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Rescale and normalise (..., 3) pixels of 0..255 as the processors do."""
    return (frames.float() / 255 - torch.tensor(mean)) / torch.tensor(std)
