"""A real S3 server for tests: a moto_server process of its own, on a free port of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import boto3
import pytest
from botocore.config import Config

from pipeline.config import StorageConfig
from pipeline.storage import Storage

START_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """Where the server listens."""

    endpoint_url: str

    def config(self, **settings: object) -> StorageConfig:
        """Storage settings that reach this server; quick to give up."""
        return StorageConfig.model_validate(
            {"endpoint_url": self.endpoint_url, "addressing_style": "path", "max_attempts": 3, "connect_timeout_s": 5, "read_timeout_s": 20}
            | settings
        )

    def storage(self, **settings: object) -> Storage:
        """A storage on this server."""
        return Storage(self.config(**settings))

    def new_bucket(self) -> str:
        """Make an empty bucket; returns its name."""
        name = f"test-{uuid.uuid4().hex}"
        client = boto3.client("s3", endpoint_url=self.endpoint_url, region_name="us-east-1", config=Config(s3={"addressing_style": "path"}))
        client.create_bucket(Bucket=name)
        return name


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def s3_credentials() -> Iterator[None]:
    """Credentials where boto3 and its children look for them; those of the person who runs the tests are out of reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test-id",
            "AWS_SECRET_ACCESS_KEY": "test-words",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3_server(s3_credentials: None) -> Iterator[S3Server]:
    """A running server, ended with the session."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"moto_server did not start (exit code {process.poll()})")
            time.sleep(0.1)
        yield S3Server(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(20)
