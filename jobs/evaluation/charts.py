"""The report's pictures. Needs matplotlib (the extra `plot`); a report without it says so."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jobs.evaluation.scores import TTFT, CellScore, GridScore
from jobs.report_page.page import visible

COLOURS = ("#1769aa", "#d9822b", "#1d7a46", "#7d5ba6", "#b4271f", "#00838f", "#8a6d3b", "#5c6773")
MARKERS = "osD^v<>P"
STEP_NAMES = ("vision tower", "prefill", "eviction", "question to first token")
STEP_COLOURS = ("#6aa67f", "#1769aa", "#d9822b", "#7d5ba6")
TEXT_SHOWN = 42
DPI = 150


def pictures(grid: GridScore) -> dict[str, bytes]:
    """PNG files by name; empty without matplotlib. A chart that has nothing to show is left out."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("Agg")
    drawn: dict[str, Callable[[GridScore, Any], bool]] = {
        "accuracy": _accuracy,
        "groups": _groups,
        "memory": _memory,
        "ttft": _ttft,
    }
    files = {}
    for name, draw in drawn.items():
        with _style():
            from matplotlib import pyplot

            figure = pyplot.figure(constrained_layout=True)
            try:
                if draw(grid, figure):
                    data = io.BytesIO()
                    figure.savefig(data, dpi=DPI)
                    files[name] = data.getvalue()
            finally:
                pyplot.close(figure)
    return files


def width_px(png: bytes) -> int:
    """How wide a page should show a picture, so that letters are as large in one as in another."""
    return round(int.from_bytes(png[16:20], "big") * 105 / DPI)


def shown(text: str, longest: int = TEXT_SHOWN) -> str:
    """A foreign text as a chart may show it: one line, nothing that deceives."""
    line = visible(" ".join(text.split())).encode(errors="replace").decode()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def short_model(model: str) -> str:
    """The last part of a hub id or folder."""
    return shown(model.rstrip("/").rpartition("/")[2] or model)


def label(cell: CellScore, *, budget: bool = True) -> str:
    """A cell in a few words."""
    engine = cell.cell.engine
    size = f" {engine.budget_tokens}" if budget and cell.cell.evicts else ""
    return f"{short_model(engine.model)} {engine.policy}{size}, b {engine.block_tokens}"


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "text.parse_math": False,  # a $ in a name is a $
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dfe3e9",
        "axes.edgecolor": "#66707f",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks
        yield


def _accuracy(grid: GridScore, figure: Any) -> bool:
    """Right answers against the budget, with 95% intervals, a line a model, policy and block size; the paper's as hollow marks."""
    figure.set_size_inches(8.2, 4.4)
    axes = figure.add_subplot()
    budgets = sorted({c.cell.engine.budget_tokens for c in grid.cells if c.cell.evicts})
    places = {budget: at for at, budget in enumerate(budgets)}
    series: dict[tuple[str, str, int], list[CellScore]] = {}
    for cell in grid.cells:
        if cell.overall.accuracy is not None:
            engine = cell.cell.engine
            series.setdefault((engine.model, engine.policy, engine.block_tokens), []).append(cell)
    if not series:
        return False
    with_paper = False
    for number, cells in enumerate(series.values()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        percent = [100 * (c.overall.accuracy or 0.0) for c in cells]
        bounds = [[abs(100 * end - value) for end in c.overall.interval] for c, value in zip(cells, percent, strict=True)]
        name = label(cells[0], budget=False)
        if not cells[0].cell.evicts:
            axes.axhline(percent[0], color=colour, linestyle="--", linewidth=1.4, label=name)
            low, high = (100 * end for end in cells[0].overall.interval)
            axes.axhspan(low, high, color=colour, alpha=0.07, linewidth=0)
            if cells[0].paper is not None:
                with_paper = True
                hollow: Any = {"color": colour, "marker": marker, "linestyle": "none", "markersize": 9, "markerfacecolor": "none"}
                axes.plot([max(len(budgets) - 1, 0) + 0.5], [cells[0].paper], **hollow)
            continue
        shift = 0.05 * (number - (len(series) - 1) / 2)  # so that intervals stand side by side
        x = [places[c.cell.engine.budget_tokens] + shift for c in cells]
        errors = list(zip(*bounds, strict=True))
        axes.errorbar(x, percent, yerr=errors, color=colour, marker=marker, markersize=5, capsize=3, linewidth=1.4, label=name)
        theirs = [(at, c.paper) for at, c in zip(x, cells, strict=True) if c.paper is not None]
        if theirs:
            with_paper = True
            axes.plot(*zip(*theirs, strict=True), color=colour, marker=marker, linestyle="none", markersize=9, markerfacecolor="none")
    axes.set_xticks(range(len(budgets)), [f"{budget:,}" for budget in budgets])
    axes.set_xlim(-0.6, max(len(budgets) - 1, 0) + 0.6)
    axes.set_ylim(0, 100)
    axes.set(xlabel="budget, entries a layer and KV head", ylabel="right answers, %")
    axes.set_title("Accuracy against budget, 95% intervals" + ("; hollow: the paper's" if with_paper else ""), loc="left", fontsize=10.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return True


def _groups(grid: GridScore, figure: Any) -> bool:
    """Accuracy of each cell in each task and length, as a table of colours with its numbers."""
    tasks, lengths = grid.task_names, grid.length_names
    names = [*tasks, *lengths]
    if not names:
        return False
    rows = []
    for cell in grid.cells:
        tallies = [cell.tasks.get(name) for name in tasks] + [cell.lengths.get(name) for name in lengths]
        rows.append([float("nan") if t is None or t.accuracy is None else 100 * t.accuracy for t in tallies])
    figure.set_size_inches(min(16.0, 3.4 + 0.75 * len(names)), 1.5 + 0.32 * len(grid.cells))
    axes = figure.add_subplot()
    axes.grid(False)
    axes.imshow(rows, vmin=0, vmax=100, cmap="Blues", aspect="auto")
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            if value == value:
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if value > 60 else "#1c2430", fontsize=8.5)
    if tasks and lengths:
        axes.axvline(len(tasks) - 0.5, color="white", linewidth=5)
    axes.set_xticks(range(len(names)), [shown(name, 24) for name in names], rotation=30, ha="right")
    axes.set_yticks(range(len(grid.cells)), [label(cell) for cell in grid.cells])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("Right answers by task" + (" and length" if lengths else "") + ", %", loc="left", fontsize=10.5)
    return True


def _memory(grid: GridScore, figure: Any) -> bool:
    """The most that a video's cache held, against its visual tokens, a line a budget; what a full cache would have held beside it."""
    figure.set_size_inches(8.2, 4.2)
    axes = figure.add_subplot()
    full: dict[str, dict[int, float]] = {}
    kept: dict[tuple[str, int, int], dict[int, float]] = {}
    for cell in grid.cells:
        engine = cell.cell.engine
        for row in cell.videos:
            tokens = row.get("visual_tokens")
            if tokens:
                full.setdefault(engine.model, {})[tokens] = row["kv_full_bytes"] / 1e6
                if cell.cell.evicts:
                    points = kept.setdefault((engine.model, engine.budget_tokens, engine.block_tokens), {})
                    points[tokens] = max(points.get(tokens, 0.0), row["kv_peak_bytes"] / 1e6)
    if not full:
        return False
    for number, ((model, budget, block), points) in enumerate(kept.items()):
        style: Any = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        axes.plot(
            *zip(*sorted(points.items()), strict=True), **style, linewidth=1.2, label=f"{short_model(model)}, budget {budget:,}, b {block}"
        )
    for model, points in full.items():
        axes.plot(
            *zip(*sorted(points.items()), strict=True),
            color="#1c2430",
            linestyle=":",
            marker=".",
            linewidth=1.6,
            label=f"{short_model(model)}, a full cache",
        )
    tokens_read = [tokens for points in full.values() for tokens in points]
    if max(tokens_read) > 20 * min(tokens_read):
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        largest = max(size for points in (*full.values(), *kept.values()) for size in points.values())
        axes.set_ylim(0, 1.08 * largest)
        axes.set_xlim(0, 1.08 * max(tokens_read))
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set(xlabel="visual tokens of a video", ylabel="MB of keys and values, at most")
    axes.set_title("Peak KV memory against visual tokens", loc="left", fontsize=10.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return True


def _ttft(grid: GridScore, figure: Any) -> bool:
    """Median seconds of what passes before the first token, a bar a cell."""
    cells = [cell for cell in grid.cells if cell.median("ttft_s") is not None]
    if not cells:
        return False
    figure.set_size_inches(8.2, 1.3 + 0.3 * len(cells))
    axes = figure.add_subplot()
    axes.grid(False, axis="y")
    left = [0.0] * len(cells)
    for step, name, colour in zip(TTFT, STEP_NAMES, STEP_COLOURS, strict=True):
        widths = [cell.median(step) or 0.0 for cell in cells]
        axes.barh(range(len(cells)), widths, left=left, color=colour, height=0.62, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, (cell, end) in enumerate(zip(cells, left, strict=True)):
        axes.text(end, row, f" {cell.median('ttft_s'):.3g} s", va="center", fontsize=8.5)
    axes.set_yticks(range(len(cells)), [label(cell) for cell in cells])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left) or 1.0)
    axes.set_xlabel("seconds, median over videos, decoding not counted")
    axes.set_title("Time to first token", loc="left", fontsize=10.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.28 if len(cells) < 4 else -0.12), ncol=4, fontsize=8)
    return True
