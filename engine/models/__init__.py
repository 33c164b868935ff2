"""The only place that names a model family. One file a family, found by the checkpoint's `model_type`."""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import FrameGeometry
from engine.models.base import ModelAdapter, kv_dimensions
from engine.policies import make_policy

__all__ = [
    "ModelAdapter",
    "adapter_class",
    "checkpoint_digest",
    "choose_dtype",
    "kv_dimensions",
    "load_adapter",
    "load_geometry",
    "model_path",
]

DIGEST_BYTES = 1 << 16
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
BUNDLED = Path(__file__).parents[1] / "bundled" / "qwen2_5_vl_tiny"


def model_path(config: EngineConfig) -> str:
    """Folder or hub id to load from; "bundled" is the project's own test model."""
    if config.model != "bundled":
        if not (os.path.exists(config.model) or _HUB_ID.fullmatch(config.model)):
            raise ConfigError(f"engine.model={config.model}: no such folder, and no hub id (OWNER/NAME) either; check the spelling")
        return config.model
    if not (BUNDLED / "config.json").exists():
        raise ConfigError("engine.model='bundled': this installation carries no bundled model; name a folder or a hub id")
    return str(BUNDLED)


@lru_cache
def checkpoint_digest(model: str) -> str:
    """What is in the checkpoint folder that `engine.model` names, by names, sizes and both ends of each file: the same on every machine, and quick for any size.

    A model card (*.md) isn't taken in: another wording makes no other answers.

    Returns:
        16 hex digits; "" for a hub id, whose revision says which weights they are.
    """
    digest = hashlib.sha256()
    files = sorted(file for file in (BUNDLED if model == "bundled" else Path(model)).glob("*") if file.is_file() and file.suffix != ".md")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as content:
            digest.update(content.read(DIGEST_BYTES))
            content.seek(max(0, size - DIGEST_BYTES))
            digest.update(content.read(DIGEST_BYTES))
    return digest.hexdigest()[:16] if files else ""


def adapter_class(model_type: str) -> type[ModelAdapter]:
    """The adapter that opens checkpoints of this type.

    Raises:
        ConfigError: no family here does.
    """
    known: list[str] = []
    for module in pkgutil.iter_modules(__path__):
        if module.name == "base":
            continue
        adapter = importlib.import_module(f"{__name__}.{module.name}").Adapter
        if model_type in adapter.model_types:
            return adapter
        known += adapter.model_types
    raise ConfigError(f"engine.model: model_type {model_type!r} is not supported; supported are {', '.join(sorted(known))}")


def load_geometry(config: EngineConfig, folder: str | Path | None = None) -> FrameGeometry:
    """The frame rules of `config.model`, from its configuration and processor alone; `folder` as in `load_adapter`.

    Raises:
        ConfigError: as `load_adapter`, as far as can be told without weights.
    """
    hf_config, processor = _config_and_processor(config, folder)
    adapter = adapter_class(hf_config.model_type)
    _check_budget(adapter, processor, config)
    return adapter.make_geometry(hf_config, processor)


def load_adapter(config: EngineConfig, folder: str | Path | None = None) -> ModelAdapter:
    """Load weights and processor.

    Args:
        folder: where this machine has the files of `config.model`; None lets transformers find them.

    Raises:
        ConfigError: the checkpoint can't be found or opened, the device isn't there, the family is unknown, or the budget is too small.
    """
    hf_config, processor = _config_and_processor(config, folder)
    adapter = adapter_class(hf_config.model_type)
    _check_budget(adapter, processor, config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device.type)
    try:
        model = adapter.load_model(
            str(folder or model_path(config)),
            config=hf_config,
            dtype=dtype,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        model = model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"engine.model={config.model}: weights could not be loaded: {_first_line(error)}") from error
    return adapter(model, processor, config)


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """The type of weights and cache for `engine.dtype` on a device of that name; touches no device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.float32 if device.startswith("cpu") else torch.bfloat16


def choose_device(name: str) -> torch.device:
    """The device for `engine.device`.

    Raises:
        ConfigError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"engine.device={name} can't be used here: {_first_line(error)}; use auto or cpu") from error


def _config_and_processor(config: EngineConfig, folder: str | Path | None) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoProcessor

    path = str(folder or model_path(config))
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        return AutoConfig.from_pretrained(path, **options), AutoProcessor.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"engine.model={config.model}: no usable checkpoint there: {_first_line(error)}; "
            "give a folder with config.json and processor files, or a hub id that this machine can reach"
        ) from error


def _check_budget(adapter: type[ModelAdapter], processor: Any, config: EngineConfig) -> None:
    """Refuse a budget that the prompt's own tokens, which are never evicted, would use up."""
    prefix = max(adapter.prefix_tokens(processor, config, kind) for kind in ("video", "image"))
    if config.budget_tokens <= prefix and make_policy(config.policy, config.policy_options).evicts:
        raise ConfigError(
            f"engine.budget_tokens={config.budget_tokens} must exceed the {prefix} tokens of the prompt, which are never evicted; raise it to "
            f"{prefix} and the tokens you want to keep of a video"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
