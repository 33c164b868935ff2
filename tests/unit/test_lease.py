"""One job at a time on one output."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.lease import Lease, OutputHeldError
from pipeline.storage import Storage

QUICK = {"beat_s": 0.05, "quiet_s": 0.4}


def lease(output: Path, run_id: str = "second", **settings: float) -> Lease:
    return Lease(str(output), Storage(), run_id, **(QUICK | settings))  # type: ignore[arg-type]


def holder(output: Path) -> Path:
    (path,) = (output / "lease").iterdir()
    return path


def disguise(output: Path) -> None:
    """Let the holder look as if it were on another machine."""
    path = holder(output)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "elsewhere", "host": "node-7"}))


def test_the_second_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    with lease(tmp_path, "first"):
        with pytest.raises(OutputHeldError, match=r"held by run first \(process \d+ of \w+ on .*--take-over"), lease(tmp_path):
            pass
        assert holder(tmp_path).name == "000001.json"
    assert not (tmp_path / "lease").exists()
    with lease(tmp_path):
        pass


def test_a_living_job_of_another_machine_is_told_by_its_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lease(tmp_path, "first"):
        monkeypatch.setattr("pipeline.lease._machine", lambda: "elsewhere")
        with pytest.raises(OutputHeldError, match="held by run first"), lease(tmp_path, quiet_s=5.0):
            pass


def test_a_dead_job_of_another_machine_is_given_up_after_a_while(tmp_path: Path) -> None:
    with lease(tmp_path, "first", beat_s=60.0):
        disguise(tmp_path)
        began = time.monotonic()
        with lease(tmp_path):
            assert time.monotonic() - began >= 0.4
            assert holder(tmp_path).name == "000002.json"


def test_a_killed_process_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pipeline.lease import Lease; from pipeline.storage import Storage\n"
        f"Lease({str(tmp_path)!r}, Storage(), 'killed').__enter__(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == -9 and holder(tmp_path)
    began = time.monotonic()
    with lease(tmp_path, quiet_s=60.0):
        assert time.monotonic() - began < 5


def test_taking_over_stops_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()
    monkeypatch.setattr("_thread.interrupt_main", interrupted.set)
    taking_over = Lease(str(tmp_path), Storage(), "second", take_over=True, **QUICK)  # type: ignore[arg-type]
    with lease(tmp_path, "first") as first, taking_over as second:
        assert interrupted.wait(5) and first.lost and not second.lost


def test_of_many_starting_at_once_one_holds(tmp_path: Path) -> None:
    gate = threading.Barrier(8)
    held, refused = [], []

    def start(number: int) -> None:
        gate.wait()
        try:
            with lease(tmp_path, f"run{number}"):
                held.append(number)
                time.sleep(0.5)
        except OutputHeldError:
            refused.append(number)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == 7


def test_a_damaged_lease_does_not_block_for_ever(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "000003.json").write_bytes(b"\xff")
    with lease(tmp_path):
        assert holder(tmp_path).name == "000004.json"
