"""A grid over a benchmark: every cell equals a job of its own, nothing is read twice, stopping loses nothing, the report is a page."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

from engine import Engine
from engine.errors import OutOfMemoryError
from jobs import answer, evaluate, generate
from jobs.evaluation import grid, reading
from pipeline.stream import read_video
from tests.integration.test_report_page import NAMES, OFFLINE
from tests.support.jobs import QUIET, rows, watch_in_this_process
from tests.support.runs import HOSTILE

GRID = ["--models", "bundled", "--policies", "keydiff,snapkv,full", "--budgets", "64,96", "--block-sizes", "16,40"]
SETTINGS = [*QUIET, "--engine.answer.max-new-tokens", "4", "--pool.threads", "1", "--log.level", "error"]
PER_RUN = {"run_id", "ttft_s", "answer_s", "vision_s", "prefill_s", "evict_s", "decode_wait_s", "process_peak_bytes", "cache_id"}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short videos with questions whose answers are known, and one that isn't there."""
    folder = tmp_path_factory.mktemp("videos")
    assert generate.main(["--output", str(folder), "--videos", "2", "--groups", "24", "--questions", "3"]) == 0
    path = folder / "manifest.jsonl"
    lines = path.read_text().splitlines()
    absent = json.loads(lines[0]) | {"video_id": "absent" + HOSTILE[0], "uri": "absent.mp4"}
    path.write_text("\n".join([*lines, json.dumps(absent)]))
    return path


@pytest.fixture(scope="module")
def done(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str], Counter[int]]:
    """The grid's output, how often each video was read, and how many tokens the vision tower encoded."""
    output = tmp_path_factory.mktemp("grid")
    reads: Counter[str] = Counter()
    encoded: Counter[int] = Counter()

    def counted(task: Any, *arguments: Any) -> Iterator[Any]:
        reads[task.video_id] += 1
        yield from read_video(task, *arguments)

    class Counting(grid.SharedVision):
        def __call__(self, block: Any) -> Any:
            before = self._latest
            piece = super().__call__(block)
            if self._latest is not before:
                encoded["run"] += block.groups  # type: ignore[index]
            encoded["asked"] += block.groups  # type: ignore[index]
            return piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading.ReadTogether.__init__, "__defaults__", (counted,))
        patch.setattr(grid, "SharedVision", Counting)
        assert run(manifest, output) == answer.UNANSWERED
    return output, reads, encoded


def run(manifest: Path, output: Path, *more: str) -> int:
    return evaluate.main(["--benchmark", "manifest", "--annotations", str(manifest), "--output", str(output), *GRID, *SETTINGS, *more])


def cells(output: Path) -> list[Path]:
    return sorted((output / "cells").iterdir())


def test_every_cell_equals_a_job_of_its_own(done: Any, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, _, _ = done
    watch_in_this_process(monkeypatch)
    assert len(cells(output)) == 10
    for cell in cells(output):
        config = json.loads((cell / "run.json").read_text())["config"]["engine"]
        alone = tmp_path / cell.name
        chosen = [
            item
            for name in ("policy", "budget_tokens", "block_tokens")
            for item in (f"--engine.{name.replace('_', '-')}", str(config[name]))
        ]
        arguments = ["--manifest", str(manifest), "--output", str(alone), "--caches.retain", "none", *chosen, *SETTINGS]
        assert answer.main(arguments) == answer.UNANSWERED
        for table in ("answers", "memory", "quarantine"):
            ours, theirs = ([{k: v for k, v in row.items() if k not in PER_RUN} for row in rows(place, table)] for place in (cell, alone))
            assert ours == theirs, (cell.name, table)


def test_a_video_is_decoded_once_and_seen_once_a_block_size(done: Any) -> None:
    _, reads, encoded = done
    questions = 3
    seen = {video: count for video, count in reads.items() if not video.startswith("absent")}
    assert set(seen.values()) == {questions}, "once for all policies, once more for each further question of the one that needs it"
    groups = 2 * 24
    assert encoded["asked"] == groups * (6 + 4 * questions)
    assert encoded["run"] == groups * 2 * questions


def test_the_same_command_again_does_nothing_but_what_failed(done: Any, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, _, _ = done
    before = {cell.name: (cell / "answers").stat().st_mtime_ns for cell in cells(output)}
    watched: list[str] = []
    monkeypatch.setattr(grid.CellWorker, "watch", lambda self, task, attempt=1: watched.append(task.video_id) or pytest.fail("watched"))
    assert run(manifest, output, "--only", "simple-24g-s0-0000") == answer.ANSWERED
    assert not watched and set(before) == {cell.name for cell in cells(output)}


def test_stopped_and_started_again_nothing_is_lost_or_done_twice(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--policies", "keydiff", "--block-sizes", "40"]
    whole = grid._watch
    seen: list[str] = []

    def watch(task: Any, *arguments: Any) -> None:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(task.video_id)
        whole(task, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(grid, "_watch", watch)
        assert run(manifest, tmp_path, *few) == answer.STOPPED
    assert all(sum(row["error"] is None for row in rows(cell, "answers")) == 3 for cell in cells(tmp_path))
    assert not any((cell / "_SUCCESS").exists() for cell in cells(tmp_path))

    def rest(task: Any, *arguments: Any) -> None:
        seen.append(task.video_id)
        whole(task, *arguments)

    monkeypatch.setattr(grid, "_watch", rest)
    assert run(manifest, tmp_path, *few) == answer.UNANSWERED
    assert len(seen) == len(set(seen)) == 3


def test_a_cell_out_of_memory_is_given_up_and_costs_no_other_its_answers(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, tries = Engine.prefill, Counter[str]()

    def too_large(self: Engine, stream: Any, **options: Any) -> Any:
        if self.config.policy == "full" and self.config.block_tokens == 16:
            tries[self.config.policy] += 1
            next(iter(stream))
            raise OutOfMemoryError("out of memory even with blocks of one group")
        return prefill(self, stream, **options)

    monkeypatch.setattr(Engine, "prefill", too_large)
    few = ["--policies", "keydiff,full", "--budgets", "64", "--pool.max-attempts", "2"]
    assert run(manifest, tmp_path, *few) == answer.UNANSWERED
    assert tries["full"] == 2 * 2, "two videos, two tries each, in one start"
    for cell in cells(tmp_path):
        given_up = [row for row in rows(cell, "answers") if "given up after 2 attempts" in (row["error"] or "")]
        assert len(given_up) == (6 if cell.name.startswith("bundled-full") and cell.name.endswith("b16") else 0)
    larger = [*few[:3], "64,96", *few[4:]]
    assert run(manifest, tmp_path, *larger) == answer.UNANSWERED
    assert tries["full"] == 2 * 2 and len(cells(tmp_path)) == 6, "a larger budget adds cells and redoes none"


def test_for_a_job_of_its_own_a_cell_is_done(
    done: Any, manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _, _ = done
    chosen = ["--engine.policy", "keydiff", "--engine.budget-tokens", "64", "--engine.block-tokens", "16", "--caches.retain", "none"]
    cell = output / "cells" / "bundled-keydiff-m64-b16"
    arguments = ["--manifest", str(manifest), "--output", str(cell), "--dry-run", *chosen, *SETTINGS]
    assert answer.main(arguments) == answer.ANSWERED
    assert "0 of 3 videos to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--benchmark", "vstar", "--annotations", "x"], "--videos is missing"),
        (["--benchmark", "vstar", "--annotations", "absent", "--videos", "v"], "holds no"),
        (["--benchmark", "manifest", "--annotations", "absent.jsonl"], "absent.jsonl"),
        (["--benchmark", "manifest", "--annotations", "m.jsonl", "--policies", "keydif"], "keydif"),
        (["--benchmark", "manifest", "--annotations", "m.jsonl", "--budgets", "0"], "budget_tokens"),
        (["--benchmark", "manifest", "--annotations", "m.jsonl", "--engine.bugdet-tokens", "4"], "budget-tokens"),
    ],
)
def test_mistakes_are_told_before_any_work(more: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([*more, "--output", str(tmp_path / "out")]) == answer.UNUSABLE
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out" / "cells").exists()


def test_models_of_both_families_in_one_grid(manifest: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    models = ",".join(str(folder) for folder in folders.values())
    few = ["--models", models, "--policies", "keydiff,full", "--budgets", "96", "--block-sizes", "64", "--only", "simple-24g-s0-0001"]
    assert run(manifest, tmp_path, *few, "--decode.fps", "1", "--decode.end-s", "4") == answer.ANSWERED
    found = {cell["name"]: cell for cell in json.loads((tmp_path / "scores.json").read_text())["cells"]}
    assert [name.split("-")[0] for name in found] == ["qwen", "qwen", "intern", "intern"]
    assert all(cell["overall"]["total"] == 3 and cell["kv_peak_bytes"] <= cell["kv_full_bytes"] for cell in found.values())


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 56, 3), np.uint8)).save(path)


@pytest.mark.parametrize("form", ["published", "letters"])
def test_a_benchmark_of_images_from_its_files_to_its_scores(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "What colour is the circle?\n(A) red\n(B) blue\nAnswer with the option's letter from the given choices directly."
    questions = [
        {"image": f"direct_attributes/{n}.jpg", "text": text, "category": "direct_attributes", "label": "AB"[n % 2], "question_id": n}
        for n in range(3)
    ]
    (tmp_path / "test_questions.jsonl").write_text("\n".join([*map(json.dumps, questions), "{"]))
    for n in range(2):
        picture(tmp_path / "direct_attributes" / f"{n}.jpg", n)
    common = ["--annotations", str(tmp_path), "--videos", str(tmp_path), "--output", str(tmp_path / "out"), "--form", form]
    few = ["--policies", "keydiff", "--budgets", "64", "--block-sizes", "16", *SETTINGS]
    assert evaluate.main(["--benchmark", "vstar", *common, *few]) == answer.UNANSWERED
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    (cell,) = scores["cells"]
    assert (cell["overall"]["total"], cell["overall"]["unanswered"]) == (3, 1), "a missing image counts as wrong"
    assert cell["failures"][0][0] == "direct_attributes/2.jpg" and "no such file" in cell["failures"][0][1]
    assert scores["left_out"] == [line for line in scores["left_out"] if "test_questions.jsonl:4: not valid JSON" in line] != []
    said = rows(tmp_path / "out" / "cells" / cell["name"], "answers")
    assert [bool(row["options"]) for row in said] == [form == "letters"] * 3
    if form == "letters":
        assert cell["overall"]["right"] == sum(row["choice"] == "AB"[n % 2] for n, row in enumerate(said))
        assert cell["overall"]["unparsed"] == 0
    beside_paper = "V*, paper" in (tmp_path / "out" / "report.md").read_text().replace("\\*", "*")
    assert beside_paper == (form == "published"), "the paper's figures stand beside what is asked in the same way only"


def test_a_benchmark_of_interleaved_prompts(tmp_path: Path) -> None:
    instance = {"context": "{image#1} and {image#2}\nWhat colour is the circle?", "images_path": ["a.png", "b.png"]}
    sample = {"sample_id": 0, "task_instruction_id": 0, "task_instance": instance, "response": "red", "image_quantity_level": "Few"}
    absent = sample | {"sample_id": 1, "task_instance": instance | {"images_path": ["a.png", "c.png"]}}
    value = {"meta_data": {"task_instruction": ["Look."]}, "data": [sample, absent]}
    (tmp_path / "ImageNeedleInAHaystack.json").write_text(json.dumps(value))
    for n, name in enumerate("ab"):
        picture(tmp_path / "images" / f"{name}.png", n)
    common = ["--annotations", str(tmp_path), "--videos", str(tmp_path / "images"), "--output", str(tmp_path / "out")]
    few = ["--policies", "keydiff,snapkv", "--budgets", "64", "--block-sizes", "16", *SETTINGS]
    assert evaluate.main(["--benchmark", "milebench-needle", *common, *few]) == answer.UNANSWERED
    for cell in json.loads((tmp_path / "out" / "scores.json").read_text())["cells"]:
        assert (cell["overall"]["total"], cell["overall"]["unanswered"]) == (2, 1) and list(cell["lengths"]) == ["Few"]
        assert "c.png" in cell["failures"][0][1]
        (memory, _) = rows(tmp_path / "out" / "cells" / cell["name"], "memory")
        assert memory["groups"] == 2 and memory["total_tokens"] > memory["visual_tokens"] + 10, "texts were read as well"


def test_the_report_is_a_page_that_needs_nothing_else(done: Any) -> None:
    output, _, _ = done
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert path, "no Chromium on this machine; `make browser` installs one"
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OFFLINE)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else problems.append(request.url))
        assert run_report_again(output)
        page.goto((output / "report.html").as_uri())
        assert page.title().endswith("/manifest.jsonl: 10 cells"), "no text ran as a script"
        widths = page.evaluate("[...document.querySelectorAll('img.chart')].map(image => image.naturalWidth)")
        assert len(widths) == 4 and min(widths) > 600, "every picture was drawn and shown"
        assert page.locator("section").first.locator("tbody tr").count() == 11
        assert HOSTILE[0] in page.locator("table").nth(3).inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing runs out of the window"
        assert page.locator("script").count() == 0
        browser.close()
    assert not problems


def run_report_again(output: Path) -> bool:
    """The report as it was after the whole run; another test may have asked about one video since."""
    config = json.loads((cells(output)[0] / "run.json").read_text())["config"]
    return run(Path(config["manifest"]), output) == answer.UNANSWERED


def test_the_tables_are_the_main_jobs(done: Any) -> None:
    output, _, _ = done
    for cell in cells(output):
        schema = pq.read_schema(next((cell / "answers").glob("*.parquet")))
        assert {"question_id", "choice", "budget_tokens"} <= set(schema.names)
        assert {"run.json", "settings.json", "answers", "memory", "quarantine", "results"} <= {path.name for path in cell.iterdir()}
