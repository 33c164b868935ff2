"""How published evaluation scripts find an answer in what a model says. Rules are theirs, sources are named at each; no model judges."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

from jobs.benchmarks.base import LETTERS, Sample, Score

_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
)
"""As the script has them: two pairs run together there for want of a comma."""


def first_letter(text: str, letters: str = "ABCD") -> str:
    """The first capital that is an option's letter, known phrases taken away; "" when there is none.

    Source: `extract_characters_regex` of Video-MME's eval_your_results.py, which LMMs-Eval's videomme, mlvu and longvideobench tasks
    share (with their number of options).
    """
    text = text.strip()
    for prefix in _PREFIXES:
        text = text.replace(prefix, "")
    found = re.search(f"[{letters}]", text)
    return found[0] if found else ""


def by_first_letter(sample: Sample, text: str) -> Score:
    """Right when the first letter is the right option's."""
    said = first_letter(text, LETTERS[: max(4, len(sample.options))])
    return Score(float(said == sample.letter), bool(said))


def by_best_option(sample: Sample, text: str) -> Score:
    """MLVU's rule: the letter right before the first bracket that closes, as an answer goes on behind "Best option: ("; else the first letter.

    Source: `check_ans` of MLVU's choice_bench.py; LMMs-Eval's mlvu task for answers that are no such continuation.
    """
    letters = LETTERS[: max(4, len(sample.options))]
    said = text.partition(")")[0][-1:] if ")" in text else text.strip()
    if len(said) != 1 or said not in letters:
        said = first_letter(text, letters)
    return Score(float(said == sample.letter), bool(said))


_STANDING_LETTER = (
    r"^([A-D])\s*[\.)\]]*",
    r"(?:THE\s+)?(?:ANSWER|CHOICE|OPTION)(?:\s+IS)?[\s:]+([A-D])",
    r"\(([A-D])\)",
    r"([A-D])\s*(?:\.|\)|])",
    r"(?:^|\s)([A-D])(?:\s|$)",
)


def by_standing_letter(sample: Sample, text: str) -> Score:
    """Right when the letter that stands out is the right option's: at the start, behind "answer", in brackets, alone.

    Source: `extract_answer_letter` of LMMs-Eval's vstar_bench task.
    """
    text = text.strip().upper()
    for pattern in _STANDING_LETTER:
        if found := re.search(pattern, text):
            return Score(float(found[1] == sample.letter))
    letters = re.findall("[A-D]", text)
    said = letters[0] if len(letters) == 1 else ""
    return Score(float(said == sample.letter), bool(said))


_PUNCTUATION = ';/[]"{}()=+\\_->@<`,?!'


def unpunctuated(text: str) -> str:
    """The text on one line without punctuation, as the VQA evaluation that MileBench and MM-NIAH build on takes it away.

    A mark beside a space anywhere in the text, or any mark of a text with a comma between digits, leaves nothing; another leaves a
    space. Full stops that no digit follows go, the first 32 of them.
    """
    text = text.replace("\n", " ").replace("\t", " ").strip()
    between_digits = re.search(r"\d,\d", text) is not None
    left = text
    for mark in _PUNCTUATION:
        beside_a_space = mark + " " in text or " " + mark in text
        left = left.replace(mark, "" if beside_a_space or between_digits else " ")
    return re.sub(r"\.(?!\d)", "", left, count=32)


def by_word(sample: Sample, text: str) -> Score:
    """MileBench's rule for needles: the right answer is one of the words said, case and punctuation aside.

    Source: `Eval.evaluate_needle` of MileBench's evaluate.py.
    """
    said, wanted = (unpunctuated(t).strip("'").strip('"').strip().lower() for t in (text, sample.expected))
    return Score(float(wanted in said.split()), bool(said))


_NUMBER_WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
    twenty thirty forty fifty sixty seventy eighty ninety
"""
_NUMBERS = dict(zip(_NUMBER_WORDS.split(), map(str, [*range(21), *range(30, 100, 10)]), strict=True))
_SHORT_FORMS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's how'd how'll
    how's isn't it'd it'd've it'll let's ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock oughtn't shan't
    she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's
    something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas
    wasn't we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll
    why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _without_apostrophes(word: str) -> list[str]:
    pieces = word.split("'")
    ways = itertools.product(("", "'"), repeat=len(pieces) - 1)
    return ["".join(p + mark for p, mark in zip(pieces, (*way, ""), strict=True)) for way in ways if "" in way]


_CONTRACTED = {short: word for word in _SHORT_FORMS.split() for short in _without_apostrophes(word)}


def plain_words(text: str) -> str:
    """Words in small letters, numbers as digits, articles left out, apostrophes put back. Source: `VQAEval` in MM-NIAH's utils/tools.py."""
    words = [_NUMBERS.get(word, word) for word in unpunctuated(text).lower().split()]
    return " ".join(_CONTRACTED.get(word, word) for word in words if word not in ("a", "an", "the"))


def by_needle(sample: Sample, text: str) -> Score:
    """MM-NIAH's rules: a letter for a choice, the share of right numbers for counting, the right words within what was said otherwise.

    Source: `is_correct` of MM-NIAH's calculate_scores.py.
    """
    if sample.options:
        return _by_choice(sample, text)
    try:
        wanted = json.loads(sample.expected)
    except ValueError:
        wanted = None
    if isinstance(wanted, list):
        return _by_list(wanted, text)
    said = plain_words(text.strip("."))
    return Score(float(re.search(rf"\b{re.escape(plain_words(sample.expected))}\b", said) is not None), bool(said))


def _by_choice(sample: Sample, text: str) -> Score:
    right = sample.options.index(sample.expected)
    said = text.strip(".")
    if said.isdecimal() and len(said) < 10:
        return Score(float(int(said) == right))
    said = said.lower().replace("the answer is", "").replace("*", "")
    if "." in said:
        said = said.split(".")[0].replace(",", "")
    said = said.strip()
    for way, letter in (("left", "a"), ("right", "b")):
        if f"the camera is moving {way}" in said:
            said = letter
    return Score(float(said == LETTERS[right].lower()), len(said) == 1)


def _by_list(wanted: Sequence[object], text: str) -> Score:
    try:
        said = json.loads(text.strip(".").replace("json", "").replace("```", "").strip())
        if isinstance(said, dict):
            said = list(itertools.chain.from_iterable(said.values()))
    except (ValueError, TypeError, RecursionError):
        return Score(0.0, parsed=False)
    if not isinstance(said, list):
        return Score(0.0, parsed=False)
    return Score(sum(a == b for a, b in zip(said, wanted, strict=False)) / max(1, len(wanted)))


def wilson(right: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share, by Wilson's score (Wilson 1927); (0, 1) of nothing."""
    if not total:
        return 0.0, 1.0
    share, square = right / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * (share * (1 - share) / total + square / (4 * total)) ** 0.5
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))  # rounding leaves the share out at 0 and 1
