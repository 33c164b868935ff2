"""Synthetic pictures: drawn from seeds, cut by the engine's own tiling into exactly their cells, asked where things are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.geometry import FrameGeometry
from jobs import generate
from pipeline.synthetic.dataset import plan_videos
from pipeline.synthetic.draw import FRAME_PX
from pipeline.synthetic.picture import CELL_PX, SIDES, draw_picture, side_of, write_picture
from pipeline.synthetic.questions import PICTURE_KINDS, ask
from pipeline.synthetic.script import Needle, Script, script_with
from pipeline.synthetic.video import draw_frames
from pipeline.synthetic.vocabulary import QUARTERS
from pipeline.video.images import open_image

TILES = FrameGeometry(frames_per_group=1, unit_px=28, fixed_px=FRAME_PX, max_tiles=64)


@pytest.mark.parametrize("side", SIDES)
def test_a_file_is_cut_into_exactly_its_cells_and_a_thumbnail(side: int, tmp_path: Path) -> None:
    script = script_with(np.random.default_rng(side), side * side, shapes=2, digits=1, glitch_share=0.0)
    picture = draw_picture(np.random.default_rng(5), script)
    assert picture.shape == (side * CELL_PX, side * CELL_PX, 3)
    write_picture(str(tmp_path / "picture.jpg"), picture)
    tiles = [group.frames[0].transpose(1, 2, 0) for group in open_image(tmp_path / "picture.jpg", TILES)]
    cells = list(draw_frames(np.random.default_rng(5), script, frames_per_group=1))
    assert len(tiles) == side * side + 1
    apart = np.array([[np.abs(tile.astype(float) - cell).mean() for cell in cells] for tile in tiles[:-1]])
    assert (apart.argmin(axis=1) == np.arange(len(cells))).all()
    assert np.diag(apart).max() < 14


@pytest.mark.parametrize("cells", [0, 1, 5, 50, 81, -4])
def test_what_makes_no_square_is_refused_with_the_remedy(cells: int) -> None:
    with pytest.raises(ConfigError, match=rf"groups={cells}: a picture is a square of cells; use one of 4, 9, 16, 25, 36, 49, 64"):
        side_of(cells)


def test_where_is_asked_about_what_stands_in_a_quarter() -> None:
    def quarters(side: int, *groups: int) -> dict[str, str]:
        script = Script(
            side * side,
            tuple(Needle(g, "red", s) for g, s in zip(groups, ("circle", "star", "ring", "heart"), strict=False)),
            frozenset(),
            frozenset(),
        )
        asked = (ask(np.random.default_rng(i), script, np.zeros(side * side), "where", True) for i in range(60))
        return {q.text: q.answer for q in asked if q is not None and q.options == QUARTERS}

    def where(*answers: str) -> dict[str, str]:
        return {f"Where is the red {s}?": a for s, a in zip(("circle", "star", "ring", "heart"), answers, strict=False)}

    assert quarters(2, 0, 1, 2, 3) == where(*QUARTERS)
    assert quarters(8, 27, 28, 35, 36) == where(*QUARTERS)
    assert quarters(5, 6, 8, 16, 18) == where(*QUARTERS)
    assert quarters(5, 2, 10, 12, 22) == {}, "the middle row and column are in no quarter"


def test_every_quarter_is_asked_for_as_often() -> None:
    answers: Counter[str] = Counter()
    for video in plan_videos(videos=120, groups=36, set_name="pictures-dense", seed=2, kinds=("where",), options=False):
        answers.update(question.answer for _, question in video.questions)
    assert set(answers) == set(QUARTERS) and max(answers.values()) < 1.3 * min(answers.values())


def test_the_same_seed_gives_the_same_files_and_manifest(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        arguments = ["--output", str(tmp_path / name), "--videos", "2", "--groups", "16", "--set", "pictures-dense", "--seed", str(seed)]
        assert generate.main(arguments) == 0
    a, b, c = ((tmp_path / name / "manifest.jsonl").read_text() for name in "abc")
    assert a == b != c
    rows = [json.loads(line) for line in a.splitlines()]
    assert [row["uri"] for row in rows] == ["pictures-dense-16c-s5-0000.jpg", "pictures-dense-16c-s5-0001.jpg"]
    assert {q["question_id"].split("-")[0] for row in rows for q in row["questions"]} == set(PICTURE_KINDS)
    for row in rows:
        assert (tmp_path / "a" / row["uri"]).read_bytes() == (tmp_path / "b" / row["uri"]).read_bytes()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [("--kinds", "colour,when", "'when' is not a kind of the pictures-simple set"), ("--groups", "60", "a picture is a square of cells")],
)
def test_bad_arguments_exit_2_with_one_line(tmp_path: Path, capsys, flag: str, value: str, message: str) -> None:
    assert generate.main(["--output", str(tmp_path), "--set", "pictures-simple", flag, value]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
