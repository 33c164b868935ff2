"""What `infra/` asks of Kubernetes: built by kustomize, checked against KubeRay's and Kubernetes' schemas with unknown keys refused."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from referencing import Registry, Resource

from pipeline.config import load_config
from tests.conftest import DATA
from tests.support.oldest import named
from tests.support.prometheus_operator import SCHEMAS

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
OVERLAYS = ("dev", "prod")
BIN = Path(sys.executable).parent
KUBERNETES = "v1.34.0-local-strict"
CRDS = DATA / "crds"

Manifest = dict[str, Any]
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"KubeRay's CRDs aren't at {CRDS}")


@cache
def _build(overlay: str) -> str:
    done = subprocess.run(
        [BIN / "kubectl", "kustomize", INFRA / "kubernetes" / "overlays" / overlay], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def build(overlay: str) -> list[Manifest]:
    """The manifests of an overlay, as `kubectl kustomize` prints them."""
    return [document for document in yaml.safe_load_all(_build(overlay)) if document]


def one(overlay: str, kind: str, name: str | None = None) -> Manifest:
    (found,) = [m for m in build(overlay) if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    return found


def closed(schema: Any) -> Any:
    """The same schema with unknown keys refused, as the API server drops them: `additionalProperties: false` wherever keys are listed."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        shut.setdefault("additionalProperties", False)
    return shut


@cache
def crd_validator(kind: str) -> jsonschema.Draft202012Validator:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 25,000 lines
    crd = yaml.load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text(), Loader=loader)
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


@cache
def _kubernetes_file(name: str) -> Any:
    return json.loads((resources.files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES / name).read_text())


@cache
def _kubernetes_validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _kubernetes_file(f"{kind.lower()}-{group}.json")
    registry: Any = Resource.from_contents(_kubernetes_file("_definitions.json")) @ Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


def validate_built_in(manifest: Manifest) -> None:
    _kubernetes_validator(manifest["kind"], manifest["apiVersion"]).validate(manifest)


def pod_templates(node: Any) -> Iterator[Manifest]:
    """Every pod template inside a manifest, wherever it is."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from pod_templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_templates(value)


def validate(manifest: Manifest) -> None:
    """Raises jsonschema.ValidationError for a manifest that the API server wouldn't take as it is."""
    if manifest["apiVersion"].startswith("ray.io/"):
        crd_validator(manifest["kind"]).validate(manifest)
        # The CRDs leave metadata open; a built-in kind with the same metadata doesn't.
        validate_built_in({"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]})
        for template in pod_templates(manifest):
            validate_built_in({"apiVersion": "v1", "kind": "Pod"} | template)
    elif manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    else:
        validate_built_in(manifest)


@needs_crds
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_valid(overlay: str) -> None:
    manifests = build(overlay)
    assert {m["kind"] for m in manifests} >= {"RayCluster", "RayJob", "CronJob", "ServiceAccount", "Role", "RoleBinding", "ConfigMap"}
    for manifest in manifests:
        validate(manifest)


def _set(path: str, value: Any) -> Callable[[Manifest], None]:
    *parents, last = path.split(".")

    def change(manifest: Manifest) -> None:
        node: Any = manifest
        for step in parents:
            node = node[int(step) if step.isdigit() else step]
        node[last] = value

    return change


HEAD = "spec.headGroupSpec.template.spec"


@needs_crds
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("RayCluster", _set("spec.enableInTreeAutoscalling", True)),
        ("RayCluster", _set("spec.workerGroupSpecs.1.minReplica", 0)),
        ("RayCluster", _set("spec.workerGroupSpecs.1.maxReplicas", "two")),
        ("RayCluster", _set("spec.autoscalerOptions.upscalingMode", "Fast")),
        ("RayCluster", _set(f"{HEAD}.containers.0.resource", {})),
        ("RayCluster", _set(f"{HEAD}.containers.0.securityContext.runAsNonroot", True)),
        ("RayCluster", _set("spec.headGroupSpec.template.metadata.label", {})),
        ("RayCluster", _set("metadata.anotations", {})),
        ("RayJob", _set("spec.shutdownAfterJobFinish", True)),
        ("RayJob", _set("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.tolerations.0.keys", "spot")),
        ("RayJob", _set("spec.submitterPodTemplate.spec.restartPolicies", "Never")),
        ("CronJob", _set("spec.concurencyPolicy", "Forbid")),
        ("CronJob", _set("spec.jobTemplate.spec.template.spec.containers.0.imagePullPolicies", "Always")),
        ("Role", _set("rules.0.verb", ["get"])),
        ("ServiceAccount", _set("automountToken", False)),
        ("PodMonitor", _set("spec.podMetricsEndpoints.0.prot", "metrics")),
        ("PrometheusRule", _set("spec.groups.0.rules.0.expression", "1")),
    ],
)
def test_a_typo_is_caught(kind: str, change: Callable[[Manifest], None]) -> None:
    manifest = copy.deepcopy(next(m for m in build("prod") if m["kind"] == kind))
    validate(manifest)
    change(manifest)
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pools_start_from_nothing_and_the_head_does_no_work(overlay: str) -> None:
    spec = one(overlay, "RayCluster")["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    pools = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(pools) == {"decode", "engine"}
    assert all(pool["minReplicas"] == pool["replicas"] == 0 < pool["maxReplicas"] for pool in pools.values())

    def gpus(pool: str) -> str | None:
        (container,) = pools[pool]["template"]["spec"]["containers"]
        limit: str | None = container["resources"]["limits"].get("nvidia.com/gpu")
        return limit

    assert gpus("engine") == "1" and gpus("decode") is None
    for pool in pools.values():
        assert any("spot" in json.dumps(toleration) for toleration in pool["template"]["spec"]["tolerations"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_runs_as_root_or_outlives_its_grace_period(overlay: str) -> None:
    templates = [t for manifest in build(overlay) for t in pod_templates(manifest)]
    assert len(templates) == 8
    for template in templates:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["serviceAccountName"] in ("reelkeep-head", "reelkeep-worker", "reelkeep-schedule")
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert re.fullmatch(r"registry\.example\.org/reelkeep(-schedule)?:\d+\.\d+\.\d+", container["image"])
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
            if "lifecycle" in container:
                script, role, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
                assert (INFRA / Path(script).name).exists() and role in ("head", "worker")
                assert int(seconds) < pod["terminationGracePeriodSeconds"]
            for variable in container.get("env", []):
                if variable["name"] == "RAY_JOB_STOP_WAIT_TIME_S":
                    assert int(variable["value"]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_named_and_never_held(overlay: str) -> None:
    assert not [m for m in build(overlay) if m["kind"] == "Secret"]
    containers = [c for m in build(overlay) for t in pod_templates(m) for c in t["spec"]["containers"]]
    assert any("secretRef" in source for c in containers for source in c.get("envFrom", []))
    for variable in (v for c in containers for v in c.get("env", [])):
        assert "valueFrom" in variable or not re.search("KEY|SECRET|TOKEN|PASSWORD", variable["name"])
    assert not re.search("(KEY|SECRET|TOKEN|PASSWORD)", " ".join(one(overlay, "ConfigMap", "reelkeep-run")["data"]))


def test_accounts_may_do_what_they_need_and_no_more() -> None:
    rules = one("prod", "Role")["rules"]
    assert {(verb, *rule.get("resourceNames", [])) for rule in rules for verb in rule["verbs"]} == {
        ("get", "reelkeep-nightly-template"),
        ("get", "reelkeep-nightly"),
        ("delete", "reelkeep-nightly"),
        ("create",),
    }
    assert all(rule["apiGroups"] == ["ray.io"] and rule["resources"] == ["rayjobs"] for rule in rules)
    binding = one("prod", "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "reelkeep-schedule", "namespace": "reelkeep"}]
    for group in one("prod", "RayCluster")["spec"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_night_runs_on_a_twin_of_the_standing_cluster_and_never_by_itself(overlay: str) -> None:
    template, cluster = one(overlay, "RayJob"), one(overlay, "RayCluster")
    spec = template["spec"]
    assert spec["rayClusterSpec"] == cluster["spec"]
    assert spec["suspend"] is True
    assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"], "Kueue would start the template itself"
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] > 0 and "deletionStrategy" not in spec
    assert spec["activeDeadlineSeconds"] < 24 * 3600
    schedule = one(overlay, "CronJob")["spec"]
    assert schedule["concurrencyPolicy"] == "Forbid"
    assert schedule.get("suspend", False) is (overlay == "dev")


def test_prod_waits_in_a_queue() -> None:
    cluster, template = one("prod", "RayCluster"), one("prod", "RayJob")
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == template["metadata"]["annotations"]["reelkeep/queue-name"]
    for manifest in (cluster, template):
        assert manifest["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true", "Kueue refuses pools that grow without it"


def test_prometheus_reads_every_ray_node() -> None:
    monitor, cluster = one("prod", "PodMonitor"), one("prod", "RayCluster")["spec"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    policy = one("prod", "NetworkPolicy")["spec"]["ingress"]
    let_in = [port["port"] for rule in policy for port in rule.get("ports", []) if "prometheus" in json.dumps(rule)]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert monitor["spec"]["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
        (container,) = group["template"]["spec"]["containers"]
        (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == endpoint["port"]]
        assert group["rayStartParams"]["metrics-export-port"] == str(port) and port in let_in


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_settings_in_the_config_map_are_settings(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in one(overlay, "ConfigMap", "reelkeep-run")["data"].items():
        monkeypatch.setenv(name, value)
    entrypoint = one(overlay, "RayJob")["spec"]["entrypoint"]
    config_file = re.search(r"--config /app/(\S+)", entrypoint)
    assert config_file and (ROOT / config_file[1]).exists()
    config = load_config(str(ROOT / config_file[1]), ["--manifest", "s3://b/m.jsonl", "--output", "s3://b/out"])
    for group in one(overlay, "RayCluster")["spec"]["workerGroupSpecs"]:
        (spool,) = [v for v in group["template"]["spec"]["volumes"] if v["name"] == "spool"]
        assert config.storage.spool_bytes < int(spool["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
        (container,) = group["template"]["spec"]["containers"]
        assert config.storage.spool_dir in [m["mountPath"] for m in container["volumeMounts"]]
    engines = one(overlay, "RayCluster")["spec"]["workerGroupSpecs"][1]
    assert (config.pool.max_actors or 1) <= engines["maxReplicas"]
    assert config.pool.num_cpus <= int(engines["rayStartParams"]["num-cpus"])


def _locked() -> dict[str, str]:
    found = re.findall(r"^([\w.\-]+)==(\S+)", (INFRA / "requirements.lock").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_the_image_holds_what_the_project_asks_for() -> None:
    locked = _locked()
    wanted = [line for line in metadata.requires("reelkeep") or [] if "extra ==" not in line]
    wanted += [line for line in (INFRA / "requirements.in").read_text().splitlines() if line and not line.startswith("#")]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    for overlay in OVERLAYS:
        assert one(overlay, "RayCluster")["spec"]["rayVersion"] == locked["ray"], "KubeRay must be told the image's Ray"


def _tested(python: str) -> dict[str, str]:
    """constraints.txt on a Python for Linux: each package's release."""
    place = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "platform_machine": "x86_64"}
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in named(ROOT / "constraints.txt", place)}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_what_was_tested_lies_within_what_is_allowed(python: str) -> None:
    tested = _tested(python)
    wanted = [line for line in metadata.requires("reelkeep") or [] if 'extra == "peers"' not in line]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), requirement


def test_the_image_installs_what_was_tested() -> None:
    assert _locked().items() <= _tested("3.11").items()


def test_the_dockerfile_passes_its_linter_and_finds_its_files() -> None:
    done = subprocess.run([BIN / "hadolint", INFRA / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    text = (INFRA / "Dockerfile").read_text()
    assert re.search(r"^USER 1000:1000$", text[text.rindex("FROM") :], re.MULTILINE)
    allowed = {line[1:] for line in (INFRA / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists() and source in allowed, source


def test_what_a_plain_ray_image_would_install_is_what_the_project_needs() -> None:
    """The packages are in comments, so nothing else would notice when they fall behind."""
    listed = (ROOT / "infra" / "runtime_env.yaml").read_text().partition("packages: [")[2].partition("]\n")[0]
    needed = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    packages = set(re.findall(r'"([^"]+)"', needed))
    assert set(re.findall(r'"([^"]+)"', listed)) == {package for package in packages if not package.startswith("ray")}
