"""One way of keeping a cache, to be compared with others on the same questions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.errors import ConfigError
from engine.policies import make_policy
from pipeline.config import plain_value

UNIFORM = "uniform"
"""No policy: the video's frames are thinned out to as many tokens as the budget, and all of them are kept."""


@dataclass(frozen=True)
class Cell:
    """How a video is kept.

    Attributes:
        policy: a policy with its options, "snapkv:kernel_size=1", or `UNIFORM`.
        budget_tokens: visual tokens kept beyond the protected prompt prefix; None keeps all.
        block_groups: temporal groups read between two evictions.
        compress: during the prefill, or once after it.
        alignment: group: blocks end on whole groups. none: they are half a group longer and so end in the middle of groups.
    """

    policy: str
    budget_tokens: int | None
    block_groups: int
    compress: Literal["during", "after"] = "during"
    alignment: Literal["group", "none"] = "group"

    @property
    def name(self) -> str:
        """The cell in a few words; the same cell has the same name in every start."""
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())

    def settings(self) -> dict[str, Any]:
        """Fields of `EngineConfig` that say the policy.

        Raises:
            ConfigError: no such policy, or no such option.
        """
        name, _, text = self.policy.partition(":")
        pairs = [part.partition("=") for part in text.split("+") if part]
        if any(not equals for _, equals, _ in pairs):
            raise ConfigError(f"--policies={self.policy}: options are written POLICY:NAME=VALUE+NAME=VALUE")
        options = {key: plain_value(value) for key, _, value in pairs}
        if len(options) < len(pairs):
            raise ConfigError(f"--policies={self.policy}: an option is given twice")
        if name == UNIFORM and options:
            raise ConfigError(f"--policies={self.policy}: {UNIFORM} takes no options")
        if name == UNIFORM:
            return {"policy": "full", "policy_options": {}}
        make_policy(name, options)
        return {"policy": name, "policy_options": options}


def grid(
    policies: Sequence[str], budgets: Iterable[int], block_groups: Iterable[int], compress: Iterable[str], alignments: Iterable[str]
) -> list[Cell]:
    """Every combination that differs: the full cache has no budget and doesn't care when it would be compressed.

    Raises:
        ConfigError: a policy or option that isn't there.
    """
    cells: dict[str, Cell] = {}
    for policy, budget, groups, when, alignment in itertools.product(policies, budgets, block_groups, compress, alignments):
        if policy == "full":
            cell = Cell(policy, None, groups)
        elif policy == UNIFORM:
            cell = Cell(policy, budget, groups)
        else:
            cell = Cell(policy, budget, groups, when, alignment)  # type: ignore[arg-type]
        cell.settings()
        cells.setdefault(cell.name, cell)
    return list(cells.values())
