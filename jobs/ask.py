"""New questions about videos that an earlier job has watched: answered from its kept caches, without reading a frame.

    python -m jobs.ask --archive OUTPUT_OF_THE_FIRST_JOB --manifest NEW_QUESTIONS --output ELSEWHERE

Takes every setting of `jobs.answer`, and two of its own:
  --archive URI        output of the job that watched: its model, memory and decoding settings and its caches are taken, other
                       settings win over them. Or name the caches with --caches.uri and give the same settings as that job.
  --prefill-missing    watch the videos that have no usable cache, and keep theirs; without it each of them is an error row with the
                       reason. They are tried again by the next start with the same output.

The tables are those of `jobs.answer`; `cache_id` names the cache that answered, and the memory table tells what watching cost then.
Exit codes as for `jobs.answer`: 3 when a question has no answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from engine.errors import ConfigError
from engine.policies import make_policy
from jobs.answer import carry_out, plain
from pipeline.caches import CacheKey, CacheStore
from pipeline.config import JobConfig, load_config
from pipeline.run import Run
from pipeline.storage import Storage, join_uri
from pipeline.storage_errors import MissingObjectError

PROG = "reelkeep ask"
_TAKEN = ("engine", "decode")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--archive")
    parser.add_argument("--prefill-missing", action="store_true")
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, rest = parser.parse_known_args(arguments)
    if "--help" in rest or "-h" in rest:
        print(__doc__)
    return carry_out(lambda: settings(own.archive, rest, prefill_missing=own.prefill_missing), show_plan)


def settings(archive: str | None, argv: Sequence[str], *, prefill_missing: bool = False) -> JobConfig:
    """The job: the archive's settings, the user's on top, and no watching unless asked for.

    Raises:
        ConfigError: no caches are named, the policy keeps none, or the output is the archive's own.
    """
    defaults: dict[str, Any] = {}
    if archive is not None:
        defaults = archive_settings(archive, Storage(load_config(None, argv, prog=PROG).storage))
    config = load_config(None, argv, prog=PROG, defaults=defaults)
    if config.caches.uri is None:
        raise ConfigError("no caches are named; give --archive with the output of the job that watched, or --caches.uri")
    if make_policy(config.engine.policy, config.engine.policy_options).needs_question:
        raise ConfigError(
            f"engine.policy={config.engine.policy} reads a video for one question, so no caches are kept; use jobs.answer for new questions"
        )
    if CacheStore.of(config).uri == CacheStore(join_uri(config.output, "caches"), Storage()).uri:
        raise ConfigError(f"output={config.output} is the watched archive's own, whose tables would be replaced; name another output")
    changes: dict[str, Any] = {"caches": config.caches.model_copy(update={"missing": "watch" if prefill_missing else "refuse"})}
    if not prefill_missing:
        changes["decode"] = config.decode.model_copy(update={"where": "actor"})  # no decoders, so no CPUs are set aside for them
    return config.model_copy(update=changes)


def archive_settings(archive: str, storage: Storage) -> dict[str, Any]:
    """What the job that watched has left on record.

    Raises:
        ConfigError: that isn't the output of a job.
    """
    try:
        record = json.loads(storage.read_bytes(join_uri(archive, "run.json")))["config"]
        taken = {name: dict(record[name]) for name in _TAKEN}
        return taken | {"caches": {"uri": record.get("caches", {}).get("uri") or join_uri(archive, "caches")}}
    except MissingObjectError:
        raise ConfigError(f"archive={archive}: holds no run.json; give the output of a job that has ended") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"archive={archive}: its run.json can't be read ({error!r}); give --caches.uri and the settings instead"
        ) from None


def show_plan(job: Run, console: Console) -> None:
    """Which videos have a cache to ask, and why the others don't."""
    store = CacheStore.of(job.config, job.storage)
    reasons = {task.video_id: store.why_missing(CacheKey.of(job.config, task)) for task in job.pending}
    for video_id, reason in reasons.items():
        if reason:
            console.print(plain(f"{video_id}: {reason}", longest=2000), soft_wrap=True)
    there = sum(not reason for reason in reasons.values())
    questions = sum(len(task.questions) for task in job.pending)
    console.print(
        plain(f"to ask: {questions} questions about {len(reasons)} videos; {there} have a cache under {store.uri}", 2000), soft_wrap=True
    )
    console.print(plain(f"nothing was done (--dry-run); output would be {job.config.output}", 2000), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
