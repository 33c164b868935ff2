"""Checkpoints fetched to a node from a real S3 server, and from a hub's library."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import Engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from jobs import answer
from pipeline import weights
from pipeline.config import StorageConfig
from pipeline.storage import Storage
from pipeline.storage_errors import SpoolSpaceError, StorageError, StorageUnreachableError
from tests.support.jobs import command_line, said, watch_in_this_process, write_questions
from tests.support.s3 import S3Server
from tests.support.videos import make_video


@pytest.fixture
def bucket(s3_server: S3Server, folders: dict[str, Path], tmp_path: Path) -> tuple[EngineConfig, Storage]:
    """A prefix that holds the tiny checkpoint, and what reads it."""
    storage = s3_server.storage(models_dir=str(tmp_path))
    model = f"s3://{s3_server.new_bucket()}/models/tiny"
    for path in folders["qwen2_5_vl"].iterdir():
        storage.write_bytes(f"{model}/{path.name}", path.read_bytes())
    return EngineConfig(model=model, budget_tokens=80, block_tokens=24), storage


class Counting(Storage):
    """A storage that counts the reads of each object, and can spoil them."""

    def __init__(self, storage: Storage, spoilt: str = "") -> None:
        super().__init__(storage.config)
        self.reads: list[str] = []
        self.spoilt = spoilt

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        self.reads.append(uri)
        data = super().read_range(uri, start, length)
        return bytes(len(data)) if self.spoilt and uri.endswith(self.spoilt) else data


def test_a_checkpoint_from_a_bucket_loads(bucket: tuple[EngineConfig, Storage], folders: dict[str, Path], tmp_path: Path) -> None:
    model, storage = bucket
    folder = weights.checkpoint_folder(model, storage)
    assert folder is not None and folder.parent == tmp_path
    for path in folders["qwen2_5_vl"].iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert Engine.load(model, folder=folder).identity["model"] == model.model


def test_of_many_engines_at_once_one_fetches(bucket: tuple[EngineConfig, Storage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "RANGE_BYTES", 1 << 16)  # several ranges a file
    model, storage = bucket[0], Counting(bucket[1])
    seen: list[Path | None] = []
    threads = [threading.Thread(target=lambda: seen.append(weights.checkpoint_folder(model, storage))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 6 and len(set(seen)) == 1
    sizes = {entry.uri: entry.size_bytes for entry in storage.scan(model.model)}
    assert len(storage.reads) == sum(-(-size // (1 << 16)) for size in sizes.values()), "each range once"


def test_the_driver_fetches_no_weights(bucket: tuple[EngineConfig, Storage], tmp_path: Path) -> None:
    model, storage = bucket[0], Counting(bucket[1])
    folder = weights.checkpoint_folder(model, storage, weights=False)
    assert folder is not None and (folder / "config.json").exists()
    assert not list(folder.glob("*.safetensors")) and not [uri for uri in storage.reads if uri.endswith(".safetensors")]
    whole = weights.checkpoint_folder(model, storage)
    assert whole is not None and whole != folder and list(whole.glob("*.safetensors"))


def test_a_fetch_that_was_killed_is_done_again(bucket: tuple[EngineConfig, Storage], tmp_path: Path) -> None:
    model, storage = bucket
    slow = (
        "import sys, time; from pipeline import weights; from pipeline.config import StorageConfig\n"
        "from pipeline.storage import Storage; from engine.config import EngineConfig\n"
        "class Slow(Storage):\n"
        "    def read_range(self, uri, *args):\n"
        "        if uri.endswith('.safetensors'): time.sleep(60)\n"
        "        return super().read_range(uri, *args)\n"
        f"weights.checkpoint_folder(EngineConfig(model={model.model!r}), Slow(StorageConfig.model_validate_json(sys.argv[1])))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", slow, storage.config.model_dump_json()])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".*.part/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    assert list(tmp_path.glob(".*.part")), "it was killed on the way"
    folder = weights.checkpoint_folder(model, storage)
    assert folder is not None and next(iter(folder.glob("*.safetensors"))).stat().st_size > 0
    assert not list(tmp_path.glob(".*.part"))


def test_a_damaged_folder_is_fetched_again(bucket: tuple[EngineConfig, Storage], tmp_path: Path) -> None:
    model, storage = bucket
    folder = weights.checkpoint_folder(model, storage)
    assert folder is not None
    (folder / "config.json").write_text("{")
    assert weights.checkpoint_folder(model, storage) == folder
    assert (folder / "config.json").stat().st_size > 1


def test_what_does_not_arrive_whole_is_refused(bucket: tuple[EngineConfig, Storage], tmp_path: Path) -> None:
    model, storage = bucket[0], Counting(bucket[1], spoilt="config.json")
    with pytest.raises(StorageUnreachableError, match=r"differs from the object, at every try"):
        weights.checkpoint_folder(model, storage)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_checksums_beside_the_weights_are_held_to(bucket: tuple[EngineConfig, Storage], folders: dict[str, Path], tmp_path: Path) -> None:
    model, storage = bucket
    right = hashlib.sha256((folders["qwen2_5_vl"] / "config.json").read_bytes()).hexdigest()
    storage.write_bytes(f"{model.model}/SHA256SUMS", f"{right}  config.json\n".encode())
    assert weights.checkpoint_folder(model, storage) is not None
    storage.write_bytes(f"{model.model}/SHA256SUMS", f"{right[::-1]}  config.json\n".encode())
    with pytest.raises(StorageError, match=r"config\.json: differs from its line in SHA256SUMS"):
        weights.checkpoint_folder(model, storage)


def test_other_weights_than_the_job_began_with_are_refused(bucket: tuple[EngineConfig, Storage], tmp_path: Path) -> None:
    model, storage = bucket
    began = model.model_copy(update={"revision": weights.pinned_revision(model, storage)})
    storage.write_bytes(f"{model.model}/generation_config.json", b"{}")
    with pytest.raises(ConfigError, match=rf"holds other files than engine\.revision={began.revision}"):
        weights.checkpoint_folder(began, storage)
    with pytest.raises(ConfigError, match=r"holds other files than engine\.revision="):
        weights.pinned_revision(began, storage)


def test_a_disk_without_room_is_told_beforehand(
    bucket: tuple[EngineConfig, Storage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, storage = bucket[0], Counting(bucket[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=weights.SPARE_BYTES))
    with pytest.raises(SpoolSpaceError, match=r"don't fit on the disk of"):
        weights.checkpoint_folder(model, storage)
    assert not storage.reads


def test_a_prefix_without_a_checkpoint_is_told(bucket: tuple[EngineConfig, Storage], tmp_path: Path) -> None:
    model, storage = bucket
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        weights.checkpoint_folder(model.model_copy(update={"model": model.model.rpartition("/")[0]}), storage)


def test_folders_are_left_where_they_are(folders: dict[str, Path], tmp_path: Path) -> None:
    storage = Storage(StorageConfig(models_dir=str(tmp_path)))
    for model in ("bundled", str(folders["qwen2_5_vl"]), "/nonexistent/model"):
        assert weights.checkpoint_folder(EngineConfig(model=model), storage) is None
        assert weights.pinned_revision(EngineConfig(model=model), storage) is None
    assert not list(tmp_path.iterdir())


def test_a_hub_is_asked_for_room_first_and_for_settings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def hub(model: str, *, dry_run: bool = False, **options: Any) -> Any:
        calls.append({"model": model, "dry_run": dry_run} | options)
        file = SimpleNamespace(will_download=True, file_size=10**18, local_path=str(tmp_path / "hub" / "weights"))
        return [file] if dry_run else str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    storage = Storage(StorageConfig(models_dir=str(tmp_path)))
    with pytest.raises(SpoolSpaceError, match=r"Qwen/Qwen2.5-VL-7B-Instruct: its 1000000000000000000 bytes"):
        weights.checkpoint_folder(EngineConfig(model="Qwen/Qwen2.5-VL-7B-Instruct", revision="abc"), storage, weights=False)
    assert calls == [
        {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "dry_run": True, "revision": "abc", "ignore_patterns": list(weights._WEIGHTS)}
    ]


def test_a_hub_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"engine.model=nobody/nothing isn't on this node, and HF_HUB_OFFLINE is set") as raised:
        weights.checkpoint_folder(EngineConfig(model="nobody/nothing"), Storage(StorageConfig(models_dir=str(tmp_path))))
    assert "\n" not in str(raised.value)


def test_a_job_with_weights_from_a_bucket_keeps_to_one_revision(
    bucket: tuple[EngineConfig, Storage], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    watch_in_this_process(monkeypatch)
    model, storage = bucket
    (tmp_path / "videos").mkdir()
    make_video(tmp_path / "videos" / "clip.mp4", frames=40, fps=10)
    questions = write_questions(tmp_path / "q.jsonl", "What number is shown?")
    server = ["--storage.endpoint-url", str(storage.config.endpoint_url), "--storage.addressing-style", "path"]

    def job(name: str | Path, output: str) -> list[str]:
        places = ("--storage.models-dir", str(tmp_path / "models"), "--caches.retain", "none")
        return command_line(name, tmp_path / "videos", questions, tmp_path / output, *server, *places)

    fetched = job(model.model, "fetched")
    assert answer.main(fetched) == 0
    assert answer.main(job(folders["qwen2_5_vl"], "local")) == 0
    assert said(tmp_path / "fetched") == said(tmp_path / "local")
    recorded = json.loads((tmp_path / "fetched" / "run.json").read_text())["config"]["engine"]
    assert recorded["model"] == model.model and recorded["revision"] == weights.pinned_revision(model, storage)
    assert answer.main([*fetched, "--dry-run"]) == 0
    storage.write_bytes(f"{model.model}/generation_config.json", b"{}")
    assert answer.main(fetched) == answer.UNUSABLE
    assert f"engine.revision={recorded['revision']} there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/evil.txt", "../evil.txt", "sub/../../evil.txt"])
def test_no_name_in_a_bucket_leads_out_of_the_folder(bucket: tuple[EngineConfig, Storage], name: str) -> None:
    model, storage = bucket
    storage._s3().put_object(Bucket=model.model.split("/")[2], Key=f"{model.model.split('/', 3)[3]}/{name}", Body=b"evil")
    with pytest.raises(ConfigError, match=r"which leads out of its folder"):
        weights.checkpoint_folder(model, storage)


def test_files_that_change_while_they_are_fetched_are_not_kept(
    bucket: tuple[EngineConfig, Storage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, storage = bucket
    there = storage.read_bytes(f"{model.model}/config.json")
    monkeypatch.setattr(weights, "_look_for_room", lambda *_: storage.write_bytes(f"{model.model}/config.json", there[:-1] + b" "))
    with pytest.raises(ConfigError, match=r"holds other files than engine\.revision="):
        weights.checkpoint_folder(model, storage)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
