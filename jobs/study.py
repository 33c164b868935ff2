"""Which entries are worth keeping? Policies at several budgets, asked the same questions about videos or pictures whose every event is known.

Each is written as a file, decoded as the main job does, kept in every way that is compared and asked. A study can be stopped and
started again: what is in its folder isn't done twice. It ends with a table, `summary.parquet`, `answers.parquet` and `accuracy.png`.
Budgets count the visual tokens kept beyond the protected prompt prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine import EngineConfig
from engine.errors import ConfigError, ReelkeepError
from engine.models import checkpoint_digest, load_adapter
from jobs.studying import tables
from jobs.studying.cells import grid
from jobs.studying.trial import Laboratory, Watched
from jobs.terminal import complain, make_console
from pipeline.results import digest
from pipeline.synthetic.dataset import PICTURES, SETS, SyntheticVideo, plan_videos

TRAINED_KINDS = "colour,shape,digit,exists"
VIDEOS_MOST = 100_000
QUESTIONS_MOST = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; returns the exit code: 0 done, 2 a bad argument, 130 stopped."""
    arguments = _parser().parse_args(argv)
    try:
        return _study(arguments)
    except ReelkeepError as error:
        complain(f"reelkeep study: {error}")
        return 2
    except OSError as error:
        complain(f"reelkeep study: --output={arguments.output}: {error.strerror or error}; name a folder that can be written")
        return 2
    except KeyboardInterrupt:
        complain(f"reelkeep study: stopped; the same command goes on from what is in {arguments.output}")
        return 130


def _study(arguments: argparse.Namespace) -> int:
    for name in ("groups", "questions", "questions_per_video"):
        _numbers(f"--{name.replace('_', '-')}", str(getattr(arguments, name)))
    for name in ("policies", "kinds", "compress", "alignments"):
        if not _words(getattr(arguments, name)):
            raise ConfigError(f"--{name} is empty; leave it out for {_parser().get_default(name)}")
    if arguments.questions_per_video > QUESTIONS_MOST:
        raise ConfigError(f"--questions-per-video={arguments.questions_per_video}: a video has no more than {QUESTIONS_MOST} to ask")
    if arguments.seed < 0:
        raise ConfigError(f"--seed={arguments.seed} must be at least 0")
    cells = grid(
        _words(arguments.policies),
        _numbers("--budgets", arguments.budgets),
        _numbers("--block-groups", arguments.block_groups),
        _words(arguments.compress),
        _words(arguments.alignments),
    )
    videos, pictures = list(_videos(arguments)), arguments.set.startswith(PICTURES)
    laboratory = Laboratory(load_adapter(EngineConfig(model=arguments.model, device=arguments.device)), "image" if pictures else "video")
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    notebook = folder / "answers.jsonl"
    model = f"{arguments.model}@{checkpoint_digest(arguments.model)}"
    visual_tokens, started_s = 0, time.monotonic()
    done = _read(notebook, model, {video.video_id: [question_id for question_id, _ in video.questions] for video in videos})
    with notebook.open("a") as notes, tempfile.TemporaryDirectory() as scratch:
        for number, video in enumerate(videos, 1):
            missing = [cell for cell in cells if (cell.name, video.video_id, _asked(video)) not in done]
            if not missing and visual_tokens:
                continue
            path = video.write(Path(scratch))
            watched = Watched.of(path, laboratory.adapter)
            path.unlink()
            visual_tokens = len(watched.groups) * watched.group_tokens
            for cell in missing:
                rows = [row | {"model": model, "asked": _asked(video)} for row in laboratory.try_cell(cell, watched, video)]
                done[cell.name, video.video_id, _asked(video)] = rows
                notes.write(json.dumps(rows) + "\n")
                notes.flush()
            left_s = (time.monotonic() - started_s) / number * (len(videos) - number)
            print(f"video {number} of {len(videos)}, {left_s:.0f} s left", file=sys.stderr)
    answers = [row for cell in cells for video in videos for row in done[cell.name, video.video_id, _asked(video)]]
    rows = tables.summary(cells, answers, visual_tokens)
    length = f"{arguments.groups} {'cells' if pictures else 'groups'}"
    _show(rows, answers, folder, f"{arguments.set} set, {length}, {visual_tokens} visual tokens, seed {arguments.seed}")
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0


def _videos(arguments: argparse.Namespace) -> Iterator[SyntheticVideo]:
    """Videos until they have as many questions as were asked for."""
    questions = 0
    planned = plan_videos(
        videos=VIDEOS_MOST,
        groups=arguments.groups,
        set_name=arguments.set,
        seed=arguments.seed,
        questions=arguments.questions_per_video,
        options={"always": True, "never": False, "mixed": None}[arguments.options],
        kinds=tuple(_words(arguments.kinds)),
    )
    for video in planned:
        if questions >= arguments.questions:
            return
        questions += len(video.questions)
        yield video


def _asked(video: SyntheticVideo) -> str:
    """Which questions a video gets: other kinds or numbers of them are another study of it."""
    return digest([[question_id, q.text, q.answer, list(q.options)] for question_id, q in video.questions])[:16]


def _read(notebook: Path, model: str, asked: Mapping[str, list[str]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """What earlier starts have found, by cell, video and its questions.

    Args:
        asked: question ids of each video; a line that has others is done again.

    Raises:
        ConfigError: another model's answers are there, or something else.
    """
    done: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    if not notebook.exists():
        return done
    text = notebook.read_bytes().decode(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        os.truncate(notebook, len(whole.encode()))  # a line that was cut short when the last start was killed
    for line in whole.splitlines():
        try:
            rows = json.loads(line)
            models, key = {str(row["model"]) for row in rows}, (str(rows[0]["cell"]), str(rows[0]["video_id"]), str(rows[0]["asked"]))
            one = all((row["cell"], row["video_id"], row["asked"]) == key for row in rows)
            plain = all(type(row["right"]) is bool and {"events_kept", "kv_peak_bytes", "kind"} <= row.keys() for row in rows)
            if not (one and plain):
                raise ValueError
            ids = [row["question_id"] for row in rows]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise ConfigError(f"{notebook}: holds a line that no study wrote ({line[:80]!r}); name another folder") from None
        if models != {model}:
            raise ConfigError(
                f"--output={notebook.parent} holds answers of {', '.join(sorted(models))}, not of {model}; name another folder"
            )
        if sorted(ids) == sorted(asked.get(key[1], ids)):
            done[key] = rows
    return done


def _show(rows: list[dict[str, Any]], answers: list[dict[str, Any]], folder: Path, title: str) -> None:
    pq.write_table(pa.Table.from_pylist(answers), folder / "answers.parquet")
    pq.write_table(pa.Table.from_pylist([row | {"kinds": json.dumps(row["kinds"])} for row in rows]), folder / "summary.parquet")
    make_console().print(tables.table(rows, title))
    try:
        tables.plot(rows, folder / "accuracy.png", title)
    except ImportError:
        complain("no picture was drawn: matplotlib isn't installed; pip install 'reelkeep[plot]'")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in _words(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{name}={text}: must be whole numbers of at least 1, separated by commas")
    return numbers


def _parser() -> argparse.ArgumentParser:
    def some_of(*allowed: str) -> Any:
        def check(text: str) -> str:
            if unknown := [word for word in _words(text) if word not in allowed]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(allowed)}")
            return text

        return check

    parser = argparse.ArgumentParser(prog="reelkeep study", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("study"), help="folder for what is found")
    parser.add_argument("--model", default="bundled", help="as engine.model")
    parser.add_argument("--device", default="auto", help="as engine.device")
    parser.add_argument("--set", choices=list(SETS), default="dense", help="events in each video or picture")
    parser.add_argument(
        "--groups", type=int, default=64, help="length of each video in temporal groups of a second, or cells of each picture"
    )
    parser.add_argument("--questions", type=int, default=500, help="questions a cell; videos are added until there are as many")
    parser.add_argument("--questions-per-video", type=int, default=12, help="questions a video, the kinds in turn")
    parser.add_argument("--kinds", default=TRAINED_KINDS, help="kinds of question, separated by commas")
    parser.add_argument("--options", choices=["mixed", "always", "never"], default="never", help="multiple choice or free-form")
    parser.add_argument("--seed", type=int, default=7, help="of the videos and questions")
    parser.add_argument(
        "--policies",
        default="full,keydiff,value_norm,leverage,coverage,infinipot_v,snapkv,uniform,sliding_window,random",
        help="policies, separated by commas; with options as in snapkv:kernel_size=1; uniform thins out frames instead",
    )
    parser.add_argument("--budgets", default="16,32", help="visual tokens kept beyond the prompt prefix, separated by commas")
    parser.add_argument("--block-groups", default="4", help="temporal groups or tiles a block, separated by commas")
    parser.add_argument("--compress", type=some_of("during", "after"), default="during", help="during the prefill, after it, or both")
    parser.add_argument("--alignments", type=some_of("group", "none"), default="group", help="group, none, or both")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
