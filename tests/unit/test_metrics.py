"""Metrics: what is set, by whom; and that the dashboard and the alerts ask for nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.util.metrics
import yaml

from pipeline.config import JobConfig
from pipeline.load import Load, LoadMeter
from pipeline.metrics import CAUSES, METRICS, OUTCOMES, RUN_TAG, EngineMetrics, RunMetrics, outcome_of
from pipeline.results import VideoResult
from pipeline.stream import StageError
from pipeline.task import ManifestQuestion, VideoTask
from pipeline.worker import VideoWorker
from tests.support import promql
from tests.support.prometheus_operator import SCHEMAS
from tests.support.videos import make_video

INFRA = Path(__file__).parents[2] / "infra"
DASHBOARD = INFRA / "grafana" / "reelkeep.json"
MONITORING = INFRA / "kubernetes" / "components" / "monitoring"
ADDED_BY_RAY = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId"}
ADDED_BY_PROMETHEUS = {"instance", "job", "namespace", "pod", "ray_io_cluster", "ray_io_group"}

Rule = dict[str, Any]


class Recorded:
    """Ray's metric classes, played by the test: remembers every value under its metric's name and tags."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        for kind in ("Counter", "Gauge"):
            monkeypatch.setattr(ray.util.metrics, kind, lambda name, **about: _Played(self.values, name, **about))

    def of(self, name: str, **tags: str) -> float | None:
        return self.values.get((name, "r1", *tags.values()))


class _Played:
    def __init__(self, values: dict[tuple[str, ...], float], name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.values, self.name, self.tag_keys = values, name, tag_keys
        assert description

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.tag_keys), "Ray refuses tags that were not announced"
        return (self.name, *(tags[key] for key in self.tag_keys))

    def inc(self, amount: float, tags: dict[str, str]) -> None:
        assert amount > 0, "Ray refuses 0"
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def test_names_are_prometheus_own_and_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"reelkeep_[a-z_]+", metric.name) and not metric.name.endswith("_total"), "Ray adds _total"
        assert metric.description.endswith(".") and RUN_TAG not in metric.tags


def test_every_metric_is_set_and_means_what_it_says(recorded: Recorded) -> None:
    run = RunMetrics("r1", videos=4)
    assert recorded.of("reelkeep_queue_videos") == 4 and recorded.of("reelkeep_video_hours") == 0
    assert [recorded.of("reelkeep_videos", outcome=o) for o in OUTCOMES] == [0, 0, 0], "there from the beginning"
    assert [recorded.of("reelkeep_retries", cause=c) for c in CAUSES] == [0, 0, 0, 0]
    run.finished({"outcome": "done", "video_s": 1800.0, "answered": 3, "unanswered": 0})
    run.finished({"outcome": "failed", "video_s": 3600.0, "answered": 1, "unanswered": 2})
    run.finished({"outcome": "quarantined", "video_s": 0.0, "answered": 0, "unanswered": 3})
    run.retried("killed")
    run.retried("decode")
    run.retried("killed")
    run.retried("cache")
    assert recorded.of("reelkeep_queue_videos") == 1 and recorded.of("reelkeep_retries", cause="cache") == 1
    assert [recorded.of("reelkeep_videos", outcome=o) for o in OUTCOMES] == [1, 1, 1]
    assert [recorded.of("reelkeep_questions", outcome=o) for o in OUTCOMES] == [4, 2, 3]
    assert recorded.of("reelkeep_video_hours") == 1.5
    assert recorded.of("reelkeep_retries", cause="killed") == 2 and recorded.of("reelkeep_retries", cause="decode") == 1
    engine = EngineMetrics("r1")
    engine.note(Load(tokens=500, seconds=5.0, busy_s=4.0, wait_s=0.5, kv_bytes=1024))
    assert recorded.of("reelkeep_tokens_per_second") == 100
    assert recorded.of("reelkeep_engine_busy_ratio") == 0.8 and recorded.of("reelkeep_decode_wait_ratio") == 0.1
    assert recorded.of("reelkeep_kv_bytes") == 1024
    engine.note(Load(seconds=5.0))
    assert recorded.of("reelkeep_visual_tokens") == 500 and recorded.of("reelkeep_engine_busy_ratio") == 0
    assert {key[0] for key in recorded.values} == {metric.name for metric in METRICS}


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"answers": [{"error": None}, {"error": None}]}, "done"),
        ({"answers": [{"error": None}, {"error": "NaN"}]}, "failed"),
        ({"answers": [{"error": "fetch: gone"}] * 2, "error": "fetch: gone", "retry": True}, "failed"),
        ({"answers": [{"error": "decode: bad"}] * 2, "error": "decode: bad"}, "quarantined"),
    ],
)
def test_an_outcome_is_told_as_the_tables_tell_it(result: dict[str, Any], outcome: str) -> None:
    assert outcome_of(VideoResult("v", "f", memory={}, **result)) == outcome in OUTCOMES


def test_an_engines_time_is_split_to_the_moment_of_asking() -> None:
    now = [0.0]
    meter = LoadMeter(held=lambda: 64, clock=lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    def blocks() -> Iterator[int]:
        for block in range(2):
            passes(3.0)  # decoding
            yield block

    passes(1.0)  # idle
    for _ in meter.over(blocks()):
        meter.took(100)
        passes(2.0)
        if now[0] == 6.0:
            assert meter.sample() == Load(100, seconds=6.0, busy_s=2.0, wait_s=3.0, kv_bytes=64)
    passes(0.5)  # answering
    meter.enter("idle")
    passes(4.5)
    assert meter.sample() == Load(100, seconds=10.0, busy_s=2.5, wait_s=3.0, kv_bytes=0)
    assert meter.sample() == Load() and Load().busy_ratio == Load().tokens_per_s == Load().wait_ratio == 0.0


def test_a_worker_measures_its_load_and_tells_retries(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video = make_video(tmp_path / "clip.mp4", frames=60, fps=10)
    engine = {"model": str(folders["qwen2_5_vl"]), "budget_tokens": 80, "block_tokens": 8, "answer": {"max_new_tokens": 4}}
    config = JobConfig.model_validate({"videos": "v", "questions": "q", "output": str(tmp_path / "out"), "engine": engine})
    retried: list[str] = []
    worker = VideoWorker(config, retried=retried.append)
    reading: list[Load] = []
    keep = worker.retention.keep
    monkeypatch.setattr(worker.retention, "keep", lambda *a: (reading.append(worker.load.sample()), keep(*a))[1])
    task = VideoTask(video_id="clip", uri=str(video), questions=(ManifestQuestion(question_id="q0", question="What is it?"),))
    result = worker(task)
    (load,), after = reading, worker.load.sample()
    assert load.tokens == result.memory["visual_tokens"] and after.tokens == 0
    assert load.kv_bytes == result.memory["kv_peak_bytes"] and after.kv_bytes == 0, "an engine that is idle holds nothing"
    computed_s = result.memory["vision_s"] + result.memory["prefill_s"]
    assert computed_s <= load.busy_s and load.wait_s > 0 and load.busy_s + load.wait_s <= load.seconds
    assert after.busy_s > 0, "answering is work"
    assert retried == []

    failures = [StageError("decode", "the process that decoded it died", lost="reader"), StageError("prefill", "gone", lost="reader")]
    plain = worker.watch
    monkeypatch.setattr(worker, "watch", lambda *a: plain(*a) if not failures else (_ for _ in ()).throw(failures.pop(0)))
    worker(task)
    assert retried == ["decode", "prefill"]
    monkeypatch.setattr(worker.attempts, "begin", lambda name: (2, ""))
    worker(task)
    assert retried[-1] == "killed"


# What is asked for


def rules() -> list[Rule]:
    manifest = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def dashboard_queries(dashboard: dict[str, Any]) -> Iterator[str]:
    """Every expression of a dashboard, its variables' included."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def check(expression: str) -> set[str]:
    """The metrics that an expression asks for.

    Raises:
        ValueError: one of them, or a label, isn't there.
    """
    query = promql.parse(expression.replace("$__rate_interval", "1m"))
    known = {metric.exported_name: {RUN_TAG, *metric.tags} | ADDED_BY_RAY | ADDED_BY_PROMETHEUS for metric in METRICS}
    variable_label = set()
    if expression.startswith("label_values("):  # its second argument is a label
        variable_label = {expression.rpartition(",")[2].strip(" )")}
        for label in variable_label:
            query.metrics.pop(label)
    for name, labels in query.metrics.items():
        if name not in known:
            raise ValueError(f"{name} is not a metric")
        if unknown := labels - known[name]:
            raise ValueError(f"{name} has no label {sorted(unknown)}")
    if unknown := (query.labels | variable_label) - set.intersection(*(known[name] for name in query.metrics)):
        raise ValueError(f"not all of {sorted(query.metrics)} have the label {sorted(unknown)}")
    return set(query.metrics)


def test_the_dashboard_asks_for_every_metric_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = set().union(*map(check, dashboard_queries(dashboard)))
    assert asked == {metric.exported_name for metric in METRICS}
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["description"]
        at = panel["gridPos"]
        tiles = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not tiles & places and at["x"] + at["w"] <= 24, "panels lie on each other"
        places |= tiles
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= promql.parse(target["expr"].replace("$__rate_interval", "1m")).labels | {"NodeAddress", "WorkerId"}


def test_alerts_ask_for_metrics_and_lead_to_the_run_book() -> None:
    found = rules()
    assert [rule["alert"] for rule in found] == ["ReelkeepRunStalled", "ReelkeepVideosFail", "ReelkeepEnginesDie"]
    run_book = (INFRA / "README.md").read_text()
    for rule in found:
        check(rule["expr"])
        (first, *_) = promql.parse(rule["expr"]).metrics
        assert first in {f"ray_reelkeep_{name}" for name in ("queue_videos", "videos", "retries")}, (
            "only a driver's: gone when the run is over"
        )
        assert f"#### {rule['alert']}" in run_book and rule["annotations"]["runbook"] == f"infra/README.md#{rule['alert']}"
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert labels == promql.parse(rule["expr"]).labels


def test_the_run_book_names_every_metric() -> None:
    run_book = (INFRA / "README.md").read_text()
    named = set(re.findall(r"`(ray_reelkeep_\w+)`", run_book))
    assert named == {metric.exported_name for metric in METRICS}


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(expression: str) -> str:
        assert old in expression
        return expression.replace(old, new)

    return change


@pytest.mark.parametrize(
    "change",
    [
        replaced("_videos)", "_vidoes)"),
        replaced("_videos)", "_videos_total)"),
        replaced("ray_reelkeep", "reelkeep"),
        replaced("outcome", "outcomes"),
        replaced("by (run)", "by (runs)"),
        replaced("on (run)", "on (run"),
        replaced("sum by", "summ by"),
        replaced("> 0.2", "> 0.2)"),
        replaced("> 0.2", "; 0.2"),
    ],
)
def test_a_typo_in_an_alert_is_caught(change: Callable[[str], str]) -> None:
    expression = rules()[1]["expr"]
    check(expression)
    with pytest.raises(ValueError, match=r"."):
        check(change(expression))


@pytest.mark.parametrize("change", [replaced("kv_bytes", "kv_byte"), replaced("$run", '$run"} {'), replaced("{run", "{runs")])
def test_a_typo_in_the_dashboard_is_caught(change: Callable[[str], str]) -> None:
    (expression,) = [e for e in dashboard_queries(json.loads(DASHBOARD.read_text())) if "kv_bytes" in e]
    with pytest.raises(ValueError, match=r"."):
        check(change(expression))
    with pytest.raises(ValueError, match="label"):
        check("label_values(ray_reelkeep_queue_videos, rum)")


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("alerts.yaml", "spec.groups.0.rules.0.exprs", "1"),
        ("alerts.yaml", "spec.groups.0.rules.0.for", "30 minutes"),
        ("alerts.yaml", "spec.groups.0.rules.0.annotation", {}),
        ("alerts.yaml", "spec.group", []),
        ("scrape.yaml", "spec.podMetricsEndpoints.0.ports", "metrics"),
        ("scrape.yaml", "spec.podMetricsEndpoint", []),
        ("scrape.yaml", "spec.selector.matchLabel", {}),
    ],
)
def test_a_typo_in_a_manifest_is_caught(file: str, path: str, value: Any) -> None:
    manifest = yaml.safe_load((MONITORING / file).read_text())
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    broken = node = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    for step in parents:
        node = node[int(step) if step.isdigit() else step]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMAS[broken["kind"]])
