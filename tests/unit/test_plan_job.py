"""The planner: its sizes against measured bytes of real models of both architectures, its sums by hand, its complaints."""

from __future__ import annotations

import gc
import json
import math
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, InternVLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from engine import Engine, EngineConfig
from engine.blocks import BlockPlanner
from engine.footprint import BUNDLED, PUBLISHED, read_footprint
from engine.geometry import FrameGeometry
from engine.models import load_geometry
from engine.policies import make_policy
from jobs import plan as job
from pipeline import manifest as manifests
from pipeline.capacity import QUERY_AWARE, UNBOUNDED, USABLE_SHARE, Archive, Clip, clip_of, hours_of_video, memory_of
from pipeline.config import JobConfig
from pipeline.manifest import Manifest
from pipeline.task import ManifestQuestion, VideoTask
from tests.support.live_bytes import LiveBytes
from tests.support.prompts import Media, make_media, stream
from tests.support.runs import make_run
from tests.support.videos import make_video

ROOT = Path(__file__).parents[2]
GROUPS = 20
QUESTIONS = ["what is on the picture?"] * 3
SEVEN_B = "Qwen/Qwen2.5-VL-7B-Instruct"


def config(**sections: Any) -> JobConfig:
    return JobConfig.model_validate({"manifest": "m", "output": "o"} | sections)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON of a plan."""
    assert job.main([*argv, "--json"]) == 0, capsys.readouterr().err
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def wide(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose hidden sizes outweigh pixels, as real ones' do; the tiny ones' don't."""
    made = {}
    for family, source in folders.items():
        made[family] = tmp_path_factory.mktemp("wide") / family
        shutil.copytree(source, made[family])
        sizes = AutoConfig.from_pretrained(source)
        text, vision = sizes.text_config, sizes.vision_config
        text.hidden_size, text.intermediate_size, vision.hidden_size, vision.intermediate_size = 256, 1024, 640, 1720
        if family == "qwen2_5_vl":
            text.rope_parameters["mrope_section"], vision.num_heads, vision.out_hidden_size = [8, 12, 12], 8, 256
            model: Any = Qwen2_5_VLForConditionalGeneration(sizes)
        else:
            model = InternVLForConditionalGeneration(sizes)
        model.save_pretrained(made[family])
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl3_5"])
@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_memory_is_what_was_measured(
    size: str, family: str, dtype: str, folders: dict[str, Path], wide: dict[str, Path], tmp_path: Path
) -> None:
    """Parameters and stored caches to the byte, keys and values to the block, what is alive besides within a third from above."""
    folder = str((folders if size == "tiny" else wide)[family])
    memory = {"model": folder, "device": "cpu", "dtype": dtype, "budget_tokens": 80, "block_tokens": 48, "answer": {"max_new_tokens": 8}}
    engine, model = Engine.load(EngineConfig.model_validate(memory)), read_footprint(folder)
    (media,) = items = make_media(engine, "v", groups=GROUPS)
    assert isinstance(media, Media)
    group = model.geometry.group_tokens(*media.frames.shape[-2:])
    archive = Archive((Clip(20.0, group, GROUPS * group),), len(QUESTIONS))
    settings = config(engine=memory)
    predicted = memory_of(settings, model, archive, 48)
    parameters = list(engine.adapter.model.parameters())
    gc.collect()
    with LiveBytes([*parameters, *engine.adapter.model.buffers()]) as live:
        kept = engine.prefill(stream(engine, items))
        reading, live.peak = live.peak, live.now
        answers = engine.answer(kept, QUESTIONS)
        answering = live.peak

    assert predicted.weights == sum(p.numel() * p.element_size() for p in parameters)
    assert kept.trace.kv_peak_bytes <= predicted.kv_peak <= 1.03 * kept.trace.kv_peak_bytes
    cache = predicted.kv_peak + predicted.descriptions
    bound = cache + max(predicted.vision, predicted.language)
    assert reading <= bound <= 1.4 * reading
    element = 4 if dtype == "float32" else 2
    asked = model.answering_bytes(len(QUESTIONS), answers[0].prompt_tokens, settings.engine.answer.max_new_tokens, element)
    assert answering <= cache + asked <= 2 * answering
    kept.save(tmp_path / "cache.safetensors")
    with safe_open(tmp_path / "cache.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert stored == job.plan(settings, model, archive, gpu_bytes=1e9, gpus=1, speed=None, price_per_hour=None).cache_bytes


def test_published_sizes_give_the_published_weights() -> None:
    """Bytes are `total_size` in each checkpoint's model.safetensors.index.json; the bundled model's are counted in its file."""
    published = {
        SEVEN_B: 16_584_333_312,
        "Qwen/Qwen2.5-VL-3B-Instruct": 7_509_245_952,
        "Qwen/Qwen2.5-VL-32B-Instruct": 66_905_436_672,
        "OpenGVLab/InternVL3_5-8B-HF": 17_056_636_928,
    }
    assert set(json.loads(PUBLISHED.read_text())["models"]) == set(published)
    for name, weights_bytes in published.items():
        assert 2 * read_footprint(name).parameters == weights_bytes
    assert read_footprint("internvl3_5-8b") == read_footprint("OpenGVLab/InternVL3_5-8B-HF")
    with safe_open(BUNDLED / "model.safetensors", "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert read_footprint("bundled").parameters == stored


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl3_5", "bundled"])
def test_frame_rules_are_the_processors(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    def same(model: str) -> None:
        ours, theirs = read_footprint(model).geometry, load_geometry(EngineConfig(model=model))
        for name in ("frames_per_group", "unit_px", "min_px", "max_px", "fixed_px", "group_text_tokens"):
            assert getattr(ours, name) == getattr(theirs, name), name

    same("bundled" if family == "bundled" else str(folders[family]))
    if family == "qwen2_5_vl":  # a checkpoint as the hub has it: one older file, with areas under other names
        shutil.copytree(folders[family], tmp_path / "hub")
        (tmp_path / "hub" / "processor_config.json").unlink()
        older = {"min_pixels": 3136, "max_pixels": 12845056, "image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2}
        (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(older | {"processor_class": "Qwen2_5_VLProcessor"}))
        same(str(tmp_path / "hub"))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(3136, 12544), (3136, 12_845_056), (100_352, 602_112)]))
@example(1, 5000, (3136, 12544))
def test_frames_are_sized_as_transformers_sizes_them(height: int, width: int, bounds: tuple[int, int]) -> None:
    geometry = FrameGeometry(2, 28, *bounds)
    try:
        expected = smart_resize(height, width, 28, *bounds)
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratio"):
            geometry.target_size(height, width)
        return
    assert geometry.target_size(height, width) == expected


def test_ten_thousand_hours_are_planned_in_under_a_second_without_torch() -> None:
    code = f"""
import sys
from jobs.plan import main
code = main(["--hours", "10000", "--fps", "1", "--model", "{SEVEN_B}", "--gpu-memory-gb", "80", "--json"])
assert not {{"torch", "transformers", "ray", "boto3", "av"}} & set(sys.modules), "slow imports"
sys.exit(code)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time, since other tests may be at work at the same time.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    planned = json.loads(done.stdout.splitlines()[-1])
    # 1280 x 720 becomes 1288 x 728 px, 46 x 26 tokens for each two seconds.
    assert planned["group_tokens"] == 46 * 26
    assert planned["visual_tokens"] == 10_000 * 1800 * 46 * 26
    assert planned["kv_peak_bytes"] == 57_344 * 1024 + 57_344 // 28 * 46 * 26
    assert planned["fits"] is True and planned["actors_per_gpu"] == 3
    assert planned["gpu_hours"] is planned["cost"] is None and "--tokens-per-second" in planned["notes"][-1]


def test_time_storage_and_cost_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--model", SEVEN_B, "--hours", "100.5", "--video-minutes", "30", "--frame-size", "560x280", "--fps", "0.5"]
    plan += ["--tokens-per-second", "2000", "--gpus", "4", "--price-per-gpu-hour", "3", "--budget-tokens", "2048"]
    found = run(capsys, *plan)
    tokens = 201 * 450 * 20 * 10
    assert (found["videos"], found["hours"], found["visual_tokens"]) == (201, 100.5, tokens)
    assert found["gpu_hours"] == pytest.approx(tokens / 2000 / 3600)
    assert found["wall_hours"] == pytest.approx(found["gpu_hours"] / 4)
    assert found["cost"] == pytest.approx(3 * found["gpu_hours"])
    entry_bytes = 57_344 + 28 * 4 * 6 * 4
    assert found["storage_bytes"] == 201 * 2048 * entry_bytes == 201 * found["cache_bytes"]
    # One long video isn't shortened by more GPUs.
    alone = run(capsys, *plan, "--hours", "0.5", "--gpus", "64")
    assert alone["wall_hours"] == alone["gpu_hours"]


def test_a_gpu_that_is_too_small_is_told_with_the_block_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--model", SEVEN_B, "--hours", "10", "--frame-size", "560x280", "--block-tokens", "65536"]
    large = run(capsys, *plan, "--gpu-memory-gb", "24")
    assert large["fits"] is False and large["actors_per_gpu"] == 0
    largest = large["largest_block_tokens"]
    assert 784 < largest < 65536 and largest % 200 == 0
    assert any(f"lower engine.block_tokens to {largest}" in note for note in large["notes"])
    fitting = run(capsys, *plan, "--gpu-memory-gb", "24", "--block-tokens", str(largest))
    assert fitting["fits"] is True and fitting["engine_bytes"] <= 24e9 * USABLE_SHARE
    assert run(capsys, *plan, "--gpu-memory-gb", "24", "--block-tokens", str(largest + 200))["fits"] is False
    hopeless = run(capsys, *plan, "--gpu-memory-gb", "16")
    assert hopeless["largest_block_tokens"] is None and any("a larger GPU" in note for note in hopeless["notes"])


def test_policies_that_keep_everything_or_need_the_question_are_planned_so(capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.stem for path in (ROOT / "engine" / "policies").glob("[a-z]*.py") if path.stem != "base"]
    made = {name: make_policy(name, {}) for name in names}
    assert {name for name, policy in made.items() if policy.needs_question} == set(QUERY_AWARE)
    assert {name for name, policy in made.items() if not policy.evicts} == set(UNBOUNDED)
    plan = ["--model", SEVEN_B, "--hours", "1", "--tokens-per-second", "1000", "--questions-per-video", "5"]
    plain = run(capsys, *plan)
    full = run(capsys, *plan, "--engine.policy", "full")
    assert full["kv_peak_bytes"] == full["kv_full_bytes"] == 57_344 * plain["visual_tokens"] and full["fits"] is False
    asked = run(capsys, *plan, "--engine.policy", "snapkv")
    assert asked["gpu_hours"] == pytest.approx(5 * plain["gpu_hours"]) and asked["storage_bytes"] == 0
    assert run(capsys, *plan, "--caches.retain", "none")["storage_bytes"] == 0


def test_a_video_longer_than_the_models_positions_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    intern = run(capsys, "--model", "InternVL3_5-8B", "--hours", "1", "--video-minutes", "2", "--fps", "1")
    assert intern["group_tokens"] == 266 and intern["longest_video_s"] == 40960 // 266
    assert not any("positions" in note for note in intern["notes"])
    told = run(capsys, "--model", "InternVL3_5-8B", "--hours", "1", "--video-minutes", "3", "--fps", "1")
    assert any("positions" in note for note in told["notes"])
    assert run(capsys, "--model", SEVEN_B, "--hours", "18", "--video-minutes", "1080")["longest_video_s"] == 64_000


def test_blocks_are_cut_as_the_engine_cuts_them() -> None:
    model, settings = read_footprint(SEVEN_B), config()
    archive = hours_of_video(settings, model, 1.0, video_s=3600, frame_px=(280, 560), questions=1)
    planner = BlockPlanner(784, model.geometry.group_tokens)
    assert memory_of(settings, model, archive, 784).read_tokens == planner.groups_per_block(280, 560) * 200 == 600
    short = hours_of_video(settings, model, 4 / 3600, video_s=4, frame_px=(280, 560), questions=1)
    assert memory_of(settings, model, short, 784).read_tokens == 400, "a block is no longer than the video"


def test_sampling_is_the_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = make_video(tmp_path / "clip.mp4", frames=300, fps=10)
    (tmp_path / "questions.txt").write_text("What is it?\nIs it red?\n")
    from pipeline.video.source import open_media

    for decode in ({"fps": 1.0}, {"fps": 0.7, "start_s": 4.0, "end_s": 20.0}, {"sampling": "frames", "frames": 9}):
        settings, model = config(decode=decode), read_footprint("bundled")
        source = open_media(video, model.geometry, settings.decode)
        clip = clip_of(settings, model, source.probe.duration_s, (source.probe.height_px, source.probe.width_px))
        assert clip.tokens == source.predicted_tokens()
    found = run(capsys, "--videos", str(tmp_path), "--questions", str(tmp_path / "questions.txt"), "--model", "bundled")
    assert (
        found["videos"] == 1
        and found["hours"] == pytest.approx(30 / 3600, rel=0.02)
        and found["visual_tokens"] == 15 * found["group_tokens"]
    )


def _task(name: str, **extra: Any) -> VideoTask:
    return VideoTask(
        video_id=name, uri=f"s3://b/{name}", questions=(ManifestQuestion(question_id="q0", question="What?"),) * 2, extra=extra
    )


def test_a_manifest_tells_lengths_and_the_rest_is_assumed_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [_task("a", duration_s=3600), _task("b", duration="1800"), _task("c"), _task("gone", duration_s=9e9), _task("d", duration="?")]
    found = Manifest(tasks, 5, missing=[("gone", "s3://b/gone", "no such object")])
    monkeypatch.setattr(manifests, "read_manifest", lambda *_: found)
    planned = run(capsys, "--manifest", "m.jsonl", "--model", SEVEN_B)
    assert planned["videos"] == 4 and planned["hours"] == pytest.approx(1 + 0.5 + 2 * 0.75)
    assert any("1 videos can't be read" in note for note in planned["notes"])
    assert any("2 videos don't say how long they are: taken to be 45.0 minutes" in note for note in planned["notes"])
    assert run(capsys, "--manifest", "m.jsonl", "--model", SEVEN_B, "--video-minutes", "6")["hours"] == pytest.approx(1.7)
    found.tasks[:] = [_task("c")]
    assert job.main(["--manifest", "m.jsonl", "--model", SEVEN_B]) == 2
    assert "--video-minutes" in capsys.readouterr().err


def test_speed_is_taken_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", videos=30, questions=2)
    planned = run(capsys, "--hours", "10", "--model", SEVEN_B, "--measured", str(tmp_path / "run"))
    # The made-up run reads 5,000 tokens a second, encodes 9,000 and waits a little.
    assert 2500 < planned["tokens_per_s"] < 1 / (1 / 5000 + 1 / 9000)
    assert "29 videos" in planned["speed_source"] and "measured on CPU" in planned["speed_source"] and "bundled" in planned["speed_source"]
    assert planned["gpu_hours"] == pytest.approx(planned["visual_tokens"] / planned["tokens_per_s"] / 3600)
    assert job.main(["--hours", "1", "--measured", str(tmp_path)]) == 2 and "run.json" in capsys.readouterr().err


def _broken(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        change(content)
        (folder / "config.json").write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (_broken(lambda c: c["text_config"].pop("num_hidden_layers")), "no num_hidden_layers"),
        (_broken(lambda c: c.pop("vision_config")), "no vision_config"),
        (_broken(lambda c: c.update(model_type="llava")), "'llava' is not supported"),
        (_broken(lambda c: c["vision_config"].update(num_heads="x")), "can't be read"),
        (_broken(lambda c: c["text_config"].update(num_attention_heads=0)), "can't be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold an object"),
        (lambda folder: (folder / "processor_config.json").unlink(), "no min_pixels"),
    ],
)
def test_a_configuration_that_says_too_little_is_named(
    edit: Callable[[Path], Any], complaint: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders["qwen2_5_vl"], tmp_path / "model")
    edit(tmp_path / "model")
    assert job.main(["--hours", "1", "--model", str(tmp_path / "model")]) == 2
    err = capsys.readouterr().err
    assert complaint in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "nothing to plan: give --hours"),
        (["--hours", "0"], "--hours: '0' must be a number above 0"),
        (["--hours", "many"], "must be a number above 0"),
        (["--hours", "nan"], "must be a number above 0"),
        (["--hours", "1", "--gpus", "0"], "whole number of at least 1"),
        (["--hours", "1", "--frame-size", "720"], "WIDTHxHEIGHT"),
        (["--hours", "1", "--frame-size", "0x720"], "WIDTHxHEIGHT"),
        (["--hours", "1", "--frame-size", "9000x9"], "aspect ratio"),
        (["--hours", "1", "--gpu-memory-gb", "-80"], "must be a number above 0"),
        (["--hours", "1", "--model", "Qwen/Qwen9"], "Qwen/Qwen2.5-VL-7B-Instruct"),
        (["--hours", "1", "--fps", "-1"], "decode.fps"),
        (["--hours", "1", "--budgit-tokens", "3"], "did you mean"),
        (["--hours", "1", "--tokens-per-second", "3", "--measured", "x"], "not allowed with"),
        (["--hours", "1", "--decode.sampling", "keyframes"], "decode.fps = 1 /"),
        (["--manifest", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--config", "/no/such.yaml", "--hours", "1"], "/no/such.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = job.main(argv)
    except SystemExit as left:
        code = int(left.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and complaint in err, err
    assert len(err.splitlines()) == 1 and err.startswith("reelkeep plan: ")
