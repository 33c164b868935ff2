"""The report as one HTML file that needs nothing else and lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from jobs.answer import bytes_text
from jobs.report_page import charts
from jobs.report_page.facts import Row, RunFacts
from pipeline.progress import clock_time

SLOWEST, FAILED_SHOWN, TEXT_SHOWN = 10, 200, 4000
_DECEIVING = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
_COLUMNS = ("video_id", "question_id", "question", "options", "choice_probabilities", "answer", "choice", "expected", "error")


def render(facts: RunFacts, thumbnails: Mapping[str, str]) -> str:
    """The page.

    Texts from manifests, models and files reach it in two ways only: escaped by the template, or inside a JSON element that the script
    shows as text. The page's own policy forbids every script, style, picture and address but those it carries.

    Args:
        facts: the run.
        thumbnails: data: URI by video id.
    """
    files = resources.files(__package__)
    script, style = ((files / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    return template((files / "page.html").read_text(encoding="utf-8")).render(
        facts=facts,
        run=facts.run,
        policy=content_policy(style, script),
        script=Markup(script),
        style=Markup(style),
        plot=charts.memory_plot(facts.videos),
        geometry=charts,
        shares=charts.time_shares(facts),
        slowest=sorted(facts.videos, key=lambda video: -video["total_s"])[:SLOWEST],
        failed=facts.failed[:FAILED_SHOWN],
        data=Markup(script_json({"answers": [_shown(row) for row in facts.answers], "thumbnails": dict(thumbnails)})),
    )


def template(html: str) -> jinja2.Template:
    """A page's template: every text is escaped and shown plainly; `bytes` and `clock` are filters for numbers."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_plainly
    )
    environment.filters |= {"bytes": bytes_text, "clock": clock_time}
    return environment.from_string(html)


def content_policy(style: str, script: str | None = None) -> str:
    """What a page may load: this style, this script, pictures that it carries; nothing else."""
    scripts = f"script-src '{_source_hash(script)}'; " if script is not None else ""
    return f"default-src 'none'; img-src data:; {scripts}style-src '{_source_hash(style)}'; base-uri 'none'; form-action 'none'"


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: whatever a text holds, it can neither end the element nor begin a comment or a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def visible(text: str) -> str:
    """The text with a mark for each control character and each order to write from right to left, which make a text look like another."""
    return _DECEIVING.sub("\N{REPLACEMENT CHARACTER}", text)


def _plainly(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _shown(row: Row) -> Row:
    shown: Row = {name: _plainly(row[name]) for name in _COLUMNS}
    shown |= {name: text[:TEXT_SHOWN] + "…" for name, text in shown.items() if isinstance(text, str) and len(text) > TEXT_SHOWN}
    shown["options"] = [visible(option[:TEXT_SHOWN]) for option in row["options"] or ()]
    shown["choice_probabilities"] = [round(p, 4) for p in row["choice_probabilities"] or ()]
    return shown | {"verdict": row["verdict"], "cut": row["finish_reason"] == "length", "answer_s": round(row["answer_s"] or 0.0, 3)}


def _source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
