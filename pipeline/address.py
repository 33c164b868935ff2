"""Addresses of files and objects: local paths, file:// and s3://."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.storage_errors import StorageError


def join_uri(base: str, *parts: str) -> str:
    """A name under a folder or prefix."""
    return "/".join([base.rstrip("/"), *parts])


def split_s3(uri: str) -> tuple[str, str] | None:
    """Bucket and key of an s3:// address, the key as it is, without decoding; None for a local path.

    Raises:
        StorageError: a scheme that isn't supported, or no bucket.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return None
    if scheme != "s3":
        raise StorageError(f"{uri}: {scheme}:// isn't supported; use a local path, file:// or s3://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError(f"{uri}: names no bucket; write s3://bucket/key")
    return bucket, key


def local_path(uri: str) -> Path:
    """Absolute path of a local path or file:// address.

    Raises:
        StorageError: another machine's file, or a null character, which no path can hold.
    """
    if uri.startswith("file://"):
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"{uri}: names the host {parts.netloc!r}; write file:///path")
        uri = unquote(parts.path)
    if "\0" in uri:
        raise StorageError(f"{uri!r:.80} holds a null character, which no path can; correct it")
    return Path(os.path.abspath(os.path.expanduser(uri)))
