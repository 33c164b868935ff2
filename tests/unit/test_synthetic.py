"""The synthetic generator: scripts, questions, drawing, files and manifest."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from jobs import generate
from pipeline.synthetic.dataset import plan_videos
from pipeline.synthetic.draw import FRAME_PX, Background, NeedleSprite
from pipeline.synthetic.natural import NaturalBackground
from pipeline.synthetic.questions import KINDS, ask
from pipeline.synthetic.script import EVENTS, Needle, Script, script_with, write_script
from pipeline.synthetic.video import FILE_FPS, FRAMES_PER_GROUP, GROUP_S, draw_frames, write_video
from pipeline.synthetic.vocabulary import COLOURS, DIGITS, SHAPES, time_range


def script_of(*needles: Needle, groups: int = 100) -> Script:
    return Script(groups, needles, frozenset(), frozenset())


def every_question(script: Script, kind: str, draws: int = 60):
    times_s = np.arange(script.groups) * GROUP_S
    drawn = (ask(np.random.default_rng(i), script, times_s, kind, with_options=True) for i in range(draws))
    return {q.text: q for q in drawn if q is not None}


THREE = script_of(Needle(3, "red", "circle"), Needle(20, "blue", "circle"), Needle(70, "green", "star"), Needle(80, "cyan", "7"))


@pytest.mark.parametrize("set_name", list(EVENTS))
def test_a_set_has_its_events_one_a_group(set_name):
    script = write_script(np.random.default_rng(1), 64, set_name)
    assert (len(script.shapes), len(script.digits)) == EVENTS[set_name]
    places = [n.group for n in script.needles]
    assert places == sorted(set(places)) and max(places) < 64
    assert not script.glitches & set(places)


def test_too_short_a_video_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="groups=5 is too short for the 12 events of the dense set"):
        write_script(np.random.default_rng(0), 5, "dense")


def test_recall_questions_ask_only_about_what_is_unique():
    assert every_question(THREE, "colour").keys() == {"What colour is the star?"}
    answers = {text: q.answer for text, q in every_question(THREE, "shape").items()}
    assert answers == {"Which shape is red?": "circle", "Which shape is blue?": "circle", "Which shape is green?": "star"}
    assert {q.text: q.answer for q in every_question(THREE, "digit").values()} == {"Which digit is cyan?": "7"}


def test_counts_are_counted():
    asked = {text: q.answer for text, q in every_question(THREE, "count", 200).items()}
    assert asked["How many circles are there?"] == "2" and asked["How many stars are there?"] == "1"
    assert asked["How many crosses are there?"] == "0"


def test_order_and_time_follow_the_groups():
    for question in every_question(THREE, "order", 100).values():
        places = {n.name: n.group for n in THREE.shapes}
        latest = "last" in question.text
        assert question.answer == (max if latest else min)(question.options, key=places.__getitem__)
    asked = {text: q.answer for text, q in every_question(THREE, "when").items()}
    assert asked["When does the red circle appear?"] == "before 15 seconds"
    assert asked["When does the green star appear?"] == "1 to 2 minutes"


def test_negatives_of_exists_are_mostly_hard():
    script = write_script(np.random.default_rng(4), 64, "dense")
    there = {(n.colour, n.figure) for n in script.shapes}
    colours, figures = {c for c, _ in there}, {f for _, f in there}
    hard, answers = 0, Counter()
    for i in range(400):
        question = ask(np.random.default_rng(i), script, np.arange(64.0), "exists", with_options=False)
        colour, figure = question.text.rstrip("?").split()[-2:]
        answers[question.answer] += 1
        assert (question.answer == "yes") == ((colour, figure) in there)
        hard += question.answer == "no" and colour in colours and figure in figures
    assert 160 < answers["no"] < 240
    assert hard > 0.5 * answers["no"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(list(KINDS)), shapes=st.integers(0, 10), digits=st.integers(0, 6))
def test_an_answer_is_always_one_of_distinct_options(seed, kind, shapes, digits):
    rng = np.random.default_rng(seed)
    question = ask(rng, script_with(rng, 40, shapes, digits), np.arange(40) * GROUP_S, kind, with_options=True)
    if question is not None:
        assert question.options.count(question.answer) == 1
        assert len(set(question.options)) == len(question.options)


def test_natural_backgrounds_are_colourful_coarse_and_moving():
    def frames(scenery, seed=0):
        background = scenery(np.random.default_rng(seed))
        return np.stack([background.frame() for _ in range(4)])

    def spread(pictures):  # how far a pixel's channels lie apart
        return np.mean([np.ptp(p, axis=-1).mean() for p in pictures])

    natural, plain = ([frames(scenery, seed) for seed in range(12)] for scenery in (NaturalBackground, Background))
    assert spread(natural) > 1.5 * spread(plain)
    assert np.array_equal(natural[0], frames(NaturalBackground)) and not np.array_equal(natural[0][0], natural[0][1])
    rough = [np.abs(np.diff(p, axis=2)).mean() / p.std() for p in natural]
    assert np.mean(rough) < 0.5  # neighbouring pixels are alike, as in photographs


def test_coarse_times_have_their_edges_in_seconds():
    assert [time_range(t) for t in (0, 14.9, 15, 59, 60, 479, 480, 1e6)] == [
        "before 15 seconds",
        "before 15 seconds",
        "15 to 30 seconds",
        "30 to 60 seconds",
        "1 to 2 minutes",
        "4 to 8 minutes",
        "after 8 minutes",
        "after 8 minutes",
    ]


@pytest.mark.parametrize("figure", SHAPES + DIGITS)
def test_a_needle_is_drawn_in_its_colour_and_no_two_figures_alike(figure):
    blank = np.full((FRAME_PX, FRAME_PX, 3), 90.0)
    pictures = {f: NeedleSprite(np.random.default_rng(7), "red", f).over(blank) for f in SHAPES + DIGITS}
    red = np.abs(pictures[figure] - COLOURS["red"]).max(axis=-1) < 30
    assert 60 < red.sum() < 0.6 * FRAME_PX**2
    for other, picture in pictures.items():
        if other != figure:
            assert (np.abs(picture - pictures[figure]).max(axis=-1) > 60).sum() > 15, other


def test_backgrounds_move_and_cut_but_stay_muted():
    background = Background(np.random.default_rng(0))
    first, second = background.frame(), background.frame()
    background.cut()
    third = background.frame()
    assert np.abs(first - second).mean() > 1
    assert np.abs(second - third).mean() > np.abs(first - second).mean()
    for frame in (first, third):
        assert (frame.max(axis=-1) - frame.min(axis=-1)).mean() < 90


def test_a_needle_survives_the_codec_in_its_own_group_only(tmp_path: Path):
    script = script_of(Needle(4, "red", "square"), Needle(7, "white", "3"), groups=10)
    path = tmp_path / "video.mp4"
    write_video(str(path), draw_frames(np.random.default_rng(3), script))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt, stream.average_rate) == ("h264", "yuv420p", FILE_FPS)
        decoded = [(float(f.time), f.to_ndarray(format="rgb24").astype(float)) for f in container.decode(video=0)]
    assert [time for time, _ in decoded] == [i / FILE_FPS for i in range(10 * FRAMES_PER_GROUP)]
    for index, (_, frame) in enumerate(decoded):
        red = (np.abs(frame - COLOURS["red"]).max(axis=-1) < 60).sum()
        assert (red > 150) == (index // FRAMES_PER_GROUP == 4), index


def test_a_long_video_is_never_whole_in_memory(tmp_path: Path):
    alive, most = 0, 0

    def forget():
        nonlocal alive
        alive -= 1

    def watched():
        nonlocal alive, most
        for frame in draw_frames(np.random.default_rng(0), script_of(groups=150)):
            alive += 1
            most = max(most, alive)
            weakref.finalize(frame, forget)
            yield frame

    write_video(str(tmp_path / "video.mp4"), watched())
    assert 1 <= most <= 4


def test_the_same_seed_gives_the_same_files_and_manifest(tmp_path: Path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        arguments = ["--output", str(tmp_path / name), "--videos", "2", "--groups", "14", "--set", "dense", "--seed", str(seed)]
        assert generate.main(arguments) == 0
    a, b, c = ((tmp_path / name / "manifest.jsonl").read_text() for name in "abc")
    assert a == b != c
    for path in (tmp_path / "a").glob("*.mp4"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_the_manifest_has_its_form(tmp_path: Path):
    assert generate.main(["--output", str(tmp_path), "--videos", "3", "--groups", "64", "--questions", "10"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert len({row["video_id"] for row in rows}) == 3
    for row in rows:
        assert row.keys() == {"video_id", "uri", "questions"} and (tmp_path / row["uri"]).is_file()
        assert len({q["question_id"] for q in row["questions"]}) == len(row["questions"]) >= 7
        for question in row["questions"]:
            assert question.keys() - {"options"} == {"question_id", "question", "expected"}
            assert question["expected"] in question.get("options", [question["expected"]])


def test_kinds_and_options_can_be_chosen():
    (video,) = plan_videos(videos=1, groups=64, set_name="dense", seed=1, questions=6, options=True, kinds=("exists", "when"))
    assert {q.kind for _, q in video.questions} == {"exists", "when"}
    assert all(q.options for _, q in video.questions)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--videos", "0", "--videos=0 must be at least 1"),
        ("--kinds", "colour,size", "'size' is not a kind"),
        ("--groups", "3", "too short"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(tmp_path: Path, capsys, flag, value, message):
    assert generate.main(["--output", str(tmp_path), flag, value]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
