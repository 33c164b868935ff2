"""Which metrics and labels a PromQL expression asks for: enough of the language for rules and dashboards, and strict about the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+) | (?P<string>"(?:[^"\\]|\\.)*") | (?P<range>\[[^\]]+\]) | (?P<number>\d[\w.]*)
    | (?P<name>[A-Za-z_][\w:]*) | (?P<operator>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])""",
    re.VERBOSE,
)
AGGREGATIONS = {"sum", "avg", "min", "max", "count", "topk"}
FUNCTIONS = {"rate", "increase", "clamp_min", "max_over_time", "avg_over_time", "label_values", "absent"}
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
WORDS = {"and", "or", "unless", "bool", "offset"}


@dataclass
class Query:
    """What is asked for.

    Attributes:
        metrics: name to the labels that select its series.
        labels: labels that results are grouped by.
    """

    metrics: dict[str, set[str]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def parse(expression: str) -> Query:
    """Read one expression.

    Raises:
        ValueError: a function, a character or a bracket that has no place there.
    """
    tokens = _tokens(expression)
    query = Query()
    depth = i = 0
    while i < len(tokens):
        kind, text = tokens[i]
        following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
        depth += (text == "(") - (text == ")")
        if depth < 0:
            raise ValueError(f"{expression!r}: a bracket closes that was never opened")
        if kind == "name" and text in GROUPINGS and following == "(":
            names, i = _until(tokens, i + 2, ")", expression)
            query.labels |= {name for sort, name in names if sort == "name"}
        elif kind == "name" and following == "(" and text not in WORDS:
            if text not in AGGREGATIONS | FUNCTIONS:
                raise ValueError(f"{expression!r}: {text} is no function that is used here")
        elif kind == "name" and text in AGGREGATIONS and following in GROUPINGS:
            pass
        elif kind == "name" and text not in WORDS:
            labels = query.metrics.setdefault(text, set())
            if following == "{":
                matchers, i = _until(tokens, i + 2, "}", expression)
                labels |= {name for sort, name in matchers if sort == "name"}
        i += 1
    if depth:
        raise ValueError(f"{expression!r}: a bracket isn't closed")
    if not query.metrics:
        raise ValueError(f"{expression!r} asks for no metric")
    return query


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    place = 0
    while place < len(expression):
        found = _TOKEN.match(expression, place)
        if found is None or found.lastgroup is None:
            raise ValueError(f"{expression!r}: {expression[place]!r} has no place there")
        if found.lastgroup != "space":
            tokens.append((found.lastgroup, found[0]))
        place = found.end()
    return tokens


def _until(tokens: list[tuple[str, str]], start: int, end: str, expression: str) -> tuple[list[tuple[str, str]], int]:
    for i in range(start, len(tokens)):
        if tokens[i][1] == end:
            return tokens[start:i], i
    raise ValueError(f"{expression!r}: {end!r} is missing")
