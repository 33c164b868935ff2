"""Lists, shows, checks and removes stored caches: `python -m jobs.caches ls|show|verify|rm URI [ID ...]`.

URI is the folder or s3:// prefix of the caches (`caches.uri`; `caches` under a job's output). Exit codes: 0 done; 1 a cache isn't whole;
2 wrong usage, or a cache that isn't there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Column, Table

from engine.errors import CacheMismatchError, InputError, ReelkeepError
from jobs.answer import bytes_text, plain
from jobs.terminal import complain, make_console
from pipeline.caches import CacheStore, StoredCache
from pipeline.config import StorageConfig
from pipeline.progress import clock_time
from pipeline.storage import Storage, join_uri, local_path, split_s3

DONE, DAMAGED, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the four actions; returns the exit code."""
    arguments = _parser().parse_args(argv)
    console = make_console(soft_wrap=True)
    try:
        store = CacheStore(
            arguments.uri, Storage(StorageConfig(endpoint_url=arguments.endpoint_url, addressing_style=arguments.addressing_style))
        )
        _check_folder(arguments.uri)
        return int(arguments.action(store, arguments, console))
    except ReelkeepError as error:
        complain(f"reelkeep caches: {error}")
        return UNUSABLE


def _check_folder(uri: str) -> None:
    """Refuse a local address at which no caches can be, before it looks like an empty store."""
    if split_s3(uri) is not None:
        return
    if not uri.strip() or not os.path.isdir(local_path(uri)):
        raise InputError(f"{uri}: no such folder; check the spelling")
    if os.path.isdir(local_path(uri) / "caches"):
        raise InputError(f"{uri}: is the output of a job; its caches are in {join_uri(uri, 'caches')}")


def list_caches(store: CacheStore, arguments: argparse.Namespace, console: Console) -> int:
    """A line a cache: whose, made how, how large, how old."""
    entries = list(store.entries())
    with ThreadPoolExecutor(16) as threads:
        described = list(threads.map(lambda entry: _described(store, entry), entries))
    longest = max((len(entry.cache_id) for entry in entries), default=0)
    table = Table(Column("cache", no_wrap=True, min_width=longest), "video", "model", "policy", "budget", "read", "size", "age", box=None)
    for entry, facts in zip(entries, described, strict=True):
        age = clock_time(max(0.0, time.time() - entry.modified_s))
        table.add_row(entry.cache_id, *map(plain, facts), bytes_text(entry.size_bytes), age)
    if entries:
        console.print(table)
    total = sum(entry.size_bytes for entry in entries)
    console.print(f"{len(entries)} cache{'s' * (len(entries) != 1)}, {bytes_text(total)}, under {store.uri}", markup=False)
    return DONE


def show(store: CacheStore, arguments: argparse.Namespace, console: Console) -> int:
    """Everything written on some caches, as JSON."""
    for entry in _chosen(store, arguments.ids, everything=False):
        metadata = store.describe(entry.cache_id)
        metadata["trace"]["blocks_read"] = len(metadata["trace"].pop("blocks"))
        shown = {"cache_id": entry.cache_id, "size_bytes": entry.size_bytes, **metadata}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    return DONE


def verify(store: CacheStore, arguments: argparse.Namespace, console: Console) -> int:
    """Read caches whole and check their checksums."""
    entries = _chosen(store, arguments.ids, everything=True)
    problems = 0
    for entry in entries:
        try:
            store.verify(entry.cache_id)
        except CacheMismatchError as error:
            problems += 1
            console.print(plain(str(error), longest=2000))
    console.print(f"{len(entries) - problems} whole, {problems} not")
    return DAMAGED if problems else DONE


def remove(store: CacheStore, arguments: argparse.Namespace, console: Console) -> int:
    """Remove caches by id, by age, or all of them."""
    entries = _chosen(store, arguments.ids, everything=arguments.all or arguments.older_than_s is not None)
    if arguments.older_than_s is not None:
        entries = [entry for entry in entries if time.time() - entry.modified_s > arguments.older_than_s]
    for entry in entries:
        store.remove(entry.cache_id)
    console.print(f"{len(entries)} removed, {bytes_text(sum(entry.size_bytes for entry in entries))}")
    return DONE


def _described(store: CacheStore, entry: StoredCache) -> tuple[str, ...]:
    try:
        found = store.describe(entry.cache_id)
        identity, trace = found["identity"], found["trace"]
        return found["labels"]["uri"], identity["model"], identity["policy"], identity["budget_tokens"], f"to {trace['last_time_s']:.0f} s"
    except (CacheMismatchError, KeyError) as error:
        return f"damaged ({type(error).__name__})", "?", "?", "?", "?"


def _chosen(store: CacheStore, ids: Sequence[str], *, everything: bool) -> list[StoredCache]:
    """The entries that ids name; an id may be cut short as long as it is unambiguous."""
    entries = list(store.entries())
    if not ids:
        if not everything:
            raise InputError("name the caches (ids as `ls` shows them); rm takes --all or --older-than-s instead")
        return entries
    chosen = []
    for wanted in ids:
        found = [entry for entry in entries if entry.cache_id == wanted] or [e for e in entries if e.cache_id.startswith(wanted)]
        if len(found) != 1:
            raise InputError(f"{wanted}: {len(found) or 'no'} caches under {store.uri} have this id; `ls` shows the ids")
        chosen += found
    return chosen


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reelkeep caches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True, metavar="ls|show|verify|rm")
    for name, action in (("ls", list_caches), ("show", show), ("verify", verify), ("rm", remove)):
        one = actions.add_parser(name, help=(action.__doc__ or "").strip().splitlines()[0])
        one.set_defaults(action=action, ids=[])
        one.add_argument("uri", help="folder or s3:// prefix of the caches")
        if name != "ls":
            one.add_argument("ids", nargs="*", help="ids as `ls` shows them, or their beginnings")
        if name == "rm":
            one.add_argument("--all", action="store_true", help="remove every cache")
            one.add_argument("--older-than-s", type=_seconds, help="remove those written more than so many seconds ago")
        one.add_argument("--endpoint-url", help="address of an S3-compatible server; default: AWS, or AWS_ENDPOINT_URL")
        one.add_argument("--addressing-style", choices=("auto", "path", "virtual"), default="auto", help="see storage.addressing_style")
    return parser


if __name__ == "__main__":
    sys.exit(main())
