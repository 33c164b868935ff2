"""What the report says, as texts in rows: the page and the Markdown file show the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jobs.answer import bytes_text
from jobs.evaluation import paper
from jobs.evaluation.charts import label, short_model
from jobs.evaluation.scores import CellScore, GridScore, Tally
from jobs.report_page.page import visible

BLANK = "–"


@dataclass(frozen=True)
class Table:
    """Texts in rows.

    Attributes:
        texts: how many columns, from the left, hold words; the rest hold numbers.
    """

    columns: list[str]
    rows: list[list[str]]
    texts: int = 1
    name: str = ""


def percent(share: float | None) -> str:
    """A share as per cent with one digit."""
    return BLANK if share is None else f"{100 * share:.1f}"


def with_interval(tally: Tally, digits: int = 1) -> str:
    """Accuracy and its interval: "52.3 (44.1 to 60.4)", or without digits "52 (44–60)"."""
    if tally.accuracy is None:
        return BLANK
    share, low, high = (f"{100 * value:.{digits}f}" for value in (tally.accuracy, *tally.interval))
    return f"{share} ({low} to {high})" if digits else f"{share} ({low}–{high})"


def summary(grid: GridScore) -> Table:
    """A row a cell: what it got right, beside the paper's figure, and what it took. Columns that could only be empty are left out."""
    benchmark = grid.benchmark
    rows = []
    columns: dict[str, str] = {}
    for cell in grid.cells:
        engine, tally, ttft = cell.cell.engine, cell.overall, cell.median("ttft_s")
        columns = {
            "model": short_model(engine.model),
            "policy": engine.policy,
            "budget": f"{engine.budget_tokens:,}" if cell.cell.evicts else "all",
            "block": f"{engine.block_tokens:,}",
            "right, %": with_interval(tally),
            "questions": f"{tally.total:,}",
            "no answer": f"{tally.unanswered:,}",
        }
        if benchmark is not None and grid.form == "published":
            columns["unparsed"] = f"{tally.unparsed:,}"
            if benchmark.skips_unparsed:
                columns["of parsed, %"] = percent(tally.of_parsed)
        columns["task mean, %"] = percent(cell.task_mean)
        if benchmark is not None and benchmark.paper:
            columns["paper, %"] = BLANK if cell.paper is None else f"{cell.paper:.2f}"
        columns |= {"KV peak": bytes_text(cell.most("kv_peak_bytes")), "full cache": bytes_text(cell.most("kv_full_bytes"))}
        columns["TTFT, s"] = BLANK if ttft is None else f"{ttft:.3g}"
        rows.append(list(columns.values()))
    return Table(list(columns), rows, texts=2)


def notes(grid: GridScore) -> Iterator[str]:
    """How to read the summary."""
    yield (
        "Right answers among all questions that have a right answer. A question without an answer (a missing or broken video, an error) and "
        "an answer in which the rule finds none count as wrong, and are counted beside it."
    )
    yield "In brackets: 95% intervals by Wilson's score."
    if grid.benchmark is not None and grid.benchmark.skips_unparsed and grid.form == "published":
        yield "The benchmark's own script leaves out answers that it can't parse; what it would print is under “of parsed”."
    if grid.benchmark is not None:
        yield f"Questions, rule and format: {grid.benchmark.source}."
    if any(cell.overall.open for cell in grid.cells):
        yield f"{max(cell.overall.open for cell in grid.cells)} questions have no right answer given and aren't counted."
    yield (
        "KV peak: most bytes of keys and values that any video's cache held; full cache: what it would have held. TTFT: median seconds from a "
        "decoded video to the first token, vision, prefill and question together. Cells of a model read each video in lock-step, decoded "
        "once; times are each cell's own, shared work in full."
    )


def by_group(grid: GridScore) -> Iterator[Table]:
    """Accuracy by task and by length: a row a cell, a column a group with its number of questions."""
    for name, groups in (("task", grid.task_names), ("length", grid.length_names)):
        if groups:
            tallies = [cell.tasks if name == "task" else cell.lengths for cell in grid.cells]
            counts = [max(found[group].total for found in tallies if group in found) for group in groups]
            columns = [f"{group} ({count:,})" for group, count in zip(groups, counts, strict=True)]
            rows = [
                [label(cell), *(with_interval(found[group], 0) if group in found else BLANK for group in groups)]
                for cell, found in zip(grid.cells, tallies, strict=True)
            ]
            yield Table(["cell", *columns], rows, name=name)


def beside_paper(grid: GridScore) -> Table | None:
    """The paper's figures for this benchmark, ours beside them where a cell has the same model, policy and budget."""
    column = grid.benchmark.paper if grid.benchmark else None
    if column is None:
        return None
    rows = []
    for figure in paper.FIGURES:
        ours = [with_interval(cell.overall) for cell in grid.cells if _same(cell, figure)]
        budget = "all" if figure.budget is None else f"{figure.budget:,}"
        rows.append([figure.model, figure.policy, budget, f"{figure.percent[column]:.2f}", "; ".join(ours) or "not run"])
    if column == "ImageNeedle":
        for block, value in paper.BLOCK_SIZES.items():
            rows.append(["Qwen2.5-VL-7B", "not named", f"2,048, blocks of {block}", f"{value:.2f}", "not run"])
    return Table(["model", "policy", "budget", f"{column}, paper", "here"], rows, texts=2, name=column)


def _same(cell: CellScore, figure: paper.Figure) -> bool:
    engine = cell.cell.engine
    budget = engine.budget_tokens if cell.cell.evicts else None
    return paper.same_model(engine.model, figure.model) and (engine.policy, budget) == (figure.policy, figure.budget)


def failures(grid: GridScore) -> list[list[str]]:
    """Cell, video or question, reason; what failed alike in every cell comes once."""
    places: dict[tuple[str, str], list[str]] = {}
    for cell in grid.cells:
        for name, reason in cell.failures:
            places.setdefault((name, reason), []).append(cell.cell.name)
    every = len(grid.cells)
    return [["all" if len(cells) == every else ", ".join(cells), name, reason] for (name, reason), cells in places.items()]


def settings(grid: GridScore) -> tuple[Table, list[tuple[str, str]]]:
    """What differs between cells, a row a cell; and what doesn't."""
    flat = []
    for cell in grid.cells:
        config = cell.cell.config
        sections = {"engine": config.engine.model_dump(mode="json"), "decode": config.decode.model_dump(mode="json")}
        flat.append(dict(_flat(sections | {"versions": cell.run.get("versions") or {}})))
        if not cell.cell.evicts:
            flat[-1]["engine.budget_tokens"] = "all"
    names = list(dict.fromkeys(name for values in flat for name in values))
    differing = [name for name in names if len({values.get(name) for values in flat}) > 1]
    rows = [
        [cell.cell.name, *(values.get(name, "") for name in differing), cell.cell.config.output]
        for cell, values in zip(grid.cells, flat, strict=True)
    ]
    common = [(name, flat[0].get(name, "")) for name in names if name not in differing] if flat else []
    return Table(["cell", *differing, "folder"], rows, texts=len(differing) + 2), common


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "default" if inner is None else str(inner)


def markdown(table: Table) -> str:
    """The table in Markdown; what a text holds stays text."""
    lines = ["| " + " | ".join(map(escaped, table.columns)) + " |"]
    lines.append("|" + "|".join("---" if at < table.texts else "---:" for at in range(len(table.columns))) + "|")
    return "\n".join(lines + ["| " + " | ".join(map(escaped, row)) + " |" for row in table.rows])


def escaped(text: str) -> str:
    """A text that neither ends its cell of a table nor starts markup."""
    line = visible(" ".join(str(text).split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|$~#])", r"\\\1", line)
