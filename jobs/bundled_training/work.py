"""The work folder of a training: what it has finished, written whole, and taken up again only by a training of the same recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError


@dataclass(frozen=True)
class WorkFolder:
    """Checkpoints by name.

    Attributes:
        recipe: the options that decide what is in them, such as {"--seed": 0}.
    """

    folder: Path
    recipe: Mapping[str, str | int]

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write a checkpoint that is there whole or not at all."""
        partial = self.folder / f"{name}.partial"
        torch.save({"recipe": dict(self.recipe), "state": state}, partial)
        partial.replace(self.folder / name)

    def load(self, name: str) -> dict[str, Any] | None:
        """What was saved, or None.

        Raises:
            ConfigError: the checkpoint is damaged, or of another recipe.
        """
        path = self.folder / name
        if not path.exists():
            return None
        try:
            saved = torch.load(path, weights_only=True)
            begun, state = saved["recipe"], saved["state"]
        except OSError:
            raise
        except Exception as error:  # torch.load fails in as many ways as a file can be broken
            raise ConfigError(
                f"{path} is damaged or of an older version ({type(error).__name__}); delete --work={self.folder}, or give another"
            ) from None
        for option, value in self.recipe.items():
            if begun.get(option) != value:
                raise ConfigError(
                    f"--work={self.folder} holds a training with {option}={begun.get(option)}, not {value}; "
                    "give another folder, or the same settings"
                )
        return state
