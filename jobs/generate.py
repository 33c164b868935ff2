"""Write synthetic videos or pictures whose every event is known, with a manifest of questions and right answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError, ReelkeepError
from jobs.terminal import complain
from pipeline.synthetic.dataset import PICTURES, SETS, plan_videos, write_dataset
from pipeline.synthetic.script import EVENTS
from pipeline.synthetic.video import GROUP_S


def main(argv: Sequence[str] | None = None) -> int:
    """Generate a data set; returns the exit code: 0 written, 2 a bad argument."""
    arguments = _parser().parse_args(argv)
    try:
        _check(arguments)
        planned = plan_videos(
            videos=arguments.videos,
            groups=arguments.groups,
            set_name=arguments.set,
            seed=arguments.seed,
            questions=arguments.questions,
            options={"always": True, "never": False, "mixed": None}[arguments.options],
            kinds=None if arguments.kinds == "all" else tuple(arguments.kinds.split(",")),
        )
        manifest = write_dataset(Path(arguments.output), planned)
    except ReelkeepError as error:
        complain(f"reelkeep generate: {error}")
        return 2
    except OSError as error:
        complain(f"reelkeep generate: --output={arguments.output}: {error.strerror or error}; name a folder that can be written")
        return 2
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    kinds = Counter(q["question_id"].rsplit("-", 1)[0] for row in rows for q in row["questions"])
    size_bytes = sum((manifest.parent / row["uri"]).stat().st_size for row in rows)
    made = f"pictures of {arguments.groups} cells" if arguments.set.startswith(PICTURES) else f"videos of {arguments.groups * GROUP_S:g} s"
    print(f"{len(rows)} {made}, {size_bytes / 1e6:.1f} MB, {sum(kinds.values())} questions {dict(kinds)}")
    print(f"manifest: {manifest}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reelkeep generate", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", required=True, help="folder for the .mp4 or .jpg files and manifest.jsonl")
    parser.add_argument("--videos", type=int, default=10, help="number of videos or pictures")
    parser.add_argument(
        "--groups",
        type=int,
        default=64,
        help=f"length of each video in temporal groups of {GROUP_S:g} s (two frames at 2 fps); cells of a picture",
    )
    events = ", ".join(f"{name}: {shapes} shapes and {digits} digits" for name, (shapes, digits) in EVENTS.items())
    parser.add_argument("--set", choices=list(SETS), default="simple", help=f"events in each video or picture ({events})")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same videos and questions")
    parser.add_argument("--questions", type=int, default=8, help="questions a video, the kinds in turn")
    parser.add_argument(
        "--options", choices=["mixed", "always", "never"], default="mixed", help="multiple choice, free-form, or either by lot"
    )
    parser.add_argument("--kinds", default="all", help="kinds of question, separated by commas; all: those of the set")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    for name, low in (("videos", 1), ("groups", 1), ("questions", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value < low:
            raise ConfigError(f"--{name}={value} must be at least {low}")


if __name__ == "__main__":
    sys.exit(main())
