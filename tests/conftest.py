"""Fixtures shared by all tests: the two model families as folders, and loaded engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny checkpoint folder of each family."""
    from tests.support.models import tiny_internvl_folder, tiny_qwen2_5_vl_folder

    root = tmp_path_factory.mktemp("models")
    return {"qwen2_5_vl": tiny_qwen2_5_vl_folder(root / "qwen"), "internvl3_5": tiny_internvl_folder(root / "intern")}


@pytest.fixture(scope="session")
def load_engine(folders):
    """load_engine(family, **settings): an engine of its own settings over weights that load once a family."""
    from engine import Engine, EngineConfig
    from engine.models import load_adapter

    adapters = {}

    def load(family: str, **settings) -> Engine:
        if family not in adapters:
            adapters[family] = load_adapter(EngineConfig(model=str(folders[family]), device="cpu"))
        config = EngineConfig(model=str(folders[family]), device="cpu", **settings)
        loaded = adapters[family]
        return Engine(type(loaded)(loaded.model, loaded.processor, config), config)

    return load
