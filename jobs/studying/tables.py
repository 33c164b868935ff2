"""What a study found: accuracies with their intervals, differences on the same questions, a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jobs.benchmarks.judging import wilson
from jobs.studying.cells import Cell

Key = tuple[str, str]
"""(video_id, question_id)"""


def summary(cells: Sequence[Cell], answers: Sequence[Mapping[str, Any]], visual_tokens: int) -> list[dict[str, Any]]:
    """A row a cell, in the cells' order.

    Args:
        answers: what `Laboratory.try_cell` returned, for all videos.
        visual_tokens: of a video, all groups.

    Returns:
        policy, budget_tokens (visual tokens beyond the prefix; None for the full cache), share (of the visual tokens, %), block_groups,
        compress, alignment, questions, accuracy, low, high (95%, Wilson), against_full and its half-width (points, on the same
        questions, 95%; None without a full cache), events_kept (%), kv_peak_bytes, and kinds: accuracy by kind of question; all
        accuracies in percent.
    """
    by_cell: dict[str, dict[Key, Mapping[str, Any]]] = defaultdict(dict)
    for row in answers:
        by_cell[row["cell"]][row["video_id"], row["question_id"]] = row
    full = next((by_cell[cell.name] for cell in cells if cell.policy == "full"), {})
    rows = []
    for cell in cells:
        found = by_cell[cell.name]
        right = sum(row["right"] for row in found.values())
        low, high = wilson(right, len(found))
        difference, half = paired(found, full)
        kinds = sorted({row["kind"] for row in found.values()})
        rows.append(
            {
                "policy": cell.policy,
                "budget_tokens": cell.budget_tokens,
                "share": None if cell.budget_tokens is None else 100 * cell.budget_tokens / visual_tokens,
                "block_groups": cell.block_groups,
                "compress": cell.compress,
                "alignment": cell.alignment,
                "questions": len(found),
                "accuracy": 100 * right / max(1, len(found)),
                "low": 100 * low,
                "high": 100 * high,
                "against_full": difference,
                "against_full_half": half,
                "events_kept": 100 * float(np.mean([row["events_kept"] for row in found.values()])),
                "kv_peak_bytes": max(row["kv_peak_bytes"] for row in found.values()),
                "kinds": {kind: 100 * float(np.mean([r["right"] for r in found.values() if r["kind"] == kind])) for kind in kinds},
            }
        )
    return rows


def paired(found: Mapping[Key, Mapping[str, Any]], base: Mapping[Key, Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Difference of two cells in points on the questions that both were asked, and the half-width of its 95% interval."""
    both = sorted(found.keys() & base.keys())
    if not both:
        return None, None
    differences = np.array([float(found[key]["right"]) - float(base[key]["right"]) for key in both])
    return 100 * float(differences.mean()), 196 * float(differences.std()) / len(both) ** 0.5


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The rows for people; columns that don't vary are left out."""
    shown = Table(title=title)
    columns = ["policy", "budget_tokens", "share", "block_groups", "compress", "alignment", "accuracy", "against_full", "events_kept"]
    columns = [c for c in columns if c not in ("block_groups", "compress", "alignment") or len({row[c] for row in rows}) > 1]
    kinds = sorted({kind for row in rows for kind in row["kinds"]})
    names = {"budget_tokens": "budget", "accuracy": "accuracy % (95%)", "against_full": "against full", "events_kept": "events kept %"}
    for column in (*columns, *kinds, "KV peak"):
        shown.add_column(names.get(column, column), justify="left" if column == "policy" else "right")
    for row in rows:
        values = {
            "budget_tokens": "all" if row["budget_tokens"] is None else str(row["budget_tokens"]),
            "share": "" if row["share"] is None else f"{row['share']:.1f}%",
            "accuracy": f"{row['accuracy']:.1f} ({row['low']:.1f}-{row['high']:.1f})",
            "against_full": "" if row["against_full"] is None else f"{row['against_full']:+.1f} ±{row['against_full_half']:.1f}",
            "events_kept": f"{row['events_kept']:.1f}",
        }
        kinds_shown = [f"{row['kinds'].get(kind, float('nan')):.0f}" for kind in kinds]
        shown.add_row(*(values.get(c, str(row[c])) for c in columns), *kinds_shown, f"{row['kv_peak_bytes']:,}")
    return shown


def plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Accuracy against the share of tokens kept, a line a policy, with the full cache as a level.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["share"] is None:
            axes.axhline(row["accuracy"], color="black", linewidth=1, linestyle=":", label="full cache")
        else:
            varied = [row[name] for name, plain in (("compress", "during"), ("alignment", "group")) if row[name] != plain]
            lines[", ".join([row["policy"], *varied])].append(row)
    for label, points in lines.items():
        points = sorted(points, key=lambda row: row["share"])
        middle = [p["accuracy"] for p in points]
        spread = [[p["accuracy"] - p["low"] for p in points], [p["high"] - p["accuracy"] for p in points]]
        axes.errorbar([p["share"] for p in points], middle, yerr=spread, marker="o", capsize=2, linewidth=1.5, label=label)
    axes.set(xlabel="visual tokens kept, %", ylabel="right answers, %", title=title, xscale="log")
    axes.set_xticks(ticks := sorted({row["share"] for row in rows if row["share"] is not None}), [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)
