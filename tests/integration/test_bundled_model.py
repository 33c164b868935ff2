"""The shipped tiny model: its files, its accuracy on fresh real files, and the training that made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from engine import Engine
from jobs import train_bundled
from jobs.bundled_training.bank import COLOUR_NAMES, FIGURES, build_bank
from jobs.bundled_training.evaluate import evaluate_bundle
from jobs.bundled_training.language_stage import logits_at
from jobs.bundled_training.lessons import RECALL, FeatureBank, draw_lesson, expected_reply, question_prompt, what_to_look_up
from jobs.bundled_training.qwen2_5_vl import GROUP_TOKENS, QWEN2_5_VL, build_model, encode_groups, patches
from jobs.bundled_training.tokenizer import SPECIAL, build_tokenizer
from pipeline.synthetic.dataset import plan_videos
from pipeline.synthetic.draw import FRAME_PX
from pipeline.synthetic.questions import KINDS, ask
from pipeline.synthetic.script import Needle, Script
from tests.support.recall import share_right

BUNDLE = QWEN2_5_VL.bundle


@pytest.fixture(scope="module")
def model():
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(BUNDLE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(BUNDLE)


@pytest.fixture(scope="module")
def tiny_bank():
    """Features that name what they show, so that no vision tower is needed."""
    rng = np.random.default_rng(0)
    bank = build_bank(QWEN2_5_VL, 3, 600)
    names = torch.from_numpy(rng.normal(size=(len(COLOUR_NAMES) + 1, len(FIGURES) + 1, 128)).astype(np.float32))
    features = names[bank.colour, bank.figure][:, None].expand(-1, GROUP_TOKENS, -1).contiguous()
    index = FeatureBank.from_groups(bank, features)
    empty = [pair for pair, rows in index.needles.items() if not len(rows)]
    return FeatureBank(features, index.needles | dict.fromkeys(empty, np.array([0])), index.backgrounds, index.glitches)


def test_the_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in BUNDLE.iterdir()}
    assert sum(files.values()) <= 6_000_000
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
    } <= files.keys()


def test_weights_are_stored_in_half_precision():
    stored = Qwen2_5_VLForConditionalGeneration.from_pretrained(BUNDLE, dtype="auto")
    assert {parameter.dtype for parameter in stored.parameters()} == {torch.float16}


def test_the_processor_leaves_frames_as_they_are(processor):
    assert isinstance(processor, Qwen2_5_VLProcessor)
    frames = torch.randint(0, 256, (6, 3, FRAME_PX, FRAME_PX), dtype=torch.uint8)
    made = processor.video_processor(videos=[frames], return_tensors="pt")
    assert made["video_grid_thw"].tolist() == [[3, 4, 4]]
    grouped = frames.permute(0, 2, 3, 1).reshape(3, 2, FRAME_PX, FRAME_PX, 3)
    torch.testing.assert_close(made["pixel_values_videos"], patches(grouped).flatten(0, 1))


def test_the_chat_template_gives_the_trained_prompt(processor):
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Which shape is red?"}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tail = "<|vision_end|>Which shape is red?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == QWEN2_5_VL.prefix + "<|video_pad|>" + tail


def test_every_word_of_every_question_is_known():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLE)
    for set_name in ("simple", "dense"):
        for video in plan_videos(videos=30, groups=600, set_name=set_name, seed=3, questions=14):
            for _, question in video.questions:
                for text in (question_prompt(QWEN2_5_VL, question), expected_reply(question)):
                    assert tokenizer.unk_token_id not in tokenizer(text).input_ids, text
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        assert len(tokenizer(letter).input_ids) == 1
    assert tokenizer.decode(tokenizer("red circle").input_ids) == "red circle"
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(len(SPECIAL))] == list(SPECIAL)


def test_groups_encoded_together_or_alone_have_the_same_features(model):
    bank = build_bank(QWEN2_5_VL, 11, 60)
    cut = patches(bank.frames[:9])
    with torch.no_grad():
        grid = torch.tensor([[9, 4, 4]])
        together = torch.cat(model.get_video_features(cut.flatten(0, 1), grid, return_dict=True).pooler_output).view(9, GROUP_TOKENS, -1)
        for group in range(9):
            one = model.get_video_features(cut[group], torch.tensor([[1, 4, 4]]), return_dict=True).pooler_output
            torch.testing.assert_close(torch.cat(one), together[group], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(encode_groups(model, cut), together, atol=1e-5, rtol=1e-4)


def test_packed_questions_read_as_if_asked_alone(tiny_bank):
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=1).eval()
    rng = np.random.default_rng(2)
    lesson = draw_lesson(rng, QWEN2_5_VL, tiny_bank, tokenizer, groups=8, videos=2, questions=3, with_options=True)
    language, embed = model.model.language_model, model.get_input_embeddings()
    common = len(lesson.prefix) + lesson.features.shape[1]
    width = lesson.questions.shape[2]
    with torch.no_grad():
        packed, _ = logits_at(model, lesson, lesson.targets != -100)
        alone = []
        for video, asked in enumerate(lesson.asked):
            for index in range(len(asked)):
                embedded = torch.cat([embed(lesson.prefix), lesson.features[video], embed(lesson.questions[video, index])])[None]
                own = slice(common + index * width, common + (index + 1) * width)
                positions = torch.cat([lesson.positions[:, video, :common], lesson.positions[:, video, own]], dim=1)[:, None]
                hidden = language(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state[0, common:]
                alone.append(model.lm_head(hidden[lesson.targets[video, index] != -100]))
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_what_an_early_layer_is_to_find():
    needles = (Needle(1, "red", "circle"), Needle(2, "blue", "circle"), Needle(3, "green", "star"), Needle(4, "red", "7"))
    script = Script(8, needles, frozenset(), frozenset())
    rng, seen = np.random.default_rng(0), set()
    for kind in 200 * ["colour", "shape", "digit", "exists", "count"]:
        question = ask(rng, script, np.arange(8.0), kind, with_options=False)
        assert question is not None
        found = what_to_look_up(question, script)
        if kind == "exists":
            colour, figure = next((c, f) for c in COLOUR_NAMES for f in FIGURES if f"{c} {f}?" in question.text)
            expected = colour if question.answer == "yes" else {"star": "green"}.get(figure)
        else:
            expected = None if kind == "count" else question.answer
        assert found == expected, question
        seen.add((kind, question.answer, found is None))
    assert {("exists", "yes", False), ("exists", "no", False), ("exists", "no", True)} <= seen


def test_a_training_run_continues_where_it_stopped(tmp_path: Path, capsys):
    def run(work: str, output: str, steps: str, seed: str = "0") -> int:
        sizes = ["--bank-groups", "2400", "--vision-steps", "2", "--language-steps", steps, "--threads", "1", "--seed", seed]
        return train_bundled.main(["train", "--work", str(tmp_path / work), "--output", str(tmp_path / output), *sizes])

    def said() -> str:
        return capsys.readouterr().err

    def mark(name: str, weight: str, value: float) -> None:
        saved = torch.load(tmp_path / "work" / name, weights_only=True)
        (saved["state"]["model"] if name == "language.pt" else saved["state"])[weight].fill_(value)
        torch.save(saved, tmp_path / "work" / name)

    assert run("work", "first", "2") == 0
    mark("language.pt", "model.language_model.norm.weight", 7)
    assert run("work", "second", "4") == 0
    continued = torch.load(tmp_path / "work" / "language.pt", weights_only=True)["state"]
    norm = continued["model"]["model.language_model.norm.weight"]
    assert continued["progress"]["step"] == 4
    assert not (norm == 7).all() and torch.allclose(norm, torch.tensor(7.0), atol=0.1), "it must go on from the saved weights"
    assert run("work", "third", "3") == 2
    assert "has come to step 4 already; give at least as many" in said()

    (tmp_path / "work" / "language.pt").unlink()
    mark("vision.pt", "merger.mlp.0.bias", 3)
    assert run("work", "fourth", "2") == 0
    fourth = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "fourth")
    assert (fourth.model.visual.merger.mlp[0].bias == 3).all(), "the vision stage must be the saved one"

    assert run("work", "fifth", "4", seed="1") == 2
    assert "holds a training with --seed=0, not 1; give another folder" in said()
    (tmp_path / "work" / "vision.pt").unlink()
    assert run("work", "fifth", "4", seed="1") == 2, "language.pt alone is another seed's too"
    for broken in (b"", b"junk\n"):
        (tmp_path / "work" / "language.pt").write_bytes(broken)
        assert run("work", "fifth", "4") == 2
        assert "language.pt is damaged or of an older version" in said()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["train", "--bank-groups", "10"], "'10' must be a whole number of at least 2400"),
        (["train", "--seed", "-1"], "'-1' must be a whole number of at least 0"),
        (["evaluate", "--groups", "64,x"], "'64,x' must be whole numbers above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options, complaint, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_bundled.main(options)
    assert complaint in capsys.readouterr().err


def test_a_training_that_is_stopped_says_how_to_go_on(tmp_path: Path, monkeypatch, capsys):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_bundled, "build_bank", stop)
    assert train_bundled.main(["train", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_work_folder_that_is_a_file_is_named(tmp_path: Path, capsys):
    (tmp_path / "work").write_text("")
    assert train_bundled.main(["train", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]) == 2
    assert "--work and --output must be folders" in capsys.readouterr().err


@pytest.mark.parametrize("set_name", ["simple", "dense", "natural"])
def test_recall_on_fresh_files(set_name):
    found = evaluate_bundle(BUNDLE, set_name=set_name, groups=64, videos=10, seed=4242)
    free_form = [tally for tally in found if tally.form == "words"]
    assert {tally.kind for tally in free_form} == set(KINDS)
    recall = [tally for tally in free_form if tally.kind in RECALL]
    asked, right = sum(t.questions for t in recall), sum(t.right for t in recall)
    assert asked >= 30 and right >= 0.93 * asked, recall


def test_recall_needs_the_right_frames(tmp_path: Path):
    """Questions put to another video's frames must mostly fail: the model reads pictures, not question statistics."""
    engine = Engine.load(BUNDLE, policy="full", dtype="float32", device="cpu")
    kinds = ("colour", "shape", "digit")
    videos = list(plan_videos(videos=8, groups=64, set_name="dense", seed=99, questions=9, options=False, kinds=kinds))
    paths = [video.write(tmp_path) for video in videos]
    assert share_right(engine, videos, paths) > 0.85 and share_right(engine, videos, paths[1:] + paths[:1]) < 0.5


def test_evaluating_a_folder_without_a_model_says_what_to_do(tmp_path: Path, capsys):
    assert train_bundled.main(["evaluate", "--model", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err
