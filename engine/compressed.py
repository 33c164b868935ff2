"""A prompt that has been read: the entries that were kept, and all it takes to ask, to go on reading, or to come back tomorrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engine.cache import BudgetedCache
from engine.errors import CacheMismatchError, ReelkeepError
from engine.models.base import PositionCursor
from engine.types import BlockTrace, MediaKind, PrefillTrace

SCHEMA = "1"


@dataclass(frozen=True)
class ReadState:
    """How far the prompt has been read.

    Attributes:
        cursor: where the next token goes.
        media: index of the open media item; -1 before the first.
        kind: its kind; None before the first.
        open: whether the text that closes the item is still to come.
        groups_before: groups of the items before it.
        groups: groups read so far, all items.
        largest_block_groups: groups that blocks were cut down to when the device was full; None as long as it wasn't.
    """

    cursor: PositionCursor = field(default_factory=PositionCursor)
    media: int = -1
    kind: MediaKind | None = None
    open: bool = False
    groups_before: int = 0
    groups: int = 0
    largest_block_groups: int | None = None


@dataclass
class CompressedVideo:
    """What `Engine.prefill` returns and `Engine.answer` asks.

    Attributes:
        cache: the kept entries.
        state: how far the prompt was read.
        trace: what reading cost.
        identity: digests of the model, its weights, tokenizer and prompt, and the policy and budget that kept the entries.
        question: text and options of the only question this cache serves, if its policy was query-aware; else None.
        labels: what whoever stored the cache wrote on it (which video, when); kept and checked, but no part of the identity.
    """

    cache: BudgetedCache
    state: ReadState
    trace: PrefillTrace
    identity: dict[str, str]
    question: tuple[str, ...] | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def to_bytes(self, labels: Mapping[str, str] | None = None) -> bytes:
        """The kept entries and all state as one safetensors file.

        Args:
            labels: stored with the cache and readable without loading it; default: the cache's own.
        """
        cache = self.cache
        tensors: dict[str, Tensor] = {}
        for layer in range(cache.shape.layers):
            tensors[f"keys.{layer}"] = cache.keys(layer).cpu().contiguous()
            tensors[f"values.{layer}"] = cache.values(layer).cpu().contiguous()
            tensors[f"entries.{layer}"] = cache.entries(layer).cpu().contiguous()
        metadata = {
            "schema": SCHEMA,
            "identity": json.dumps(self.identity, sort_keys=True),
            "state": json.dumps(asdict(self.state)),
            "trace": json.dumps(asdict(self.trace)),
            "protected_tokens": str(cache.protected_tokens),
            "seen_tokens": str(cache.seen_tokens),
            "question": json.dumps(self.question),
            "labels": json.dumps(dict(self.labels if labels is None else labels), sort_keys=True),
        }
        metadata["checksum"] = _checksum(tensors, metadata)
        return save(tensors, metadata)

    def save(self, path: str | Path, labels: Mapping[str, str] | None = None) -> None:
        """Write `to_bytes` to a file, under a temporary name first."""
        path = Path(path)
        temporary = path.with_name(path.name + ".part")
        try:
            temporary.write_bytes(self.to_bytes(labels))
            temporary.replace(path)
        except OSError as error:
            raise ReelkeepError(f"cache {path} can't be written: {error}; check the folder, its rights and its free space") from error
        finally:
            temporary.unlink(missing_ok=True)


def load_into(cache: BudgetedCache, path: str | Path, identity: dict[str, str]) -> CompressedVideo:
    """Read a file that `CompressedVideo.save` wrote into an empty cache.

    Raises:
        CacheMismatchError: the file is damaged, or another model, revision, prompt, policy, budget or dtype wrote it.
    """
    metadata, tensors = read_stored(path, identity)
    try:
        state, trace = json.loads(metadata["state"]), json.loads(metadata["trace"])
        trace["blocks"] = [BlockTrace(**block) for block in trace["blocks"]]
        cache.restore(tensors, protected_tokens=int(metadata["protected_tokens"]), seen_tokens=int(metadata["seen_tokens"]))
        cursor = PositionCursor(**state.pop("cursor"))
        question, labels = json.loads(metadata["question"]), json.loads(metadata["labels"])
        only = None if question is None else tuple(question)
        return CompressedVideo(cache, ReadState(cursor=cursor, **state), PrefillTrace(**trace), identity, only, labels)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:  # a whole file that isn't of this form
        raise CacheMismatchError(f"cache {path} isn't in this version's form ({error}); delete it and prefill the video again") from error


def read_stored(path: str | Path, identity: dict[str, str] | None = None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a stored cache to the CPU and check that it is whole; no model is needed.

    Args:
        identity: what it must match; None takes any cache.

    Returns:
        The metadata, each value text or JSON (schema, identity, labels, state, trace, question, ...), and the tensors.

    Raises:
        CacheMismatchError: the file is damaged or cut short, or its identity is another.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata, identity)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _checksum(tensors, metadata) != metadata["checksum"]:
            raise CacheMismatchError(f"cache {path} fails its checksum: it was damaged; delete it and prefill the video again")
    except CacheMismatchError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CacheMismatchError(f"cache {path} can't be read: {error}; delete it and prefill the video again") from error
    return metadata, tensors


def _check(path: str | Path, metadata: dict[str, str], identity: dict[str, str] | None) -> None:
    if metadata.get("schema") != SCHEMA:
        raise CacheMismatchError(f"cache {path} has schema {metadata.get('schema')}, this version reads {SCHEMA}; prefill the video again")
    if identity is None:
        return
    stored = json.loads(metadata["identity"])
    for key in sorted({*stored, *identity}):
        if stored.get(key) != identity.get(key):
            raise CacheMismatchError(
                f"cache {path} was written with {key}={stored.get(key)}, the engine has {key}={identity.get(key)}; "
                "load that model and setting, or prefill the video again"
            )


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 over every tensor's bytes and all metadata but the checksum itself."""
    digest = hashlib.sha256()
    for key in sorted(metadata):
        if key != "checksum":
            digest.update(f"{key}={metadata[key]};".encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()
