"""The tiny InternVL: what it is trained on is what the engine gives it; and the shipped weights answer about fresh pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, InternVLForConditionalGeneration

from engine import Engine, Question
from engine.config import EngineConfig
from engine.geometry import FrameGeometry
from engine.models import load_adapter
from jobs import study, train_bundled
from jobs.bundled_training.bank import NOTHING_COLOUR, build_bank
from jobs.bundled_training.evaluate import evaluate_bundle
from jobs.bundled_training.internvl import INTERNVL, MAX_TILES, TILE_TOKENS
from jobs.bundled_training.language_stage import logits_at
from jobs.bundled_training.lessons import RECALL, FeatureBank, draw_lesson, expected_reply, question_prompt
from jobs.bundled_training.thumbnails import Thumbnails, parts_named
from jobs.studying.cells import grid
from jobs.studying.trial import Laboratory
from pipeline.synthetic.dataset import plan_videos
from pipeline.synthetic.draw import FRAME_PX
from pipeline.synthetic.questions import PICTURE_KINDS
from pipeline.video.images import open_image
from tests.support.recall import share_right


@pytest.fixture(scope="module")
def untrained():
    model = INTERNVL.build_model(INTERNVL.build_tokenizer(), seed=4).eval()
    with torch.no_grad():  # so that places within a tile and the tile as a whole tell
        for parameter in (model.model.vision_tower.embeddings.position_embeddings, model.model.vision_tower.embeddings.cls_token):
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def folder(untrained, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("internvl")
    INTERNVL.save(untrained, INTERNVL.build_tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def bank():
    return build_bank(INTERNVL, 3, 2 * MAX_TILES)


@pytest.fixture(scope="module")
def feature_bank(untrained, bank):
    """Two pictures aren't enough for every needle: any tile stands for those that are missing."""
    with torch.no_grad():
        features = INTERNVL.encode(untrained, bank.frames)
    thumbnails = Thumbnails(bank.frames).features(lambda frames: INTERNVL.encode(untrained, frames))
    made = FeatureBank.from_groups(bank, features, thumbnails)
    needles = {pair: rows if len(rows) else np.array([0]) for pair, rows in made.needles.items()}
    return FeatureBank(features, needles, made.backgrounds, made.glitches, thumbnails)


def question_of(kind: str, options: bool):
    videos = plan_videos(videos=9, groups=16, set_name="pictures-simple", seed=1, kinds=(kind,), options=options)
    return next(question for video in videos for _, question in video.questions)


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("kind", ["colour", "where"])
def test_training_reads_token_for_token_what_the_engine_reads(folder, bank, feature_bank, kind, options) -> None:
    tokenizer = INTERNVL.build_tokenizer()
    question = question_of(kind, options)
    adapter = load_adapter(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
    before = adapter.tokenize(adapter.prompt_parts()[0] + adapter.opening_text(adapter.processor, "image"), special=True)
    after = adapter.tokenize(adapter.close_text("image"), special=True) + adapter.question_ids(Question(question.text, question.options))
    assert tokenizer(INTERNVL.prefix).input_ids == before
    assert tokenizer(question_prompt(INTERNVL, question)).input_ids == after
    assert tokenizer.unk_token_id not in [*before, *after, *tokenizer(expected_reply(question)).input_ids]


def test_training_and_the_engine_choose_the_same_options(folder, untrained, tmp_path: Path) -> None:
    """The language model over features and positions as in training, against the engine's own reading of the file."""
    engine, tokenizer = Engine.load(folder, policy="full", dtype="float32", device="cpu"), INTERNVL.build_tokenizer()
    (video,) = plan_videos(videos=1, groups=16, set_name="pictures-dense", seed=6, questions=10, options=True)
    source = open_image(video.write(tmp_path), engine.geometry)
    assert source.predicted_groups() == 17
    tiles = torch.from_numpy(np.stack([group.frames for group in source])).permute(0, 1, 3, 4, 2)
    model = InternVLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    prefix, embed = tokenizer(INTERNVL.prefix).input_ids, model.get_input_embeddings()
    visual = torch.from_numpy(INTERNVL.positions(np.zeros(16), start=len(prefix)))[0]
    chosen = []
    for _, question in video.questions:
        asked = tokenizer(question_prompt(INTERNVL, question)).input_ids
        positions = torch.cat([torch.arange(len(prefix)), visual, visual.max() + 1 + torch.arange(len(asked))])
        with torch.no_grad():
            features = INTERNVL.encode(model, tiles).flatten(0, 1)
            embedded = torch.cat([embed(torch.tensor(prefix)), features, embed(torch.tensor(asked))])[None]
            logits = model(inputs_embeds=embedded, position_ids=positions[None], use_cache=False).logits[0, -1]
        letters = tokenizer.convert_tokens_to_ids(list("ABCD"[: len(question.options)]))
        chosen.append(question.options[int(logits[letters].argmax())])
    answers = engine.answer(engine.prefill(source.blocks(40)), [Question(q.text, q.options) for _, q in video.questions])
    assert [answer.text for answer in answers] == chosen and len(set(chosen)) > 2


def test_tiles_encoded_together_or_by_the_model_alone_have_the_same_features(untrained, bank) -> None:
    processor = INTERNVL.build_processor(INTERNVL.build_tokenizer())
    tiles = bank.frames[:9]
    pixels = processor.image_processor(images=list(tiles[:, 0].permute(0, 3, 1, 2)), crop_to_patches=False, return_tensors="pt")
    with torch.no_grad():
        together = INTERNVL.encode(untrained, tiles)
        for tile in range(9):
            alone = untrained.model.get_image_features(pixel_values=pixels["pixel_values"][tile : tile + 1]).pooler_output
            torch.testing.assert_close(alone[0], together[tile], atol=1e-5, rtol=1e-4)
    assert together.shape == (9, TILE_TOKENS, 128) and together.std(dim=0).min() > 1e-3


def test_a_bank_holds_the_cells_of_its_pictures(bank) -> None:
    assert bank.frames.shape == (2 * MAX_TILES, 1, FRAME_PX, FRAME_PX, 3) and bank.frames.dtype == torch.uint8
    assert (bank.colour != NOTHING_COLOUR).sum() == 2 * 40
    again = build_bank(INTERNVL, 3, 2 * MAX_TILES)
    assert torch.equal(bank.frames, again.frames) and torch.equal(bank.figure, again.figure)


def test_a_thumbnail_in_training_looks_like_the_files(bank, tmp_path: Path) -> None:
    whole = bank.frames[:MAX_TILES, 0].view(8, 8, FRAME_PX, FRAME_PX, 3).permute(0, 2, 1, 3, 4).reshape(8 * FRAME_PX, 8 * FRAME_PX, 3)
    Image.fromarray(whole.numpy()).save(tmp_path / "picture.png")
    geometry = FrameGeometry(frames_per_group=1, unit_px=28, fixed_px=FRAME_PX, max_tiles=MAX_TILES)
    *_, last = open_image(tmp_path / "picture.png", geometry)
    (made,) = Thumbnails(bank.frames)(torch.arange(MAX_TILES)[None])
    assert np.abs(made[0].numpy() - last.frames[0].transpose(1, 2, 0)).mean() < 2


def test_a_thumbnails_tokens_name_what_is_in_their_part() -> None:
    nothing = 3
    even = torch.tensor([[0, 3, 3, 3, 3, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2]])
    assert parts_named(even, nothing)[0].tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]]
    odd = torch.tensor([[0, 1, 3, 3, 3, 3, 3, 3, 3]])
    shares = parts_named(odd, nothing)[0]
    torch.testing.assert_close(shares[0], torch.tensor([2 / 3, 1 / 3, 0, 0]))
    assert shares[1].tolist() == [0, 1, 0, 0], "the cell on the border is in both parts"


def test_packed_questions_read_as_if_asked_alone(untrained, feature_bank) -> None:
    tokenizer = INTERNVL.build_tokenizer()
    lesson = draw_lesson(np.random.default_rng(2), INTERNVL, feature_bank, tokenizer, groups=9, videos=2, questions=3, with_options=True)
    assert lesson.features.shape == (2, 10 * TILE_TOKENS, 128), "nine cells and the thumbnail"
    language, embed = untrained.model.language_model, untrained.get_input_embeddings()
    common, width = len(lesson.prefix) + lesson.features.shape[1], lesson.questions.shape[2]
    with torch.no_grad():
        packed, _ = logits_at(untrained, lesson, lesson.targets != -100)
        alone = []
        for picture, asked in enumerate(lesson.asked):
            for index in range(len(asked)):
                embedded = torch.cat([embed(lesson.prefix), lesson.features[picture], embed(lesson.questions[picture, index])])[None]
                own = slice(common + index * width, common + (index + 1) * width)
                positions = torch.cat([lesson.positions[:, picture, :common], lesson.positions[:, picture, own]], dim=1)
                # Told of no mask, transformers takes the gap in front of the options for the start of another sequence.
                causal = {"full_attention": None}
                out = language(inputs_embeds=embedded, position_ids=positions, attention_mask=causal, use_cache=False)
                hidden = out.last_hidden_state[0, common:]
                alone.append(untrained.lm_head(hidden[lesson.targets[picture, index] != -100]))
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_the_hints_of_options_stand_at_their_last_words(feature_bank) -> None:
    tokenizer = INTERNVL.build_tokenizer()
    lesson = draw_lesson(np.random.default_rng(5), INTERNVL, feature_bank, tokenizer, groups=16, videos=4, questions=4, with_options=True)
    newline, no = tokenizer.convert_tokens_to_ids(["\n", "no"])
    for picture, asked in enumerate(lesson.asked):
        for index, question in enumerate(asked):
            ids, hints = lesson.questions[picture, index], lesson.hints[picture, index]
            ends = [
                i
                for i in range(len(ids) - 1)
                if ids[i + 1] == newline and hints[i] != -100 and ids[i] != tokenizer.convert_tokens_to_ids("?")
            ]
            assert len(ends) == len(question.options)
            letters = [hints[end].item() for end in ends]
            assert letters.count(no) == len(ends) - 1
            assert tokenizer.decode(letters[question.options.index(question.answer)]) == expected_reply(question)


def test_both_commands_run_and_a_saved_folder_opens_everywhere(tmp_path: Path, capsys) -> None:
    sizes = ["--bank-groups", "2560", "--vision-steps", "2", "--language-steps", "2", "--threads", "1"]
    where = ["--architecture", "internvl", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    assert train_bundled.main(["train", *where, *sizes]) == 0
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(model).__name__ == "InternVLForConditionalGeneration" and model.dtype == torch.float16
    assert type(AutoProcessor.from_pretrained(tmp_path / "out")).__name__ == "InternVLProcessor"
    capsys.readouterr()
    options = ["--model", str(tmp_path / "out"), "--sets", "pictures-simple", "--groups", "4", "--videos", "2"]
    assert train_bundled.main(["evaluate", "--architecture", "internvl", *options]) == 0
    shown = capsys.readouterr().out
    assert "pictures-simple     4 groups  where" in shown
    assert train_bundled.main(["evaluate", "--architecture", "internvl", "--model", str(tmp_path / "out"), "--sets", "dense"]) == 2
    assert "'dense' is not a set of internvl" in capsys.readouterr().err


def test_policies_are_compared_on_pictures_too(folder, tmp_path: Path, capsys) -> None:
    options = ["--set", "pictures-simple", "--groups", "16", "--kinds", "shape,where", "--questions", "6", "--budgets", "8", "--json"]
    arguments = ["--model", str(folder), "--output", str(tmp_path), "--policies", "full,keydiff,snapkv,uniform", *options]
    assert study.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["policy"] for row in rows] == ["full", "keydiff", "snapkv", "uniform"]
    assert rows[0]["events_kept"] == 100 and {row["questions"] for row in rows} == {rows[0]["questions"]}
    assert all(row["share"] == pytest.approx(100 * 8 / 68) for row in rows[1:]), "sixteen cells and the thumbnail"
    laboratory = Laboratory(load_adapter(EngineConfig(model=str(folder))), "image")
    (cell,) = grid(["keydiff"], [8], [4], ["during"], ["group"])
    assert laboratory.engine(cell, 4).new_cache().budget_tokens == 8 + 4, (
        "beyond the prompt's three tokens and the one that opens the image"
    )
    assert rows[1]["kv_peak_bytes"] < 0.6 * rows[0]["kv_peak_bytes"]
    assert study.main([*arguments, "--kinds", "when"]) == 2
    assert "'when' is not a kind of the pictures-simple set" in capsys.readouterr().err


def test_the_shipped_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in INTERNVL.bundle.iterdir()}
    assert files["model.safetensors"] <= 3_000_000
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "processor_config.json",
        "README.md",
    } <= files.keys()
    assert {p.dtype for p in AutoModelForImageTextToText.from_pretrained(INTERNVL.bundle, dtype="auto").parameters()} == {torch.float16}


@pytest.mark.parametrize(("set_name", "cells"), [("pictures-simple", 16), ("pictures-dense", 64)])
def test_recall_on_fresh_files(set_name: str, cells: int) -> None:
    found = evaluate_bundle(INTERNVL.bundle, set_name=set_name, groups=cells, videos=12, seed=4242)
    assert {tally.kind for tally in found} == set(PICTURE_KINDS) and {tally.form for tally in found} == {"words", "options"}
    recall = [tally for tally in found if tally.form == "words" and tally.kind in RECALL]
    asked, right = sum(t.questions for t in recall), sum(t.right for t in recall)
    assert asked >= 30 and right >= 0.85 * asked, recall


def test_recall_needs_the_right_picture(tmp_path: Path) -> None:
    """Questions put to another picture must mostly fail: the model reads pictures, not question statistics."""
    engine = Engine.load(INTERNVL.bundle, policy="full", dtype="float32", device="cpu")
    kinds = ("colour", "shape", "digit")
    pictures = list(plan_videos(videos=8, groups=36, set_name="pictures-dense", seed=99, questions=8, options=False, kinds=kinds))
    paths = [picture.write(tmp_path) for picture in pictures]
    assert share_right(engine, pictures, paths) > 0.8 and share_right(engine, pictures, paths[1:] + paths[:1]) < 0.5
