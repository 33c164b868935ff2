"""Starts a night's RayJob from the suspended template, unless the last one is still at work. Run by the CronJob, in an image of its own.

The RayJob has one fixed name. The API server gives a name once only, so that of two starters one is refused, whatever their timing.

Exit codes: 0 started; 1 not started, with the reason on standard error.
"""

from __future__ import annotations

import copy
import json
import os
import ssl
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

TEMPLATE, NAME = "reelkeep-nightly-template", "reelkeep-nightly"
ENDED = ("Complete", "Failed", "ValidationFailed")
QUEUE_ANNOTATION, QUEUE_LABEL = "reelkeep/queue-name", "kueue.x-k8s.io/queue-name"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DELETION_S = 300.0


class NotStarted(Exception):
    """Tonight's run wasn't started; says why."""


class Refused(NotStarted):
    """The API server said no.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server said {status}: {message}")
        self.status = status


class RayJobs:
    """The RayJobs of one namespace, through the API server.

    Args:
        server: its address.
        namespace: where the RayJobs are.
        token_file: the account's token, read at every request since Kubernetes renews it.
        tls: whom to trust; None for a plain connection.
    """

    def __init__(self, server: str, namespace: str, token_file: Path, tls: ssl.SSLContext | None = None) -> None:
        self.address = f"{server}/apis/ray.io/v1/namespaces/{namespace}/rayjobs"
        self.token_file, self.tls = token_file, tls

    def get(self, name: str) -> dict[str, Any] | None:
        """A RayJob; None when there is none of this name."""
        try:
            return self._request("GET", f"/{name}")
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def create(self, job: dict[str, Any]) -> None:
        """Create a RayJob; refused with 409 when its name is taken."""
        self._request("POST", "", job)

    def delete(self, name: str, uid: str) -> None:
        """Delete a RayJob and what belongs to it, unless the name has meanwhile gone to one with another uid."""
        self._request("DELETE", f"/{name}", {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}})

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token_file.read_text().strip()}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.address + path, data, headers, method=method), timeout=30, context=self.tls) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            text = error.read().decode(errors="replace")
            raise Refused(error.code, json.loads(text).get("message", "") if text.startswith("{") else error.reason) from None
        except URLError as error:
            raise NotStarted(f"the API server can't be reached: {error.reason}") from None


def night_of(template: dict[str, Any], day: str) -> dict[str, Any]:
    """The RayJob of one night.

    Args:
        template: the suspended RayJob as the API server gives it.
        day: ISO date that stands for RUN_DATE.
    """
    spec = copy.deepcopy(template["spec"])
    spec.pop("suspend", None)
    spec["entrypoint"] = spec["entrypoint"].replace("RUN_DATE", day)
    annotations = template["metadata"].get("annotations") or {}
    annotations = {name: value for name, value in annotations.items() if not name.startswith("kubectl.kubernetes.io/")}
    labels = dict(template["metadata"].get("labels") or {})
    if queue := annotations.pop(QUEUE_ANNOTATION, None):
        labels[QUEUE_LABEL] = queue
    metadata = {"name": NAME, "labels": labels | {"reelkeep/night": day}, "annotations": annotations}
    return {"apiVersion": template["apiVersion"], "kind": "RayJob", "metadata": metadata, "spec": spec}


def start(jobs: RayJobs, day: str, *, wait_s: float = DELETION_S, pause_s: float = 2.0) -> str:
    """Clear away the last night's ended RayJob and create this night's.

    Returns:
        What was done, in a line.

    Raises:
        NotStarted: there is no template, the last night's run is still at work, somebody else has started one, or the old one stays.
    """
    template = jobs.get(TEMPLATE)
    if template is None:
        raise NotStarted(f"there is no RayJob {TEMPLATE}; apply the overlay again")
    if (last := jobs.get(NAME)) is not None:
        status = (last.get("status") or {}).get("jobDeploymentStatus") or "not begun"
        if status not in ENDED:
            night = (last["metadata"].get("labels") or {}).get("reelkeep/night")
            raise NotStarted(f"{NAME} of {night} is still at work ({status}); {day} isn't started")
        _clear_away(jobs, last["metadata"]["uid"], wait_s, pause_s)
    try:
        jobs.create(night_of(template, day))
    except Refused as error:
        if error.status == 409:
            raise NotStarted(f"somebody else has just started {NAME}") from None
        raise
    return f"started {NAME} of {day}"


def _clear_away(jobs: RayJobs, uid: str, wait_s: float, pause_s: float) -> None:
    try:
        jobs.delete(NAME, uid)
    except Refused as error:
        if error.status not in (404, 409):
            raise
    deadline = time.monotonic() + wait_s
    while (there := jobs.get(NAME)) is not None and there["metadata"]["uid"] == uid:
        if time.monotonic() > deadline:
            raise NotStarted(f"{NAME} was deleted {wait_s:g} s ago and is still there; look at its finalizers")
        time.sleep(pause_s)


def main() -> int:
    """Start tonight's run; RUN_DATE in the environment takes another date."""
    day = os.environ.get("RUN_DATE") or f"{datetime.now(timezone.utc):%Y-%m-%d}"
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        print(start(RayJobs(server, os.environ["NAMESPACE"], ACCOUNT / "token", trusted), day))
    except NotStarted as reason:
        print(f"start_nightly: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
