"""Train the bundled test model from a seed, or measure how often it answers rightly."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.errors import ConfigError, ReelkeepError
from jobs.bundled_training.bank import build_bank
from jobs.bundled_training.evaluate import Tally, evaluate_bundle
from jobs.bundled_training.language_stage import train_language
from jobs.bundled_training.lessons import FeatureBank
from jobs.bundled_training.model import build_model, encode_groups, patches, save_bundle
from jobs.bundled_training.tokenizer import build_tokenizer
from jobs.bundled_training.vision_stage import train_vision
from jobs.terminal import complain
from pipeline.synthetic.script import EVENTS

BUNDLE = Path(__file__).parents[1] / "engine" / "bundled" / "qwen2_5_vl_tiny"
BANK_GROUPS, HELD_OUT_GROUPS = 36_000, 1_200
VISION_STEPS, LANGUAGE_STEPS = 3_000, 6_000
_HELD_OUT_SEED = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two commands; returns the exit code: 0 done, 2 a bad argument."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ReelkeepError as error:
        complain(f"reelkeep train_bundled: {error}")
        return 2


def train(arguments: argparse.Namespace) -> int:
    """Both stages, then the bundle; every stage that a work folder already holds is taken from it."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    work = Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    log = _logger(work / "training.log")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    started = time.monotonic()
    train_groups = build_bank(arguments.seed + 1, arguments.bank_groups)
    log(f"{len(train_groups.frames)} groups drawn, encoded and decoded in {time.monotonic() - started:.0f} s")
    vision = work / "vision.pt"
    if vision.exists():
        model.model.visual.load_state_dict(torch.load(vision, weights_only=True))
    else:
        held_out = build_bank(arguments.seed + _HELD_OUT_SEED, HELD_OUT_GROUPS)
        right = train_vision(model, train_groups, held_out, seed=arguments.seed, steps=arguments.vision_steps, log=log)
        log(f"vision: every token of {100 * right:.1f}% of the held-out groups names them rightly")
        torch.save(model.model.visual.state_dict(), vision)
    with torch.no_grad():
        features = torch.cat([encode_groups(model, patches(chunk)) for chunk in train_groups.frames.split(256)])
    train_language(
        model,
        FeatureBank.from_groups(train_groups, features),
        tokenizer,
        seed=arguments.seed,
        steps=arguments.language_steps,
        checkpoint=work / "language.pt",
        log=log,
    )
    save_bundle(model, tokenizer, Path(arguments.output))
    log(f"bundle written to {arguments.output}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Print a row a set, length, kind and form; with --json one JSON object as the last line."""
    folder = Path(arguments.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model={folder} holds no config.json; give a folder that `train_bundled train` wrote")
    tallies: list[Tally] = []
    for set_name in arguments.sets.split(","):
        for groups in arguments.groups.split(","):
            found = evaluate_bundle(folder, set_name=set_name, groups=int(groups), videos=arguments.videos, seed=arguments.seed)
            for tally in found:
                print(
                    f"{tally.set_name:>7} {tally.groups:>5} groups  {tally.kind:<7}{tally.form:<8}"
                    f"{100 * tally.right / tally.questions:6.1f}% of {tally.questions}",
                    flush=True,
                )
            tallies += found
    if arguments.json:
        print(json.dumps({"rows": [vars(tally) for tally in tallies]}))
    return 0


def _parser() -> argparse.ArgumentParser:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="reelkeep train_bundled", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("train", help="train from a seed; continues where an earlier run stopped", formatter_class=shown)
    command.add_argument("--output", default=str(BUNDLE), help="folder for weights, configuration and processor files")
    command.add_argument("--work", default="build/train_bundled", help="folder for checkpoints and training.log")
    command.add_argument("--seed", type=int, default=0, help="of weights, videos and questions")
    command.add_argument("--threads", type=int, default=0, help="threads of torch; 0 leaves torch's own choice")
    command.add_argument("--bank-groups", type=int, default=BANK_GROUPS, help="temporal groups drawn and encoded for training")
    command.add_argument("--vision-steps", type=int, default=VISION_STEPS, help="steps of the vision stage")
    command.add_argument("--language-steps", type=int, default=LANGUAGE_STEPS, help="steps of the language stage")
    command.set_defaults(run=train)
    command = commands.add_parser("evaluate", help="accuracy by kind and length on real files from an unseen seed", formatter_class=shown)
    command.add_argument("--model", default=str(BUNDLE), help="folder of the bundle")
    command.add_argument("--groups", default="64,256", help="lengths in temporal groups, separated by commas")
    command.add_argument("--sets", default=",".join(EVENTS), help="sets of videos, separated by commas")
    command.add_argument("--videos", type=int, default=100, help="videos a set and length")
    command.add_argument("--seed", type=int, default=777, help="of the videos; must differ from the training seed")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=evaluate)
    return parser


def _logger(path: Path) -> Callable[[str], None]:
    def log(line: str) -> None:
        print(line, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    return log


if __name__ == "__main__":
    sys.exit(main())
