"""Train a bundled test model from a seed, or measure how often it answers rightly."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from engine.errors import ConfigError, ReelkeepError
from jobs.bundled_training.architecture import Architecture
from jobs.bundled_training.bank import build_bank
from jobs.bundled_training.evaluate import Tally, evaluate_bundle
from jobs.bundled_training.internvl import INTERNVL
from jobs.bundled_training.language_stage import train_language
from jobs.bundled_training.lessons import FeatureBank
from jobs.bundled_training.qwen2_5_vl import QWEN2_5_VL
from jobs.bundled_training.thumbnails import Thumbnails
from jobs.bundled_training.vision_stage import train_vision
from jobs.bundled_training.work import WorkFolder
from jobs.terminal import complain, whole_number, whole_numbers
from pipeline.synthetic.dataset import PICTURES, SETS

ARCHITECTURES: dict[str, Architecture] = {architecture.name: architecture for architecture in (QWEN2_5_VL, INTERNVL)}
BANK_GROUPS_LEAST = 2_400
"""With fewer, a colour of some figure may not be among them."""
_HELD_OUT_GROUPS = 1_200
_HELD_OUT_SEED = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two commands; returns the exit code: 0 done, 2 a bad argument, 130 stopped."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ReelkeepError as error:
        complain(f"reelkeep train_bundled: {error}")
        return 2
    except KeyboardInterrupt:
        complain("reelkeep train_bundled: stopped; the same command goes on from what is finished of a training")
        return 130


def train(arguments: argparse.Namespace) -> int:
    """Both stages, then the bundle; every stage that a work folder already holds is taken from it."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    architecture = ARCHITECTURES[arguments.architecture]
    folder = Path(arguments.work or f"build/train_{architecture.name}_seed{arguments.seed}")
    output = Path(arguments.output or architecture.bundle)
    bank_groups = arguments.bank_groups or architecture.bank_groups
    vision_steps = arguments.vision_steps or architecture.vision_steps
    language_steps = arguments.language_steps or architecture.language_steps
    recipe = {
        "--architecture": architecture.name,
        "--seed": arguments.seed,
        "--bank-groups": bank_groups,
        "--vision-steps": vision_steps,
    }
    work = WorkFolder(folder, recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        seen, read = work.load("vision.pt"), work.load("language.pt")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; --work and --output must be folders that can be read and written") from None
    if read is not None and (step := read["progress"]["step"]) > language_steps:
        raise ConfigError(f"--language-steps={language_steps}: --work={folder} has come to step {step} already; give at least as many")
    log = _logger(folder / "training.log")
    tokenizer = architecture.build_tokenizer()
    model = architecture.build_model(tokenizer, arguments.seed)
    started = time.monotonic()
    train_groups = build_bank(architecture, arguments.seed + 1, bank_groups)
    log(f"{len(train_groups.frames)} groups drawn, encoded and decoded in {time.monotonic() - started:.0f} s")
    vision = architecture.vision(model)
    if seen is not None:
        vision.load_state_dict(seen)
    else:
        held_out = build_bank(architecture, arguments.seed + _HELD_OUT_SEED, _HELD_OUT_GROUPS)
        right = train_vision(architecture, model, train_groups, held_out, seed=arguments.seed, steps=vision_steps, log=log)
        log(f"vision: {100 * right:.1f}% of the held-out groups named rightly")
        work.save("vision.pt", vision.state_dict())
    with torch.no_grad():
        features = torch.cat([architecture.encode(model, chunk) for chunk in train_groups.frames.split(256)])
    small = Thumbnails(train_groups.frames) if architecture.has_thumbnail else None
    train_language(
        architecture,
        model,
        FeatureBank.from_groups(train_groups, features, small and small.features(partial(architecture.encode, model))),
        tokenizer,
        seed=arguments.seed,
        steps=language_steps,
        resumed=read,
        save=partial(work.save, "language.pt"),
        log=log,
    )
    architecture.save(model, tokenizer, output)
    log(f"bundle written to {output}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Print a row a set, length, kind and form; with --json one JSON object as the last line."""
    architecture = ARCHITECTURES[arguments.architecture]
    folder = Path(arguments.model or architecture.bundle)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model={folder} holds no config.json; give a folder that `train_bundled train` wrote")
    tallies: list[Tally] = []
    media = [name for name in SETS if name.startswith(PICTURES) == architecture.has_thumbnail]
    sets = arguments.sets.split(",") if arguments.sets else media
    if unknown := [name for name in sets if name not in media]:
        raise ConfigError(f"--sets={arguments.sets}: {unknown[0]!r} is not a set of {architecture.name}; there are {', '.join(media)}")
    for set_name in sets:
        for groups in arguments.groups:
            found = evaluate_bundle(folder, set_name=set_name, groups=groups, videos=arguments.videos, seed=arguments.seed)
            for tally in found:
                print(
                    f"{tally.set_name:>15} {tally.groups:>5} groups  {tally.kind:<7}{tally.form:<8}"
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
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--architecture", choices=list(ARCHITECTURES), default=QWEN2_5_VL.name, help="which of the bundled models")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train", help="train from a seed; continues where an earlier run stopped", parents=[chosen], formatter_class=shown
    )
    command.add_argument("--output", help="folder for weights, configuration and processor files; the architecture's own unless given")
    command.add_argument("--work", help="folder for checkpoints and training.log; build/train_ARCHITECTURE_seedN unless given")
    command.add_argument("--seed", type=whole_number(0), default=0, help="of weights, videos and questions")
    command.add_argument("--threads", type=whole_number(0), default=0, help="threads of torch; 0 leaves torch's own choice")
    command.add_argument(
        "--bank-groups",
        type=whole_number(BANK_GROUPS_LEAST),
        help="temporal groups, or cells of pictures, drawn and encoded for training, in whole videos",
    )
    command.add_argument("--vision-steps", type=whole_number(1), help="steps of the vision stage")
    command.add_argument("--language-steps", type=whole_number(1), help="steps of the language stage")
    command.set_defaults(run=train)
    command = commands.add_parser(
        "evaluate", help="accuracy by kind and length on real files from an unseen seed", parents=[chosen], formatter_class=shown
    )
    command.add_argument("--model", help="folder of the bundle; the architecture's own unless given")
    command.add_argument("--groups", type=whole_numbers, default="64,256", help="lengths in temporal groups or cells, separated by commas")
    command.add_argument("--sets", help="sets of videos or pictures, separated by commas; all of the architecture's unless given")
    command.add_argument("--videos", type=whole_number(1), default=100, help="videos or pictures a set and length")
    command.add_argument("--seed", type=whole_number(0), default=777, help="of the videos; must differ from the training seed")
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
