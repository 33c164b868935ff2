"""Measured memory without a GPU: bytes of the tensors that are alive, and the most there were at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operator makes inside the block until it is freed.

    Args:
        known: tensors that were there before, such as weights; views of them are new tensors and no new storage.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, operator: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
