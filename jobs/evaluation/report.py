"""The report on a grid: one HTML file that needs nothing else, and the same tables in Markdown with pictures beside it."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from importlib import resources

from markupsafe import Markup

from jobs.evaluation import paper, tables
from jobs.evaluation.charts import pictures, width_px
from jobs.evaluation.scores import GridScore, as_plain
from jobs.report_page.page import content_policy, template
from pipeline.storage import Storage, join_uri

LINES_SHOWN = 100
FORMS = {
    "published": "in the benchmark's own words and judged by its rule",
    "letters": "with their options given to the engine, which takes the likeliest letter",
    "manifest": "as the manifest has them and judged by its expected answers",
}
CAPTIONS = {
    "accuracy": "Points are right answers of all questions, bars their 95% intervals; a dashed line is a cache that evicts nothing.",
    "groups": "Per cent of each group's questions.",
    "memory": "A point a video, at the most that it held under any policy of that budget. Once the budget is full, the peak stops growing.",
    "ttft": "Once a video is decoded; of a policy that reads once a question, one pass.",
}
ALTS = {"accuracy": "Accuracy against budget", "groups": "Accuracy by task and length", "memory": "Memory", "ttft": "Time to first token"}


def write_report(grid: GridScore, output: str, storage: Storage) -> str:
    """Write report.html, report.md with its pictures, and scores.json under the output.

    Returns:
        The page's address.

    Raises:
        StorageError: they can't be written.
    """
    drawn = pictures(grid)
    for name, data in drawn.items():
        storage.write_bytes(join_uri(output, f"report-{name}.png"), data)
    storage.write_bytes(join_uri(output, "scores.json"), json.dumps(as_plain(grid), indent=2).encode())
    storage.write_bytes(join_uri(output, "report.md"), as_markdown(grid, list(drawn)).encode(errors="replace"))
    address = join_uri(output, "report.html")
    storage.write_bytes(address, as_page(grid, drawn).encode(errors="replace"))
    return address


def as_page(grid: GridScore, drawn: dict[str, bytes]) -> str:
    """The page. Texts of benchmarks, models and files reach it escaped; its policy lets nothing run and nothing load."""
    files = resources.files("jobs")
    style = "".join((files / folder / "page.css").read_text(encoding="utf-8") for folder in ("report_page", "evaluation"))
    differing, common = tables.settings(grid)
    failed = tables.failures(grid)
    beside = tables.beside_paper(grid)
    return template((files / "evaluation" / "page.html").read_text(encoding="utf-8")).render(
        grid=grid,
        policy=content_policy(style),
        style=Markup(style),
        form=FORMS[grid.form],
        questions=max((cell.overall.total + cell.overall.open for cell in grid.cells), default=0),
        videos=max((len(cell.videos) for cell in grid.cells), default=0),
        made_at=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
        commit=grid.cells[0].run.get("commit") if grid.cells else None,
        alerts=alerts(grid),
        summary=tables.summary(grid),
        notes=list(tables.notes(grid)),
        pictures=[
            {"title": ALTS[name], "note": CAPTIONS[name], "uri": _data_uri(data), "width": width_px(data)} for name, data in drawn.items()
        ],
        groups=list(tables.by_group(grid)),
        paper=None if beside is None else {"column": beside.name, "rows": beside.rows, "source": paper.SOURCE, "note": paper.NOTE},
        failures=failed[:LINES_SHOWN],
        failures_more=max(0, len(failed) - LINES_SHOWN),
        left_out=grid.left_out[:LINES_SHOWN],
        left_out_more=max(0, len(grid.left_out) - LINES_SHOWN),
        settings={"names": differing.columns[1:-1], "rows": differing.rows, "common": common},
    )


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def alerts(grid: GridScore) -> list[str]:
    """What a reader must know before the figures."""
    found = []
    if grid.missing:
        found.append(f"Missing or out of reach: {_count(len(grid.missing), 'video')}; what is asked about them counts as wrong.")
    if grid.left_out:
        found.append(f"Not asked, since they can't be used: {_count(len(grid.left_out), 'annotation')}, listed below.")
    unfinished = [cell.cell.name for cell in grid.cells if not cell.run.get("complete")]
    if unfinished:
        found.append(f"Not finished: {', '.join(unfinished)}. What hasn't been asked counts as wrong; run the same command again to go on.")
    return found


def as_markdown(grid: GridScore, drawn: list[str]) -> str:
    """The tables in Markdown."""
    differing, common = tables.settings(grid)
    beside = tables.beside_paper(grid)
    parts = [
        f"# {tables.escaped(grid.title)}",
        *(f"**{tables.escaped(alert)}**" for alert in alerts(grid)),
        f"Questions are put {FORMS[grid.form]}.",
    ]
    parts += [tables.markdown(tables.summary(grid)), *tables.notes(grid)]
    parts += [f"![{ALTS[name]}](report-{name}.png)\n\n{CAPTIONS[name]}" for name in drawn]
    for group in tables.by_group(grid):
        parts += [f"## By {group.name}", tables.markdown(group)]
    if beside is not None:
        parts += ["## The paper's figures", tables.markdown(beside), f"{paper.SOURCE}. {paper.NOTE}"]
    if failed := tables.failures(grid):
        parts += [
            "## Without an answer",
            tables.markdown(tables.Table(["cell", "video or question", "reason"], failed[:LINES_SHOWN], texts=3)),
        ]
    if grid.left_out:
        rows = [[problem.where, problem.reason] for problem in grid.left_out[:LINES_SHOWN]]
        parts += ["## Annotations left out", tables.markdown(tables.Table(["where", "why"], rows, texts=2))]
    parts += ["## Settings", tables.markdown(differing)]
    parts += [tables.markdown(tables.Table(["the same in all cells", "value"], [list(pair) for pair in common], texts=2))]
    return "\n\n".join(parts) + "\n"
