"""Compressed caches that outlive the job, found by identity: the video's content and every setting that shaped what was kept."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.compressed import CompressedVideo, read_stored
from engine.errors import CacheMismatchError, ReelkeepError
from engine.models import checkpoint_digest
from pipeline.config import JobConfig
from pipeline.results import DECODE_SPEED, digest
from pipeline.room import expected_dtype
from pipeline.storage import ObjectStat, Storage, join_uri, local_path, split_s3
from pipeline.storage_errors import MissingObjectError
from pipeline.task import VideoTask

if TYPE_CHECKING:
    from engine.engine import Engine

SUFFIX, PARTIAL = ".safetensors", ".partial"
_CACHE_ID = re.compile(rf"[0-9a-f]{{24}}/[0-9a-f]{{16}}-[0-9a-f]{{16}}({re.escape(PARTIAL)})?")
MAX_HEADER_BYTES = 100_000_000
UNLISTED_SHARE = 0.01
"""Share of `max_bytes` that one process writes before it lists all caches again: a store may hold a hundred thousand."""
# Settings that change what the engine keeps of a video; the rest changes only what is asked of it, or how fast.
_ENGINE = (
    "model",
    "revision",
    "dtype",
    "policy",
    "policy_options",
    "budget_tokens",
    "block_tokens",
    "alignment",
    "compress",
    "system_prompt",
)


class CacheMissingError(ReelkeepError):
    """No cache of this video, made from its present content under these settings, is there; says what is there instead."""


@dataclass(frozen=True)
class CacheKey:
    """What a cache is of. The engine's own identity (weights, tokenizer, prompt, dtype) is checked beside it when a cache is loaded.

    Attributes:
        uri: the video's address.
        content: its content's tag (ETag, or size and time of change of a local file), as in `VideoTask.content_tag`.
        settings: everything in the configuration that shapes the cache, by setting name.
    """

    uri: str
    content: str
    settings: Mapping[str, str]

    @classmethod
    def of(cls, config: JobConfig, task: VideoTask, dtype: str | None = None) -> CacheKey:
        """The key of one video under a job's settings.

        Args:
            dtype: what the engine holds its cache in; None tells it by the settings and this machine.
        """
        engine = config.engine.model_dump(mode="json", include=set(_ENGINE)) | {"dtype": dtype or expected_dtype(config)}
        decode = config.decode.model_dump(mode="json", exclude=DECODE_SPEED)
        settings = {f"engine.{name}": value for name, value in engine.items()} | {f"decode.{name}": value for name, value in decode.items()}
        settings["weights"] = checkpoint_digest(config.engine.model)
        return cls(task.uri, task.content_tag, {name: json.dumps(value, sort_keys=True) for name, value in settings.items()})

    @cached_property
    def folder(self) -> str:
        """Where all caches of this address are."""
        return digest(self.uri)[:24]

    @cached_property
    def settings_name(self) -> str:
        """The settings, in a name."""
        return digest(dict(self.settings))[:16]

    def cache_id(self, *, partial: bool = False) -> str:
        """`<address>/<settings>-<content>`, each a digest; `.partial` behind it for a video that isn't read to its end."""
        return f"{self.folder}/{self.settings_name}-{digest(self.content)[:16]}" + PARTIAL * partial

    def labels(self, *, partial: bool) -> dict[str, str]:
        """What is written on the cache, and must be there when it is loaded."""
        complete = "no" if partial else "yes"
        return {"uri": self.uri, "content": self.content, "settings": json.dumps(dict(self.settings), sort_keys=True), "complete": complete}


@dataclass(frozen=True)
class StoredCache:
    """One cache as a listing shows it.

    Attributes:
        cache_id: its name; ends in `.partial` where the video isn't read to its end.
        size_bytes, modified_s: of the file; seconds since 1970.
    """

    cache_id: str
    size_bytes: int
    modified_s: float


class CacheStore:
    """Keeps caches under one folder or prefix, a safetensors file each. Can be sent to another process.

    A cache appears whole or not at all, and one that is there is never replaced: of several writers the first wins.

    Args:
        uri: folder or s3:// prefix.
        storage: what reads and writes there.
        ttl_s: age at which a cache counts as gone; None for never.
        max_bytes: most that all caches may take, give or take a hundredth for each process that writes; None for no limit.
    """

    def __init__(self, uri: str, storage: Storage, *, ttl_s: float | None = None, max_bytes: int | None = None) -> None:
        self.uri = uri.rstrip("/") if split_s3(uri) else str(local_path(uri))
        self.storage, self.ttl_s, self.max_bytes = storage, ttl_s, max_bytes
        self._unlisted_bytes = math.inf  # written here since the caches were last counted

    @classmethod
    def of(cls, config: JobConfig, storage: Storage | None = None) -> CacheStore:
        """The store that a job's settings name."""
        caches = config.caches
        uri = caches.uri or join_uri(config.output, "caches")
        return cls(uri, storage or Storage(config.storage), ttl_s=caches.ttl_s, max_bytes=caches.max_bytes)

    def address(self, cache_id: str) -> str:
        """Where a cache is, or would be."""
        return join_uri(self.uri, cache_id + SUFFIX)

    def save(self, key: CacheKey, compressed: CompressedVideo, facts: Mapping[str, str] | None = None, *, partial: bool = False) -> str:
        """Store a cache; under a limit of size, the oldest make room for it.

        Args:
            facts: more to write on it, for people and for later rows (the video's length, the decoder).
            partial: the video isn't read to its end; replaces the partial cache that was there.

        Returns:
            Its id.

        Raises:
            StorageError: it couldn't be written.
        """
        cache_id = key.cache_id(partial=partial)
        data = compressed.to_bytes({**(facts or {}), **key.labels(partial=partial)})
        self.storage.write_bytes(self.address(cache_id), data, if_absent=not partial)
        self._unlisted_bytes += len(data)
        if self.max_bytes is not None and self._unlisted_bytes > self.max_bytes * UNLISTED_SHARE:
            self.expire()
        return cache_id

    def load(self, engine: Engine, key: CacheKey, *, partial: bool = False) -> CompressedVideo:
        """Open a cache for asking, or a partial one for reading on.

        Raises:
            CacheMissingError: there is none, or only one of other content, of other settings, or too old.
            CacheMismatchError: it is damaged, or another model, revision or prompt wrote it.
            StorageError: it couldn't be read.
        """
        cache_id = key.cache_id(partial=partial)
        address = self.address(cache_id)
        try:
            if self._too_old(self.storage.stat(address), time.time()):
                raise CacheMissingError(f"its cache is older than caches.ttl_s={self.ttl_s:g}")
            with self.storage.spool(address) as path:
                try:
                    compressed = engine.load_compressed(path)
                except CacheMismatchError as error:
                    raise CacheMismatchError(str(error).replace(str(path), address)) from None
        except MissingObjectError:
            raise CacheMissingError(self._what_is_there(key)) from None
        for name, expected in key.labels(partial=partial).items():
            if compressed.labels.get(name) != expected:
                raise CacheMismatchError(
                    f"cache {address} says {name}={compressed.labels.get(name)} where {expected} is asked for: it was renamed; delete it"
                )
        return compressed

    def why_missing(self, key: CacheKey) -> str:
        """Why a key has no cache to load, as far as can be told without loading it; "" when it has one."""
        try:
            found = self.storage.stat(self.address(key.cache_id()))
        except MissingObjectError:
            return self._what_is_there(key)
        return f"its cache is older than caches.ttl_s={self.ttl_s:g}" if self._too_old(found, time.time()) else ""

    def remove(self, cache_id: str) -> None:
        """Remove a cache; nothing happens when it isn't there."""
        self.storage.delete(self.address(cache_id))

    def entries(self) -> Iterator[StoredCache]:
        """All caches, by one listing; other files are left alone."""
        start = len(self.uri) + 1
        for found in self.storage.scan(self.uri):
            cache_id = found.uri[start:].removesuffix(SUFFIX)
            if found.uri.endswith(SUFFIX) and _CACHE_ID.fullmatch(cache_id):
                yield StoredCache(cache_id, found.size_bytes, found.modified_s)

    def describe(self, cache_id: str) -> dict[str, Any]:
        """What is written on a cache: identity, labels, trace, state and so on. Reads the head of the file only.

        Raises:
            CacheMismatchError: the head is damaged.
        """
        address = self.address(cache_id)
        length = int.from_bytes(self.storage.read_range(address, 0, 8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise CacheMismatchError(f"cache {address} can't be read: its header is damaged; delete it and prefill the video again")
        try:
            metadata = json.loads(self.storage.read_range(address, 8, length))["__metadata__"]
            for name in ("identity", "labels", "state", "trace", "question"):
                metadata[name] = json.loads(metadata[name])
            metadata["labels"]["settings"] = json.loads(metadata["labels"]["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise CacheMismatchError(f"cache {address} can't be read: {error!r}; delete it and prefill the video again") from None
        return dict(metadata)

    def verify(self, cache_id: str) -> None:
        """Read a whole cache and check it; no model is needed.

        Raises:
            CacheMismatchError: it is damaged, cut short, or under a name that isn't its own.
        """
        address = self.address(cache_id)
        with self.storage.spool(address) as path:
            try:
                metadata, _ = read_stored(path)
                labels = json.loads(metadata["labels"])
                key = CacheKey(labels["uri"], labels["content"], json.loads(labels["settings"]))
                partial = labels["complete"] == "no"
            except CacheMismatchError as error:
                raise CacheMismatchError(str(error).replace(str(path), address)) from None
            except (KeyError, ValueError) as error:
                raise CacheMismatchError(f"cache {address}: its labels can't be read ({error!r}); delete it") from None
        if key.cache_id(partial=partial) != cache_id:
            raise CacheMismatchError(f"cache {address} belongs under {key.cache_id(partial=partial)}: it was renamed; delete it")

    def expire(self, now_s: float | None = None) -> list[str]:
        """Remove the caches that are too old, then the oldest until the rest fits.

        Returns:
            The ids of those that were removed.
        """
        now_s = time.time() if now_s is None else now_s
        newest_first = sorted(self.entries(), key=lambda entry: (-entry.modified_s, entry.cache_id))
        most_bytes = math.inf if self.max_bytes is None else self.max_bytes
        total_bytes, removed = 0, []
        for entry in newest_first:
            fits_alone = entry.size_bytes <= most_bytes
            total_bytes += entry.size_bytes if fits_alone else 0  # one that never fits costs no other its place
            if self._too_old(entry, now_s) or not fits_alone or total_bytes > most_bytes:
                self.remove(entry.cache_id)
                removed.append(entry.cache_id)
        self._unlisted_bytes = 0.0
        return removed

    def expire_if_limited(self) -> list[str]:
        """`expire`, where there is a limit of age or size at all."""
        return self.expire() if self.ttl_s is not None or self.max_bytes is not None else []

    def _too_old(self, found: ObjectStat | StoredCache, now_s: float) -> bool:
        return self.ttl_s is not None and now_s - found.modified_s > self.ttl_s

    def _what_is_there(self, key: CacheKey) -> str:
        """Why a key has no cache, by what lies beside its place."""
        if not key.content:
            return "the video isn't at its address any more, so that no cache can be matched to its content"
        names = [uri.rpartition("/")[2].removesuffix(SUFFIX) for uri in self.storage.list(join_uri(self.uri, key.folder))]
        complete = [name for name in names if not name.endswith(PARTIAL)]
        if any(name.startswith(key.settings_name) for name in complete):
            return "the video has changed since its cache was made"
        for name in complete:
            with suppress(ReelkeepError):
                made_with = self.describe(f"{key.folder}/{name}")["labels"]["settings"]
                other = [n for n in sorted({*made_with, *key.settings}) if made_with.get(n) != key.settings.get(n)]
                return "its cache was made with " + ", ".join(f"{n}={made_with.get(n)} (now {key.settings.get(n)})" for n in other)
        return f"no cache of it is under {self.uri}"
