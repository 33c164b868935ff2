"""The whole cache: no eviction. The reference for accuracy and for memory."""

from __future__ import annotations

from engine.policies.base import EvictionPolicy


class Policy(EvictionPolicy):
    """Keeps everything; memory grows with the input."""

    evicts = False
