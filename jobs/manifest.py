"""Makes a manifest of a benchmark: `python -m jobs.manifest mlvu --annotations DIR --videos PREFIX --output manifest.jsonl`.

Benchmarks are those of `jobs.evaluate`. Annotations that can't be used are left out and listed. Exit codes: 0 written, 2 the input can't be
used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.errors import InputError, ReelkeepError
from jobs.benchmarks import BENCHMARKS, Benchmark, Form, Problem, Sample
from jobs.terminal import complain
from pipeline.manifest import tasks_from_rows
from pipeline.manifest_rows import Row
from pipeline.results import digest
from pipeline.storage import Storage, join_uri, local_path, split_s3
from pipeline.video.prompt import SUFFIX, prompt_document


def convert(
    benchmark: Benchmark, annotations: Path, videos: str, output: str, tasks: Sequence[str] = (), form: Form = "letters"
) -> tuple[list[Sample], list[Problem]]:
    """Write the manifest, and a folder `prompts` beside it where the benchmark's prompts are interleaved.

    Returns:
        The samples that were written, and those annotations that were left out.

    Raises:
        InputError: the annotations aren't there or aren't of the published form.
        ManifestError: the rows don't make a manifest.
    """
    samples, problems = benchmark.read(annotations, videos, tasks, form)
    check_output(output, annotations, [*samples, *problems])
    write_manifest(samples, output, form, Storage())
    return samples, problems


def check_output(output: str, annotations: Path, read: Iterable[Sample | Problem]) -> None:
    """Refuse to write over a file that was read.

    Raises:
        InputError: that is where the output would go, or it is no regular file.
    """
    if split_s3(output):
        return
    place, source = Path(os.path.realpath(local_path(output))), Path(os.path.realpath(annotations))
    if place == source or (source == place.parent and any(item.where.startswith(place.name) for item in read)):
        raise InputError(f"output={output}: is one of the annotation files; write it elsewhere")
    if os.path.exists(place) and not os.path.isfile(place):
        raise InputError(f"output={output}: isn't a regular file; name another")


def write_manifest(samples: Iterable[Sample], output: str, form: Form, storage: Storage) -> None:
    """Write samples as a manifest, a row a question.

    Raises:
        ManifestError: the rows don't make a manifest.
        StorageError: it can't be written.
    """
    folder = output.rpartition("/")[0] if split_s3(output) else str(local_path(output).parent)
    rows = []
    for sample in samples:
        uri = _write_prompt(sample, folder, storage) if sample.parts else None
        rows.append(Row(sample.where, sample.manifest_row(form, uri)))
    tasks_from_rows(rows, output)
    storage.write_bytes(output, "".join(json.dumps(row.values, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode())


def _write_prompt(sample: Sample, folder: str, storage: Storage) -> str:
    """Write what comes before the question, unless it is there already: a new file would look like new content."""
    distant = next((part.uri for part in sample.parts if not isinstance(part, str) and split_s3(part.uri)), None)
    if distant or split_s3(folder):
        raise InputError(
            f"{distant or folder}: interleaved prompts name files of this machine, so pictures and output can't be in a bucket; use folders"
        )
    parts = [{"text": part} if isinstance(part, str) else {"image": str(local_path(part.uri))} for part in sample.parts]
    uri = join_uri(folder, "prompts", digest([sample.video_id, parts])[:32] + SUFFIX)
    storage.write_bytes(uri, prompt_document(parts), if_absent=True)
    return uri


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, convert, report; 0 when a manifest was written, 2 when the input can't be used."""
    parser = argparse.ArgumentParser(
        prog="reelkeep manifest", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        about = f"from the annotations of {benchmark.title}"
        kind = kinds.add_parser(name, help=about, description=f"A manifest {about} ({benchmark.source}).", allow_abbrev=False)
        kind.add_argument("--annotations", type=Path, required=True, help=benchmark.annotations)
        kind.add_argument("--videos", required=True, help=benchmark.videos)
        kind.add_argument("--output", required=True, help="manifest to write, .jsonl, local or s3://")
        kind.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks to take; default: all")
        kind.add_argument(
            "--form",
            choices=("letters", "published"),
            default="letters",
            help="letters: options are given to the engine. published: the benchmark's own words, answered freely",
        )
    given = parser.parse_args(argv)
    try:
        samples, problems = convert(BENCHMARKS[given.benchmark], given.annotations, given.videos, given.output, given.tasks, given.form)
    except ReelkeepError as error:
        complain(error)
        return 2
    for problem in problems:
        complain(f"left out {problem}")
    print(f"{given.output}: {len(samples)} questions written, {len(problems)} left out, {len(samples) + len(problems)} read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
