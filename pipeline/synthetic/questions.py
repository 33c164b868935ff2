"""Questions whose answers follow from a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from pipeline.synthetic.script import Needle, Script
from pipeline.synthetic.vocabulary import COLOURS, DIGITS, PLURALS, QUARTERS, SHAPES, TIME_RANGES, quarter, time_range

_OPTIONS = 4


@dataclass(frozen=True)
class SyntheticQuestion:
    """A question with its only right answer.

    Attributes:
        kind: a key of `PRIMER_KINDS` or `PICTURE_KINDS`.
        text: the question, without options.
        answer: the expected answer, in words; one of `options` when there are any.
        options: answers to choose from; empty for a free-form question.
    """

    kind: str
    text: str
    answer: str
    options: tuple[str, ...] = ()


def ask(rng: np.random.Generator, script: Script, times_s: np.ndarray, kind: str, with_options: bool) -> SyntheticQuestion | None:
    """Draw one question of a kind.

    Args:
        script: what the video or picture shows.
        times_s: (groups,) when each group starts, in seconds.
        with_options: whether the answer is to be chosen from options.

    Returns:
        None when the script has nothing that this kind can ask about.
    """
    drawn = (PRIMER_KINDS | PICTURE_KINDS)[kind](rng, script, times_s)
    if drawn is None:
        return None
    text, answer, options = drawn
    return SyntheticQuestion(kind, text, answer, tuple(options) if with_options else ())


_Drawn = tuple[str, str, list[str]] | None


def _colour(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    needle = _only_one(rng, script.shapes, lambda n: n.figure)
    if needle is None:
        return None
    return f"What colour is the {needle.figure}?", needle.colour, _options(rng, needle.colour, [n.colour for n in script.shapes], COLOURS)


def _shape(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    needle = _only_one(rng, script.shapes, lambda n: n.colour)
    if needle is None:
        return None
    return f"Which shape is {needle.colour}?", needle.figure, _options(rng, needle.figure, [n.figure for n in script.shapes], SHAPES)


def _digit(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    needle = _only_one(rng, script.digits, lambda n: n.colour)
    if needle is None:
        return None
    return f"Which digit is {needle.colour}?", needle.figure, _options(rng, needle.figure, [n.figure for n in script.digits], DIGITS)


def _exists(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    if not script.shapes:
        return None
    there = {(n.colour, n.figure) for n in script.shapes}
    if rng.random() < 0.5:
        colour, figure = _pick(rng, sorted(there))
    else:
        # Hard: the colour is there on another shape, the shape is there in another colour. Half hard: only one of the two.
        colours, figures = {c for c, _ in there}, {f for _, f in there}
        hard = sorted({(c, f) for c in colours for f in figures} - there)
        half = sorted({(c, f) for c in COLOURS for f in SHAPES if (c in colours) != (f in figures)})
        if not (hard or half):  # every colour and every shape is there, in every pairing
            return None
        colour, figure = _pick(rng, hard if hard and (not half or rng.random() < 0.6) else half)
    article = "an" if colour == "orange" else "a"
    return f"Is there {article} {colour} {figure}?", "yes" if (colour, figure) in there else "no", ["yes", "no"]


def _count(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    counted = Counter(dict.fromkeys(SHAPES, 0))
    counted.update(n.figure for n in script.shapes)
    # Every count that occurs is as likely as the others, so that the commonest isn't a good guess.
    count = _pick(rng, sorted(set(counted.values())))
    figure = _pick(rng, [shape for shape in SHAPES if counted[shape] == count])
    lowest = max(0, count - int(rng.integers(_OPTIONS)))
    return f"How many {PLURALS[figure]} are there?", str(count), [str(lowest + i) for i in range(_OPTIONS)]


def _order(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    if len(script.shapes) < 2:
        return None
    pair = [script.shapes[i] for i in rng.choice(len(script.shapes), size=2, replace=False)]
    which = _pick(rng, ["first", "last"])
    answer = (min if which == "first" else max)(pair, key=lambda n: n.group)
    names = [n.name for n in pair]
    return f"Which came {which}, the {names[0]} or the {names[1]}?", answer.name, names


def _when(rng: np.random.Generator, script: Script, times_s: np.ndarray) -> _Drawn:
    if not script.shapes:
        return None
    needle = _pick(rng, script.shapes)
    names = [name for _, name in TIME_RANGES]
    answer = time_range(times_s[needle.group])
    others = [name for name in names if name != answer]
    shown = {answer, *(others[i] for i in rng.choice(len(others), size=_OPTIONS - 1, replace=False))}
    return f"When does the {needle.name} appear?", answer, [name for name in names if name in shown]


def _glimpse(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    if not script.shapes:
        return None
    by_colour = rng.random() < 0.5
    there = {n.colour if by_colour else n.figure for n in script.shapes}
    absent = [word for word in (COLOURS if by_colour else SHAPES) if word not in there]
    answer = "yes" if rng.random() < 0.5 or not absent else "no"
    word = _pick(rng, sorted(there) if answer == "yes" else absent)
    article = "an" if word == "orange" else "a"
    return f"Is there {article} {word} shape?" if by_colour else f"Is there a {word}?", answer, ["yes", "no"]


def _where(rng: np.random.Generator, script: Script, _: np.ndarray) -> _Drawn:
    side = isqrt(script.groups)
    placed = [(needle.name, name) for needle in script.shapes if (name := quarter(needle.group, side))]
    if not placed:
        return None
    name, answer = _pick(rng, placed)
    return f"Where is the {name}?", answer, list(QUARTERS)


KINDS: dict[str, Callable[[np.random.Generator, Script, np.ndarray], _Drawn]] = {
    "colour": _colour,
    "shape": _shape,
    "digit": _digit,
    "exists": _exists,
    "count": _count,
    "order": _order,
    "when": _when,
}

PICTURE_KINDS = {kind: KINDS[kind] for kind in ("colour", "shape", "digit", "exists")} | {"where": _where}
"""What can be asked about a still image: a script whose groups are the cells of a square, row by row."""

PRIMER_KINDS = KINDS | {"glimpse": _glimpse}
"""With a kind that is too easy to measure anything, and from which a model learns what "there" means."""


def _pick(rng: np.random.Generator, items: Sequence):
    return items[int(rng.integers(len(items)))]


def _only_one(rng: np.random.Generator, needles: Sequence[Needle], trait: Callable[[Needle], str]) -> Needle | None:
    """A needle that no other one shares the trait with, so that the question has one answer."""
    counts = Counter(trait(n) for n in needles)
    single = [n for n in needles if counts[trait(n)] == 1]
    return _pick(rng, single) if single else None


def _options(rng: np.random.Generator, answer: str, seen: Sequence[str], known: Sequence[str] | dict) -> list[str]:
    """The answer among wrong ones, half of which the video shows too where it can."""
    shown = [word for word in dict.fromkeys(seen) if word != answer]
    wrong = [shown[i] for i in rng.permutation(len(shown))][: _OPTIONS // 2]
    rest = [word for word in known if word != answer and word not in wrong]
    wrong += [rest[i] for i in rng.choice(len(rest), size=_OPTIONS - 1 - len(wrong), replace=False)]
    options = [answer, *wrong]
    return [options[i] for i in rng.permutation(_OPTIONS)]
