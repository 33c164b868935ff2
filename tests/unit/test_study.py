"""The study of policies: same questions for all, resumable, honest tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine import EngineConfig
from engine.models import load_adapter
from jobs import study
from jobs.benchmarks.judging import wilson
from jobs.studying.cells import grid
from jobs.studying.tables import paired, summary
from jobs.studying.trial import Laboratory

SMALL = ["--set", "simple", "--groups", "12", "--questions", "12", "--questions-per-video", "6", "--budgets", "8", "--json"]
POLICIES = ["--policies", "full,coverage,random:seed=3,snapkv:kernel_size=1,uniform"]


def run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert study.main(["--output", str(folder), *SMALL, *POLICIES, *options]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return rows


def test_cells_are_asked_the_same_and_a_second_start_only_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(tmp_path, capsys)
    assert [row["policy"] for row in rows] == ["full", "coverage", "random:seed=3", "snapkv:kernel_size=1", "uniform"]
    assert {row["questions"] for row in rows} == {12}
    full, kept = rows[0], rows[1:]
    assert full["budget_tokens"] is None and full["events_kept"] == 100.0 and full["against_full"] == 0.0
    assert all(row["share"] == pytest.approx(100 * 8 / 48) and row["kv_peak_bytes"] < full["kv_peak_bytes"] for row in kept)
    kept_tokens = [Laboratory(load_adapter(EngineConfig())).engine(cell, 4) for cell in grid(["keydiff"], [8], [4], ["during"], ["group"])]
    assert kept_tokens[0].new_cache().budget_tokens == 8 + 15, "beyond the prompt's 14 tokens and the one that opens the video"
    assert all(row["low"] <= row["accuracy"] <= row["high"] for row in rows)
    asked = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    by_cell: dict[str, set[tuple[str, str]]] = {}
    for row in asked:
        by_cell.setdefault(row["cell"], set()).add((row["video_id"], row["question_id"]))
    assert len(by_cell) == 5 and len(set(map(frozenset, by_cell.values()))) == 1
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000

    notebook = tmp_path / "answers.jsonl"
    lines = notebook.read_text().splitlines(keepends=True)
    notebook.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote its last line
    assert run(tmp_path, capsys) == rows
    assert sorted(notebook.read_text().splitlines()) == sorted("".join(lines).splitlines()), "only what was missing was done"


def test_other_questions_about_the_same_videos_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path, capsys, "--policies", "full", "--kinds", "colour")
    second = run(tmp_path, capsys, "--policies", "full", "--kinds", "digit", "--options", "always")
    assert set(first[0]["kinds"]) == {"colour"} and set(second[0]["kinds"]) == {"digit"}


def test_when_and_where_blocks_end_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policies", "keydiff", "--compress", "during,after", "--alignments", "group,none", "--questions", "6"]
    rows = run(tmp_path, capsys, *options)
    kinds = [(row["compress"], row["alignment"]) for row in rows]
    assert kinds == [("during", "group"), ("during", "none"), ("after", "group"), ("after", "none")]
    assert rows[2]["kv_peak_bytes"] > 2 * rows[0]["kv_peak_bytes"], "compression after a full prefill peaks at the full cache"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policies", "keydif"], "did you mean keydiff?"),
        (["--policies", "random:seed"], "POLICY:NAME=VALUE"),
        (["--budgets", "16,no"], "--budgets=16,no"),
        (["--groups", "3", "--set", "dense"], "too short"),
        (["--kinds", ""], "--kinds is empty; leave it out for colour,shape,digit,exists"),
        (["--policies", "uniform:x=1"], "uniform takes no options"),
        (["--seed", "-1"], "--seed=-1 must be at least 0"),
        (["--questions", "0"], "--questions=0: must be whole numbers of at least 1"),
        (["--output", "/dev/null"], "--output=/dev/null: "),
    ],
)
def test_a_bad_argument_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str) -> None:
    assert study.main(["--output", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


def test_a_notebook_that_is_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "[1, 2]",
        '{"a": 1}',
        "[" * 5000,
        '[{"cell": "x", "video_id": "v", "asked": "q", "model": "m", "right": "yes"}]',
        "\udce9",
    ):
        (tmp_path / "answers.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n")
        assert study.main(["--output", str(tmp_path), *SMALL, *POLICIES]) == 2
        assert "holds a line that no study wrote" in capsys.readouterr().err


def test_a_line_that_lacks_a_question_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run(tmp_path, capsys, "--policies", "full")
    notebook = tmp_path / "answers.jsonl"
    first, *rest = notebook.read_text().splitlines()
    notebook.write_text("\n".join([json.dumps(json.loads(first)[:-1]), *rest]) + "\n")
    assert run(tmp_path, capsys, "--policies", "full") == before


def test_another_models_answers_are_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--output", str(tmp_path), *SMALL, "--policies", "full"]) == 0
    notebook = tmp_path / "answers.jsonl"
    notebook.write_text(notebook.read_text().replace("bundled@", "another@"))
    assert study.main(["--output", str(tmp_path), *SMALL, *POLICIES]) == 2
    assert "holds answers of another@" in capsys.readouterr().err


def test_differences_are_paired() -> None:
    def row(right: bool) -> dict[str, Any]:
        return {"right": right}

    base = {("v", str(n)): row(n < 8) for n in range(10)}
    found = {("v", str(n)): row(n < 6) for n in range(9)}
    difference, half = paired(found, base)
    assert difference == pytest.approx(-200 / 9)
    assert half == pytest.approx(196 * (2 / 9 * 7 / 9) ** 0.5 / 3)
    assert paired(found, {}) == (None, None)


def test_intervals_and_kinds() -> None:
    cells = grid(["keydiff"], [16], [4], ["during"], ["group"])
    common = {"cell": cells[0].name, "video_id": "v", "events_kept": 0.5, "kv_peak_bytes": 7}
    answers = [{**common, "question_id": str(n), "kind": "colour" if n % 2 else "digit", "right": n < 5} for n in range(10)]
    only = summary(cells, answers, 256)[0]
    assert (only["accuracy"], only["events_kept"], only["share"]) == (50.0, 50.0, 6.25)
    assert only["low"] == pytest.approx(23.66, abs=0.01) and only["high"] == pytest.approx(76.34, abs=0.01)
    assert only["kinds"] == {"colour": 40.0, "digit": 60.0}


def test_an_interval_holds_its_share_at_both_ends() -> None:
    assert all(wilson(n, n)[1] == 1.0 and wilson(0, n)[0] == 0.0 for n in range(1, 2000))
