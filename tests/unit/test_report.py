"""The run report without a browser: its facts, its charts, and what a hostile text can't do to it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs import report
from jobs.report_page.charts import memory_plot, time_shares
from jobs.report_page.facts import STEPS, read_run
from jobs.report_page.page import script_json, visible
from pipeline.outcome import verdict
from pipeline.storage import Storage
from tests.support.runs import HOSTILE, make_run
from tests.support.videos import make_video


def answer(**values: Any) -> dict[str, Any]:
    return {"error": None, "expected": None, "options": [], "choice": None, "answer": None} | values


@pytest.mark.parametrize(
    ("row", "is_judged"),
    [
        (answer(error="decode: gone", expected="A"), "error"),
        (answer(answer="a lorry"), "open"),
        (answer(answer=" A Lorry ", expected="a lorry"), "right"),
        (answer(answer="a lorry", expected="a car"), "wrong"),
        (answer(options=["red", "blue"], choice="B", expected="blue"), "right"),
        (answer(options=["red", "blue"], choice="B", expected="b"), "right"),
        (answer(options=["red", "blue"], choice="A", expected="B"), "wrong"),
        (answer(options=["B", "A"], choice="A", expected="B"), "right"),  # text goes before letter
    ],
)
def test_a_verdict_follows_the_manifest_rules(row: dict[str, Any], is_judged: str) -> None:
    assert verdict(row) == is_judged


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), videos=40, questions=5)


def test_the_facts_add_up(run: Path) -> None:
    facts = read_run(str(run), Storage(), max_answers=30)
    assert (len(facts.answers), facts.answers_total, len(facts.videos), len(facts.failed)) == (30, 200, 40, 2)
    assert sum(facts.verdicts.values()) == 200 and facts.verdicts["error"] == 10
    right, wrong = facts.verdicts["right"], facts.verdicts["wrong"]
    assert facts.accuracy == pytest.approx(right / (right + wrong)) and right + wrong == 38 * 3
    for video in facts.videos:
        assert video["total_s"] == pytest.approx(sum(video[step] for step in STEPS))
    shares = time_shares(facts)
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert [share.start for share in shares] == sorted(share.start for share in shares)


def test_the_plot_places_what_was_kept_under_a_full_cache(run: Path) -> None:
    plot = memory_plot(read_run(str(run), Storage(), 0).videos)
    assert plot is not None and len(plot.points) == 38 and plot.left_out == 0
    assert all(point.kept_px >= point.full_px for point in plot.points), "a pixel row counts from the top"
    by_length = sorted(plot.points, key=lambda point: point.x_px)
    assert by_length[0].full_px > by_length[-1].full_px, "a full cache grows with the video"
    assert memory_plot([]) is None
    many = [{"video_id": "v", "visual_tokens": 10, "kv_peak_bytes": 10, "kv_full_bytes": 10}] * 4001
    thinned = memory_plot(many)
    assert thinned is not None and len(thinned.points) + thinned.left_out == 4001 and len(thinned.points) <= 2000


class Elements(HTMLParser):
    """Elements and attributes of a page, and the text of its JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.json = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.seen and self.seen[-1] == ("script", {"type": "application/json", "id": "data"}):
            self.json += data


def test_hostile_texts_stay_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {}
    for hostile in (False, True):
        output = make_run(tmp_path / str(hostile), videos=40, questions=5, hostile=hostile)
        assert report.main([str(output)]) == report.WRITTEN
        pages[hostile] = Elements()
        pages[hostile].feed((output / "report.html").read_text(encoding="utf-8"))
    calm, hostile_page = pages[False], pages[True]
    assert [tag for tag, _ in calm.seen] == [tag for tag, _ in hostile_page.seen], "no text became an element"
    assert {name for _, attributes in hostile_page.seen for name in attributes if name.startswith("on")} == set()
    assert [attributes for tag, attributes in hostile_page.seen if tag in ("script", "link", "iframe", "object")] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    data = json.loads(hostile_page.json)
    shown = [visible(text) for text in HOSTILE]
    assert all(any(text in row["question"] for row in data["answers"]) for text in shown), "to the last character"
    assert not re.search("[\u202a-\u202e\u0007\x1b]", (output / "report.html").read_text(encoding="utf-8")), "no text looks like another"


def test_json_in_a_script_element_can_not_leave_it() -> None:
    value = {"a</script>": ["<!--", "]]>", "&lt;", "\u2028\u2029", "'\"\\"]}
    text = script_json(value)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == value


def test_the_page_allows_its_own_script_and_style_alone(run: Path) -> None:
    assert report.main([str(run)]) == report.WRITTEN
    page = (run / "report.html").read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy and "default-src 'none'" in policy[1].replace("&#39;", "'") and "unsafe" not in policy[1]
    assert not re.search(r'(src|href)="', page) and " style=" not in page and "@import" not in page


def test_thumbnails_come_from_the_videos_and_are_missed_by_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        make_video(tmp_path / f"{number}.mp4", frames=10)
    output = make_run(tmp_path / "run", videos=3, questions=1, uri=f"{tmp_path}/{{}}.mp4")
    assert report.main([str(output), "--thumbnails", "3"]) == report.WRITTEN
    elements = Elements()
    elements.feed((output / "report.html").read_text(encoding="utf-8"))
    pictures = json.loads(elements.json)["thumbnails"]
    assert set(pictures) == {"camera0/0000", "camera1/0001"}
    assert all(uri.startswith("data:image/jpeg;base64,/9j/") for uri in pictures.values())
    assert "no thumbnail" in capsys.readouterr().err


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == report.UNUSABLE
    error = capsys.readouterr().err.strip()
    assert "holds no run.json" in error and len(error.splitlines()) == 1
    (tmp_path / "run.json").write_text("{")
    assert report.main([str(tmp_path)]) == report.UNUSABLE
    assert "isn't valid" in capsys.readouterr().err


def test_a_run_in_which_nothing_was_answered_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = make_run(tmp_path / "run", videos=0, questions=1)
    assert report.main([str(output), "--output", str(tmp_path / "page.html")]) == report.WRITTEN
    assert "No video was watched." in (tmp_path / "page.html").read_text(encoding="utf-8")
