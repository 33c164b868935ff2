"""Local files and S3 objects behind one door: read, list, write once, and spool videos to disk."""

from __future__ import annotations

import hashlib
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
from boto3.s3.transfer import TransferConfig
from botocore import exceptions as botocore
from botocore.config import Config

from pipeline import local_files
from pipeline.address import join_uri, local_path, split_s3
from pipeline.config import StorageConfig
from pipeline.local_files import ObjectStat
from pipeline.spool import Spool
from pipeline.storage_errors import (
    AccessDeniedError,
    MissingBucketError,
    MissingObjectError,
    StorageError,
    StorageUnreachableError,
    http_status,
    translated,
)

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = ["ObjectStat", "Storage", "join_uri", "local_path", "split_s3"]

_T = TypeVar("_T")
_LIST_ABOVE = 200
_REQUEST_THREADS = 16


class Storage:
    """Reads and writes by address. Can be sent to another process: connections are made where they are used.

    Every method raises StorageError (an InputError) that names the address, what happened and the remedy. Requests are retried
    `max_attempts` times and each has a timeout.
    """

    def __init__(self, config: StorageConfig | None = None) -> None:
        self.config = config or StorageConfig()
        self._lock = threading.Lock()
        self._client: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]

    def exists(self, uri: str) -> bool:
        """Whether a file (not a folder) is there."""
        try:
            self.stat(uri)
        except MissingObjectError:
            return False
        return True

    def size(self, uri: str) -> int:
        """Bytes of a file."""
        return self.stat(uri).size_bytes

    def stat(self, uri: str) -> ObjectStat:
        """Size and tag of a file.

        Raises:
            MissingObjectError: nothing is there.
        """
        s3 = split_s3(uri)
        with self._translated(uri):
            if s3 is None:
                path = local_path(uri)
                if path.is_dir():
                    raise IsADirectoryError(21, "is a directory")
                found = path.stat()
                return ObjectStat(uri, found.st_size, f"{found.st_size}-{found.st_mtime_ns}", modified_s=found.st_mtime)
            head = self._s3().head_object(Bucket=s3[0], Key=s3[1])
            tag = head["ETag"].strip('"')
            # Under KMS or customer keys the ETag looks like an MD5 but isn't one.
            plain = head.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in head
            md5 = tag if plain and re.fullmatch(r"[0-9a-f]{32}", tag) else ""
            return ObjectStat(uri, head["ContentLength"], tag, md5, head["LastModified"].timestamp())

    def stat_many(self, uris: Iterable[str]) -> dict[str, ObjectStat | StorageError]:
        """`stat` of many files at once; a file that can't be read has its error as value.

        Objects that share a folder with many others are listed rather than asked for one by one.
        """
        folders: dict[str, list[str]] = defaultdict(list)
        for uri in dict.fromkeys(uris):
            folders[uri.rpartition("/")[0] if uri.startswith("s3://") else ""].append(uri)
        found: dict[str, ObjectStat | StorageError] = {}
        single = folders.pop("", [])
        for folder, members in folders.items():
            if len(members) <= _LIST_ABOVE:
                single += members
                continue
            try:
                listed = {entry.uri: entry for entry in self.scan(folder, recursive=False)}
            except (AccessDeniedError, MissingBucketError):
                single += members  # who may not list a bucket may still read from it; and one bucket's trouble isn't the others'
                continue
            found |= {uri: listed.get(uri, MissingObjectError(f"{uri}: no such object; check the spelling")) for uri in members}
        with ThreadPoolExecutor(_REQUEST_THREADS) as threads:
            found |= zip(single, threads.map(self._stat_or_error, single), strict=True)
        return found

    def _stat_or_error(self, uri: str) -> ObjectStat | StorageError:
        try:
            return self.stat(uri)
        except StorageError as error:
            return error

    def list(self, prefix: str) -> Sequence[str]:
        """Addresses of all files under a folder or prefix, sorted; empty when there are none."""
        return [entry.uri for entry in self.scan(prefix)]

    def scan(self, prefix: str, *, recursive: bool = True) -> Iterator[ObjectStat]:
        """Files under a folder (a prefix is taken as a folder: s3://b/cam is s3://b/cam/), in the order of their names."""
        s3 = split_s3(prefix)
        with self._translated(prefix):
            if s3 is None:
                yield from local_files.scan(local_path(prefix), recursive)
                return
            bucket, key = s3
            folder = key.rstrip("/") + "/" if key.rstrip("/") else ""
            pages = (
                self._s3()
                .get_paginator("list_objects_v2")
                .paginate(Bucket=bucket, Prefix=folder, **({} if recursive else {"Delimiter": "/"}))
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    if not entry["Key"].endswith("/"):
                        written_s = entry["LastModified"].timestamp()
                        yield ObjectStat(f"s3://{bucket}/{entry['Key']}", entry["Size"], entry["ETag"].strip('"'), modified_s=written_s)

    def read_bytes(self, uri: str) -> bytes:
        """The whole content of a small file."""
        s3 = split_s3(uri)
        with self._translated(uri):
            if s3 is None:
                return local_path(uri).read_bytes()
            return self._again(lambda: self._s3().get_object(Bucket=s3[0], Key=s3[1])["Body"].read(), _cut_short)

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        """A part of a file: `length` bytes from `start` on, fewer where the file ends."""
        s3 = split_s3(uri)
        with self._translated(uri):
            if s3 is None:
                with local_path(uri).open("rb") as file:
                    file.seek(start)
                    return file.read(length)
            wanted = {"Bucket": s3[0], "Key": s3[1], "Range": f"bytes={start}-{start + length - 1}"}
            return self._again(lambda: self._s3().get_object(**wanted)["Body"].read(), _cut_short)

    def write_bytes(self, uri: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Write a file, whole or not at all.

        Args:
            if_absent: leave a file that is already there alone. Of several writers at once exactly one wins.

        Returns:
            Whether this call's data is what is there now.
        """
        s3 = split_s3(uri)
        with self._translated(uri):
            if s3 is None:
                return local_files.write(local_path(uri), data, if_absent)
            condition = {"IfNoneMatch": "*"} if if_absent else {}
            try:
                self._again(lambda: self._s3().put_object(Bucket=s3[0], Key=s3[1], Body=data, **condition), _in_conflict)
            except botocore.ClientError as error:
                if if_absent and http_status(error) == 412:
                    return False
                raise
            return True

    def remove_unfinished(self, prefix: str, older_than_s: float) -> None:
        """Remove what writers that were killed have left under a folder; buckets show nothing unfinished."""
        if split_s3(prefix) is None:
            local_files.remove_unfinished(local_path(prefix), older_than_s)

    def delete(self, uri: str) -> None:
        """Remove a file; nothing happens when it isn't there."""
        s3 = split_s3(uri)
        with self._translated(uri):
            if s3 is None:
                local_path(uri).unlink(missing_ok=True)
            else:
                self._s3().delete_object(Bucket=s3[0], Key=s3[1])

    @contextmanager
    def spool(self, uri: str) -> Iterator[Path]:
        """Give a local path with the content of a file: a local one in place, an object as a download removed at the end of the block.

        Raises:
            MissingObjectError: nothing is there.
            SpoolSpaceError: too large for the spool or the disk.
            StorageUnreachableError: the download was cut short or differs from the object, at every try.
        """
        s3 = split_s3(uri)
        known = self.stat(uri)
        if s3 is None:
            yield local_path(uri)
            return
        suffix = Path(s3[1]).suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,8}", Path(s3[1]).suffix) else ""
        spool = Spool(self.config.spool_dir, self.config.spool_bytes, self.config.spool_wait_s)
        with spool.file(uri, known.size_bytes, suffix) as (path, file):
            for attempt in range(1, self.config.max_attempts + 1):
                file.seek(0)
                file.truncate()
                with self._translated(uri):
                    self._s3().download_fileobj(*s3, file, Config=TransferConfig(max_concurrency=self.config.download_threads))
                    file.flush()
                problem = self._difference(path, known)
                if not problem:
                    break
                _pause(attempt)
            else:
                raise StorageUnreachableError(f"{uri}: the download differs from the object, at every try: {problem}")
            yield path

    def _difference(self, path: Path, known: ObjectStat) -> str:
        """How a download differs from its object; "" when it doesn't."""
        size = path.stat().st_size
        if size != known.size_bytes:
            return f"{size} bytes instead of {known.size_bytes}"
        if not self.config.verify_etag or not known.md5:
            return ""
        digest = hashlib.md5(usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
        return "" if digest.hexdigest() == known.md5 else f"MD5 {digest.hexdigest()} instead of {known.md5} (storage.verify_etag)"

    def pyarrow_filesystem(self, uri: str) -> tuple[FileSystem, str]:
        """A pyarrow file system and the path within it, with the same endpoint and credentials; for short use, as these may expire."""
        from pyarrow import fs

        s3 = split_s3(uri)
        if s3 is None:
            return fs.LocalFileSystem(), str(local_path(uri))
        with self._translated(uri):
            keys = boto3.session.Session().get_credentials()
            if keys is None:
                raise botocore.NoCredentialsError()
            frozen = keys.get_frozen_credentials()
            client = self._s3()
        return fs.S3FileSystem(
            access_key=frozen.access_key,
            secret_key=frozen.secret_key,
            session_token=frozen.token,
            region=client.meta.region_name,
            endpoint_override=client.meta.endpoint_url,
            force_virtual_addressing=self.config.addressing_style == "virtual",
            connect_timeout=self.config.connect_timeout_s,
            request_timeout=self.config.read_timeout_s,
            retry_strategy=fs.AwsDefaultS3RetryStrategy(max_attempts=self.config.max_attempts),
        ), f"{s3[0]}/{s3[1]}"

    def _translated(self, uri: str) -> Any:
        return translated(uri, self.config.endpoint_url if "://" in uri else None)

    def _again(self, request: Callable[[], _T], worth_it: Callable[[Exception], bool]) -> _T:
        """Repeat what botocore's own retries don't: a body cut short, a conditional write that met another one."""
        attempt = 1
        while True:
            try:
                return request()
            except Exception as error:
                if attempt == self.config.max_attempts or not worth_it(error):
                    raise
            _pause(attempt)
            attempt += 1

    def _s3(self) -> Any:
        """This process's client: boto3 sessions mustn't be shared across a fork or made by two threads at once."""
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                # Servers other than AWS often refuse the checksums that newer SDKs add by themselves.
                checksums = "when_required" if self.config.endpoint_url else "when_supported"
                session = boto3.session.Session()
                client = session.client(
                    "s3",
                    endpoint_url=self.config.endpoint_url,
                    region_name=self.config.region or session.region_name or "us-east-1",
                    config=Config(
                        retries={"mode": "adaptive", "total_max_attempts": self.config.max_attempts},
                        connect_timeout=self.config.connect_timeout_s,
                        read_timeout=self.config.read_timeout_s,
                        max_pool_connections=2 * _REQUEST_THREADS,
                        s3={"addressing_style": self.config.addressing_style},
                        request_checksum_calculation=checksums,
                        response_checksum_validation=checksums,
                    ),
                )
                self._client = (os.getpid(), client)
            return self._client[1]


def _cut_short(error: Exception) -> bool:
    return isinstance(error, (botocore.IncompleteReadError, botocore.ResponseStreamingError, botocore.ReadTimeoutError))


def _in_conflict(error: Exception) -> bool:
    return isinstance(error, botocore.ClientError) and http_status(error) == 409


def _pause(attempt: int) -> None:
    time.sleep(min(5.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
