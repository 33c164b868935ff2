"""Eviction policies: one file each, found by its name.

To add one, write `engine/policies/NAME.py` with a class `Policy(EvictionPolicy)`; nothing else has to change.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil

from engine.errors import ConfigError
from engine.policies.base import CacheView, EvictionPolicy

__all__ = ["CacheView", "EvictionPolicy", "make_policy", "policy_names"]


def policy_names() -> list[str]:
    """Names that `engine.policy` may take."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def make_policy(name: str, options: dict | None = None) -> EvictionPolicy:
    """The policy of that name with its options set.

    Raises:
        ConfigError: no such policy, or an option that it doesn't take.
    """
    if name not in policy_names():
        near = difflib.get_close_matches(name, policy_names(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"engine.policy={name!r} is not a policy; {hint}choose one of {', '.join(policy_names())}")
    policy = importlib.import_module(f"engine.policies.{name}").Policy
    known = list(inspect.signature(policy).parameters)
    for key in options or {}:
        if key not in known:
            raise ConfigError(f"engine.policy_options.{key} is not an option of {name}; it takes {', '.join(known) or 'none'}")
    try:
        return policy(**(options or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine.policy_options={options} do not suit {name}: {error}") from error
