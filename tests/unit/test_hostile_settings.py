"""Settings, and what earlier jobs left on record, that are broken or meant to hurt: one line says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine.errors import ConfigError, InputError
from pipeline.config import MAX_YAML_BYTES, JobConfig, load_config
from pipeline.manifest_rows import read_rows
from pipeline.results import ResultStore, answer_settings
from pipeline.storage import Storage
from pipeline.storage_errors import StorageError

GIVEN = ["--manifest", "m.jsonl", "--output", "out"]


def refusal(*options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*GIVEN, *options])
    text = str(caught.value)
    assert text.count("\n") == 0 and len(text) < 600, text
    return text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", "null", "{}", '{"theme": "dark"}', '{"engine": 1, "decode": {}}', "[" * 100_000, "\x00\xff"]
)
def test_a_settings_file_of_something_else_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"output=.* holds a settings\.json that this job didn't write; name another output or delete it"):
        ResultStore(str(tmp_path), Storage(), "run").settings_before()


def test_settings_are_read_back(tmp_path: Path) -> None:
    config = JobConfig(manifest="m.jsonl", output=str(tmp_path))
    store = ResultStore(str(tmp_path), Storage(), "run")
    assert store.settings_before() is None
    store.note_settings(config)
    assert store.settings_before() == answer_settings(config)


@pytest.mark.parametrize("content", ["", "{", "3", "null", '["a"]'])
def test_a_damaged_result_is_told_when_retried(tmp_path: Path, content: str) -> None:
    (tmp_path / "results" / "s").mkdir(parents=True)
    (tmp_path / "results" / "s" / "v.json").write_text(content)
    with pytest.raises(StorageError, match=r"v\.json: damaged .*delete it and run again"):
        ResultStore(str(tmp_path), Storage(), "run").failed({"A": "s/v"})


@pytest.mark.parametrize("value", ["nan", "inf", "1e400"])
@pytest.mark.parametrize(
    "option",
    [
        "decode.fps",
        "decode.start-s",
        "decode.end-s",
        "decode.stall-timeout-s",
        "pool.num-gpus",
        "pool.num-cpus",
        "pool.cluster-wait-s",
        "storage.spool-wait-s",
        "storage.read-timeout-s",
        "caches.ttl-s",
        "caches.checkpoint-every-s",
        "log.progress-interval-s",
    ],
)
def test_numbers_are_finite(option: str, value: str) -> None:
    assert option.replace("-", "_") in refusal(f"--{option}", value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--decode.stall-timeout-s", "1e7"], "less than or equal to 1000000"),
        (["--decode.frames", "1000001"], "less than or equal to 1000000"),
        (
            ["--decode.min-frame-px", "2000", "--decode.max-source-px", "1000"],
            "min_frame_px=2000 must be at most decode.max_source_px=1000",
        ),
    ],
)
def test_bounds(options: list[str], words: str) -> None:
    assert words in refusal(*options)


_PAIRS = zip("abcdefghij", "bcdefghijk", strict=True)
LAUGHS = "limit: [&a [x, x], " + ", ".join(f"&{c} [{', '.join([f'*{b}'] * 9)}]" for b, c in _PAIRS) + "]"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("limit: 2001-99-99", "holds a value that can't be read"),
        ("? [a, b]\n: 1", "can't be read: unhashable type"),
        ("{" * 5000, "nested too deep"),
        ("[" * 5000, "nested too deep"),
        ("limit: &a [*a]", "limit="),
        ("x: 1\n" * (MAX_YAML_BYTES // 5 + 1), "is larger than"),
    ],
)
def test_broken_yaml(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert words in refusal("--config", str(path))


def test_a_value_that_unfolds_is_not_written_out(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(LAUGHS)
    start_s = time.monotonic()
    assert "limit=" in refusal("--config", str(path))
    assert time.monotonic() - start_s < 10


def test_pipes_are_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    assert "isn't a regular file" in refusal("--config", str(pipe))
    with pytest.raises(InputError, match="isn't a regular file"):
        read_rows(str(pipe), Storage())
    assert "isn't a regular file" in refusal("--config", "/dev/zero")
