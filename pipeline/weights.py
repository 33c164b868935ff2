"""Checkpoints on this node: fetched from a bucket or a hub by whoever asks first, checked, and there for everybody else."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from pipeline.storage import ObjectStat, Storage, split_s3
from pipeline.storage_errors import SpoolSpaceError, StorageError, StorageUnreachableError, translated

log = logging.getLogger("reelkeep.weights")

RANGE_BYTES = 32 * 2**20
THREADS = 8
SPARE_BYTES = 2**30
"""Room that a checkpoint leaves on the disk: a node without any is taken out of service."""

CHECKSUMS = "SHA256SUMS"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")


def pinned_revision(engine: EngineConfig, storage: Storage) -> str | None:
    """Which weights a job's driver and all its workers are to use: for an s3:// prefix, a digest of names, sizes and tags of its files.

    Returns:
        16 hex digits; for a model that isn't in a bucket, `engine.revision` as it is.

    Raises:
        ConfigError: nothing is there, or not what `engine.revision` says.
    """
    if split_s3(engine.model) is None:
        return engine.revision
    return _checked_revision(engine.model, _listing(engine.model, storage), engine.revision)


def checkpoint_folder(engine: EngineConfig, storage: Storage, *, weights: bool = True) -> Path | None:
    """A local folder with a checkpoint, the same for every process of this node.

    Args:
        engine: `model` is an s3:// prefix, a hub id, a folder, or `bundled`; `revision` as `pinned_revision` gave it to the driver.
        storage: what reads the bucket. Checkpoints from buckets are kept in its `models_dir`; those from a hub in its own cache (HF_HOME).
        weights: False leaves the weights out: a driver needs configuration and processor only.

    Returns:
        The folder; None for a folder or `bundled`, which need no fetching.

    Raises:
        ConfigError: no checkpoint is there, or not the one that the job was started with.
        SpoolSpaceError: it doesn't fit on the disk.
        StorageError: it can't be read, or what arrives isn't what was sent.
    """
    model, revision = engine.model, engine.revision
    folder = Path(storage.config.models_dir) if storage.config.models_dir else _private_folder()
    if split_s3(model) is not None:
        return _from_bucket(model, storage, revision, folder, weights)
    if model == "bundled" or os.path.exists(model) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    return _from_hub(model, revision, folder, weights)


def _private_folder() -> Path:
    """Where this user's checkpoints are kept when nobody names a folder: nobody else may lay down weights there."""
    folder = Path(tempfile.gettempdir()) / f"reelkeep-models-{os.getuid()}"
    with translated(str(folder)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise StorageError(f"{folder} belongs to another user or leads elsewhere; name a folder of your own in storage.models_dir")
    return folder


def _from_bucket(model: str, storage: Storage, revision: str | None, folder: Path, weights: bool) -> Path:
    entries = _listing(model, storage)
    found = _checked_revision(model, entries, revision)
    if not weights:
        entries = [entry for entry in entries if not any(PurePosixPath(entry.uri).match(pattern) for pattern in _WEIGHTS)]
    place = folder / f"{model.rstrip('/').rpartition('/')[2]}-{found}{'' if weights else '-settings'}"
    with _alone(folder, place.name):
        if not _is_whole(place, model, entries):
            _fetch(model, storage, entries, place, found)
    return place


def _fetch(model: str, storage: Storage, entries: Sequence[ObjectStat], place: Path, revision: str) -> None:
    size_bytes = sum(entry.size_bytes for entry in entries)
    part = place.with_name(f".{place.name}.part")
    for left in (part, place):  # of a process that was killed; whatever somebody has done to a folder that was whole
        _remove(left)
    _look_for_room(model, size_bytes, place.parent)
    log.info("fetching %s, %.2f GB, into %s", model, size_bytes / 1e9, place)
    try:
        with translated(str(part)):
            for entry in entries:
                _download(storage, entry, part / _name(entry, model))
            _check_sums(model, part)
        _checked_revision(model, _listing(model, storage), revision)  # nothing was changed meanwhile
        with translated(str(place)):
            os.replace(part, place)
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _download(storage: Storage, entry: ObjectStat, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    md5 = storage.stat(entry.uri).md5 if storage.config.verify_etag else ""
    for _ in range(storage.config.max_attempts):
        with path.open("wb") as file, ThreadPoolExecutor(THREADS) as threads:

            def copy(start: int, file: Any = file) -> None:
                os.pwrite(file.fileno(), storage.read_range(entry.uri, start, min(RANGE_BYTES, entry.size_bytes - start)), start)

            list(threads.map(copy, range(0, entry.size_bytes, RANGE_BYTES)))
            os.fsync(file.fileno())
        size = path.stat().st_size
        if size == entry.size_bytes and (not md5 or _digest(path, hashlib.md5(usedforsecurity=False)) == md5):
            return
    raise StorageUnreachableError(f"{entry.uri}: the download differs from the object, at every try")


def _check_sums(model: str, part: Path) -> None:
    """Compare with the SHA256SUMS that whoever uploaded the checkpoint may have put beside it."""
    sums = part / CHECKSUMS
    for line in sums.read_text(encoding="utf-8").splitlines() if sums.exists() else ():
        wanted, _, name = line.partition(" ")
        path = part / name.strip().lstrip("*")
        if path.is_file() and _digest(path, hashlib.sha256()) != wanted.lower():
            raise StorageError(f"{model}/{path.name}: differs from its line in {CHECKSUMS}; upload the checkpoint again")


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    text: str = digest.hexdigest()
    return text


def _from_hub(model: str, revision: str | None, folder: Path, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted: dict[str, Any] = {"revision": revision, "ignore_patterns": None if weights else list(_WEIGHTS)}
    with _alone(folder, model.replace("/", "--")):
        try:
            planned = snapshot_download(model, dry_run=True, **wanted)
            missing = [file for file in planned if file.will_download]  # type: ignore[union-attr]
            if missing:
                first = Path(missing[0].local_path)  # type: ignore[union-attr]
                _look_for_room(model, sum(file.file_size or 0 for file in missing), first)  # type: ignore[union-attr]
                log.info("fetching %d files of %s from the hub", len(missing), model)
            return Path(str(snapshot_download(model, **wanted)))
        except (HfHubHTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, OSError) as error:
            try:
                return Path(str(snapshot_download(model, local_files_only=True, **wanted)))
            except (LocalEntryNotFoundError, OSError):
                if HF_HUB_OFFLINE:
                    reason = "HF_HUB_OFFLINE is set, so that the hub isn't asked; unset it"
                else:
                    told = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                    reason = f"the hub can't be asked ({told}); check the id, HF_TOKEN and the network"
                raise ConfigError(f"engine.model={model} isn't on this node, and {reason}, or name a folder or an s3:// prefix") from None


def _look_for_room(model: str, size_bytes: int, place: Path) -> None:
    disk = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(disk).free
    if size_bytes + SPARE_BYTES > free:
        raise SpoolSpaceError(
            f"engine.model={model}: its {size_bytes} bytes and {SPARE_BYTES} to spare don't fit on the disk of {disk}, which has {free} free; "
            "remove old checkpoints or give the node a larger disk"
        )


def _listing(model: str, storage: Storage) -> list[ObjectStat]:
    entries = sorted(storage.scan(model), key=lambda entry: entry.uri)
    if not any(_name(entry, model) == "config.json" for entry in entries):
        raise ConfigError(f"engine.model={model}: no config.json there; give the prefix that holds the checkpoint's files")
    for entry in entries:
        name = _name(entry, model)
        if name.startswith("/") or "\0" in name or ".." in PurePosixPath(name).parts:
            raise ConfigError(f"engine.model={model}: holds the name {name!r}, which leads out of its folder")
    return entries


def _name(entry: ObjectStat, model: str) -> str:
    return entry.uri.removeprefix(model.rstrip("/") + "/")


def _checked_revision(model: str, entries: Sequence[ObjectStat], wanted: str | None) -> str:
    lines = [f"{_name(entry, model)}:{entry.size_bytes}:{entry.tag}" for entry in entries]
    found = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    if wanted not in (None, found):
        raise ConfigError(
            f"engine.model={model} holds other files than engine.revision={wanted}, which the job was started with (now {found}); put those "
            "files back, or start a new job without engine.revision"
        )
    return found


def _is_whole(place: Path, model: str, entries: Sequence[ObjectStat]) -> bool:
    try:
        return all((place / _name(entry, model)).stat().st_size == entry.size_bytes for entry in entries)
    except OSError:
        return False


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Hold one checkpoint's lock among all processes that share the folder; a process that dies lets go of it."""
    with translated(str(folder)):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = (folder / f".{name}.lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
