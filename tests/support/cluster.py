"""A Ray cluster for tests whose nodes are process groups of this machine: any of them can be killed whole, like a machine."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.s3 import free_port

BIN = Path(sys.executable).parent
START_S = 120.0
Series = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name and its labels."""


class ProcessCluster:
    """A head that does no work and nodes that join it; token authentication on, as `ray start` has it.

    Attributes:
        environment: what every process that talks to the cluster needs.
        dashboard: address for `ray job submit`.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")  # short: socket paths end at 107 bytes
        token = Path(self._folder.name) / "token"
        self._token = secrets.token_hex(32)
        token.write_text(self._token)
        token.chmod(0o600)
        quick = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
        quick["RAY_metrics_report_interval_ms"] = "1000"
        quick["RAY_worker_niceness"] = "0"  # Ray's workers give way to everybody else, here to the other tests
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        own["PATH"] = f"{BIN}:{os.environ['PATH']}"  # a job's `python` is this one, as it is in the image
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = clean | quick | own
        self._port, dashboard_port = free_port(), free_port()
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._metrics_ports: list[int] = []
        head = ["--head", f"--port={self._port}", f"--dashboard-port={dashboard_port}", f"--ray-client-server-port={free_port()}"]
        self._start(*head, f"--temp-dir={self._folder.name}", "--num-cpus=0")
        self._wait(lambda: self.alive_nodes() == 1, "the head did not come up")

    def add_node(self, num_cpus: int) -> int:
        """Start a node and wait until it has joined: two that start at once fight for the same socket. Returns its process id."""
        before = self.alive_nodes()
        pid = self._start(f"--address=127.0.0.1:{self._port}", f"--num-cpus={num_cpus}")
        self._wait(lambda: self.alive_nodes() > before, "a node did not join")
        return pid

    def alive_nodes(self) -> int:
        """Nodes that the cluster counts on, the head included."""
        request = Request(f"{self.dashboard}/api/v0/nodes", headers={"Authorization": f"Bearer {self._token}"})
        with urlopen(request, timeout=30) as answer:
            nodes = json.load(answer)["data"]["result"]["result"]
        return sum(node["state"] == "ALIVE" for node in nodes)

    @contextmanager
    def scraped(self) -> Iterator[dict[Series, float]]:
        """The project's metrics, as Prometheus would read them from all nodes during the block: the latest value of each series."""
        seen: dict[Series, float] = {}
        over = threading.Event()

        def scrape() -> None:
            for port in self._metrics_ports:
                with suppress(OSError):  # a node that died refuses
                    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                        ours = "\n".join(line for line in answer.read().decode().splitlines() if "reelkeep" in line)
                    samples = [sample for family in text_string_to_metric_families(ours) for sample in family.samples]
                    seen.update({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})

        def keep_scraping() -> None:
            while not over.wait(0.5):
                scrape()

        scraper = threading.Thread(target=keep_scraping)
        scraper.start()
        try:
            yield seen
        finally:
            over.set()
            scraper.join()
            scrape()

    def engines(self, pid: int) -> Iterator[psutil.Process]:
        """The engines of a node."""
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if "ray::MapWorker(Map(_Engine))" in " ".join(process.cmdline()):
                    yield process

    def kill(self, pid: int) -> None:
        """End a node and everything on it at once, as when a machine is taken away."""
        with suppress(psutil.NoSuchProcess):
            node = psutil.Process(pid)
            for process in [*node.children(recursive=True), node]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """End all nodes, the head last."""
        for node in reversed(self._nodes):
            self.kill(node.pid)
            node.wait(20)
        self._folder.cleanup()

    def _start(self, *options: str) -> int:
        command = [BIN / "ray", "start", "--block", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000", *options]
        command += [f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        self._metrics_ports.append(free_port())
        command += [f"--metrics-export-port={self._metrics_ports[-1]}"]
        node = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self._nodes.append(node)
        return node.pid

    def _wait(self, ready: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):  # refused while it isn't up
                if ready():
                    return
            if self._nodes[-1].poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(problem)
            time.sleep(0.5)
