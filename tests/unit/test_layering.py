"""Dependence runs one way, held by what a fresh interpreter has really imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIPELINE_ONLY = ("ray", "boto3", "botocore", "pyarrow", "av", "decord", "yaml")


def imported_by(statement: str) -> set[str]:
    """Names in sys.modules after a statement in a new interpreter."""
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def named_imports(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, inside functions as well."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


def test_the_engine_alone_needs_nothing_of_the_pipeline() -> None:
    found = imported_by("import " + ", ".join(modules("engine")))
    brought_by_transformers = {"yaml"}
    assert not found & {*PIPELINE_ONLY, "pipeline", "jobs"} - brought_by_transformers


def test_the_worker_needs_no_ray() -> None:
    found = imported_by("import pipeline.worker, pipeline.run, pipeline.plan, pipeline.progress")
    assert "ray" not in found
    assert "jobs" not in found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("engine", {*PIPELINE_ONLY, "pipeline", "jobs"}), ("pipeline", {"jobs"})],
)
def test_no_file_names_what_its_layer_must_not_know(package: str, forbidden: set[str]) -> None:
    guilty = {str(p): named_imports(p) & forbidden for p in (ROOT / package).rglob("*.py")}
    assert not {path: names for path, names in guilty.items() if names}


def test_only_the_dispatcher_names_ray() -> None:
    files = [p for package in ("engine", "pipeline", "jobs") for p in (ROOT / package).rglob("*.py")]
    users = {str(p.relative_to(ROOT)) for p in files if "ray" in named_imports(p)}
    assert users <= {"pipeline/dispatch.py", "pipeline/metrics.py"}
    assert "pipeline/dispatch.py" in users


def test_a_dry_run_starts_no_ray() -> None:
    assert "ray" not in imported_by("import jobs.answer")
