"""One HTML file about a run: totals, memory, time, failures, and every answer to browse.

    python -m jobs.report RUN

RUN is the output of a job, a folder or an s3:// prefix. The page needs no server and asks nothing of the network. Exit codes: 0 written;
2 wrong usage, or not the output of a job.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from engine.errors import ReelkeepError
from jobs.report_page.facts import read_run
from jobs.report_page.page import render
from jobs.report_page.thumbnails import thumbnails
from jobs.terminal import complain
from pipeline.config import LogConfig, StorageConfig
from pipeline.logs import set_up_logging
from pipeline.storage import Storage, join_uri

WRITTEN, UNUSABLE = 0, 2

log = logging.getLogger("reelkeep.report")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    parser = argparse.ArgumentParser(prog="reelkeep report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output of a job: folder or s3:// prefix")
    parser.add_argument("--output", help="file or s3:// address to write; default: report.html under RUN")
    parser.add_argument(
        "--thumbnails", type=int, default=0, metavar="N", help="show a frame of the first N videos; reads the videos (default 0)"
    )
    parser.add_argument("--max-answers", type=int, default=20_000, metavar="N", help="answers on the page (default 20000)")
    parser.add_argument("--endpoint-url", help="address of an S3-compatible server; default: AWS, or AWS_ENDPOINT_URL")
    parser.add_argument(
        "--addressing-style", choices=("auto", "path", "virtual"), default="auto", help="how a bucket is put into the address"
    )
    arguments = parser.parse_args(argv)
    set_up_logging(LogConfig())
    try:
        storage = Storage(StorageConfig(endpoint_url=arguments.endpoint_url, addressing_style=arguments.addressing_style))
        facts = read_run(arguments.run, storage, arguments.max_answers)
        pictures = thumbnails([(row["video_id"], row["uri"]) for row in facts.videos[: arguments.thumbnails]], storage)
        target = arguments.output or join_uri(arguments.run, "report.html")
        storage.write_bytes(target, render(facts, pictures).encode(errors="replace"))
    except ReelkeepError as error:
        complain(f"reelkeep report: {error}")
        return UNUSABLE
    print(target)
    return WRITTEN


if __name__ == "__main__":
    sys.exit(main())
