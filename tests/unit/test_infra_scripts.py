"""The scripts of `infra/`: what starts a night, what runs a job, what stops a pod."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_infra import INFRA, one

Manifest = dict[str, Any]

_spec = importlib.util.spec_from_file_location("start_nightly", INFRA / "start_nightly.py")
assert _spec is not None and _spec.loader is not None
nightly = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nightly)


class ApiServer(BaseHTTPRequestHandler):
    """RayJobs as the API server keeps them: one object a name, uids, deletion with preconditions."""

    objects: dict[str, Manifest]
    seen: list[str]
    lock: threading.Lock

    def _answer(self, status: int, body: Manifest) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _do(self) -> None:
        base, _, name = self.path.partition("/rayjobs")
        assert base == "/apis/ray.io/v1/namespaces/reelkeep" and self.headers["Authorization"] == "Bearer sesame"
        name = name.strip("/")
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        with self.lock:
            self.seen.append(f"{self.command} {name}".strip())
            if self.command == "POST":
                name = body["metadata"]["name"]
                if name in self.objects:
                    return self._answer(409, {"message": f"{name} already exists"})
                self.objects[name] = body | {"metadata": body["metadata"] | {"uid": uuid.uuid4().hex}}
            if name not in self.objects:
                return self._answer(404, {"message": "not found"})
            found = self.objects[name]
            if self.command == "DELETE":
                if body["preconditions"]["uid"] != found["metadata"]["uid"]:
                    return self._answer(409, {"message": "the UID in the precondition does not match"})
                del self.objects[name]
            return self._answer(200, found)

    do_GET = do_POST = do_DELETE = _do

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[type[ApiServer]]:
    """A server that holds the template of the prod overlay."""
    template = copy.deepcopy(one("prod", "RayJob"))

    class Server(ApiServer):
        objects, seen, lock = {nightly.TEMPLATE: template}, [], threading.Lock()
        address = ""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        Server.address = f"http://127.0.0.1:{server.server_port}"
        yield Server
        server.shutdown()


@pytest.fixture
def jobs(api: Any, tmp_path: Path) -> Any:
    (tmp_path / "token").write_text("sesame\n")
    return nightly.RayJobs(api.address, "reelkeep", tmp_path / "token")


def test_a_night_is_the_template_with_its_date_and_its_queue(api: type[ApiServer], jobs: Any) -> None:
    assert nightly.start(jobs, "2026-03-01") == "started reelkeep-nightly of 2026-03-01"
    night = api.objects["reelkeep-nightly"]
    assert night["spec"]["entrypoint"].endswith("--manifest $ARCHIVE_URI/manifests/2026-03-01.jsonl --output $ANSWERS_URI/2026-03-01")
    assert "suspend" not in night["spec"]
    assert night["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "reelkeep"
    assert night["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert night["spec"]["rayClusterSpec"] == api.objects[nightly.TEMPLATE]["spec"]["rayClusterSpec"]


@pytest.mark.parametrize("status", ["Running", "Initializing", "Suspended", "Retrying", None])
def test_a_night_that_is_still_at_work_is_left_alone(api: type[ApiServer], jobs: Any, status: str | None) -> None:
    nightly.start(jobs, "2026-03-01")
    if status:
        api.objects["reelkeep-nightly"]["status"] = {"jobDeploymentStatus": status}
    with pytest.raises(nightly.NotStarted, match=r"reelkeep-nightly of 2026-03-01 is still at work.*2026-03-02 isn't started"):
        nightly.start(jobs, "2026-03-02")
    assert "2026-03-01" in api.objects["reelkeep-nightly"]["spec"]["entrypoint"]
    assert not [line for line in api.seen if line.startswith("DELETE")]


@pytest.mark.parametrize("status", ["Complete", "Failed"])
def test_a_night_that_has_ended_makes_room(api: type[ApiServer], jobs: Any, status: str) -> None:
    nightly.start(jobs, "2026-03-01")
    api.objects["reelkeep-nightly"]["status"] = {"jobDeploymentStatus": status}
    nightly.start(jobs, "2026-03-02", pause_s=0.01)
    assert "2026-03-02" in api.objects["reelkeep-nightly"]["spec"]["entrypoint"]


def test_of_many_starters_at_once_one_starts(api: type[ApiServer], jobs: Any) -> None:
    nightly.start(jobs, "2026-03-01")
    api.objects["reelkeep-nightly"]["status"] = {"jobDeploymentStatus": "Complete"}
    started: list[str] = []
    refused: list[str] = []
    together = threading.Barrier(8)

    def starter() -> None:
        together.wait()
        try:
            started.append(nightly.start(jobs, "2026-03-02", pause_s=0.01))
        except nightly.NotStarted as reason:
            refused.append(str(reason))

    threads = [threading.Thread(target=starter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(started) == 1 and len(refused) == 7, refused
    assert api.seen.count("POST") >= 2


def test_without_a_template_or_a_server_it_says_so(api: type[ApiServer], jobs: Any) -> None:
    del api.objects[nightly.TEMPLATE]
    with pytest.raises(nightly.NotStarted, match="there is no RayJob reelkeep-nightly-template"):
        nightly.start(jobs, "2026-03-01")
    nowhere = nightly.RayJobs("http://127.0.0.1:1", "reelkeep", jobs.token_file)
    with pytest.raises(nightly.NotStarted, match="can't be reached"):
        nightly.start(nowhere, "2026-03-01")


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder of programs that only note how they were called; to be put before PATH, so that nothing real is signalled."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("pkill", "pgrep", "ray", "ps", "xargs", "python"):
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n[ -f {tmp_path}/{name} ] && . {tmp_path}/{name}\nexit 0\n')
        script.chmod(0o755)
    return tmp_path


def shell(script: str, stand_ins: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{stand_ins / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run([INFRA / script, *arguments], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (2, 2), (3, 0), (130, 130)])
def test_unanswered_questions_do_not_make_a_new_cluster(stand_ins: Path, code: int, seen: int) -> None:
    (stand_ins / "python").write_text(f"exit {code}\n")
    done = shell("run_job.sh", stand_ins, "answer", "--output", "s3://b/a name")
    assert done.returncode == seen
    assert ("quarantine table" in done.stderr) is (code == 3)
    assert (stand_ins / "calls").read_text() == "python -m jobs.answer --output s3://b/a name\n"


def test_a_head_tells_the_driver_and_waits_for_it(stand_ins: Path) -> None:
    (stand_ins / "pgrep").write_text(f"[ $(grep -c pgrep {stand_ins}/calls) -le 2 ] && exit 0; exit 1\n")
    assert shell("prestop.sh", stand_ins, "head", "30").returncode == 0
    calls = (stand_ins / "calls").read_text().splitlines()
    assert calls[0].startswith("pkill -TERM -f") and [c.split()[0] for c in calls[1:]] == ["pgrep"] * 3


def test_a_worker_is_drained_and_waits_no_longer_than_it_may(stand_ins: Path) -> None:
    (stand_ins / "xargs").write_text("echo 'ray::MapWorker(Map(_Engine))'\n")
    assert shell("prestop.sh", stand_ins, "worker", "2").returncode == 0
    calls = (stand_ins / "calls").read_text().splitlines()
    drained = (
        "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message its pod is being stopped --deadline-remaining-seconds 2"
    )
    assert calls[0] == drained


def test_a_worker_with_nothing_to_do_is_gone_at_once(stand_ins: Path) -> None:
    (stand_ins / "xargs").write_text("echo 'ray::IDLE'\n")
    assert shell("prestop.sh", stand_ins, "worker", "50").returncode == 0
    assert (stand_ins / "calls").read_text().count("pgrep") == 1
