"""The engine's settings, each with its unit, default and bound."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerConfig(BaseModel):
    """How answers are generated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_new_tokens: int = Field(64, ge=1, description="Longest free-form answer, in tokens; a longer one is cut and marked `length`.")
    temperature: float = Field(0.0, ge=0.0, description="0 decodes greedily; above 0 samples.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling mass; only used when temperature > 0.")
    seed: int = Field(0, ge=0, description="Seed of the sampler, combined with each question's text so that order doesn't matter.")
    batch_questions: int = Field(32, ge=1, description="Questions of one video decoded together.")


class EngineConfig(BaseModel):
    """A model and the memory it may use."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(
        "bundled",
        description="Hub id, folder or s3:// prefix of a Qwen2.5-VL or InternVL3.5 checkpoint; `bundled` is the tiny test model shipped with the project.",
    )
    revision: str | None = Field(
        None,
        description="Hub revision (branch, tag or commit); a commit makes runs repeatable. Of an s3:// prefix: a digest of its files, which a "
        "job finds by itself and records; given here, other files are refused.",
    )
    trust_remote_code: bool = Field(False, description="Run code from the checkpoint. Off: only transformers' own classes are used.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and cache. auto: float32 on CPU, bfloat16 on CUDA."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    attention: Literal["auto", "fused", "eager"] = Field(
        "auto",
        description="Attention kernel: fused (PyTorch's flash or memory-efficient kernels) or eager (plain matrix products). auto picks fused where it runs.",
    )
    policy: str = Field(
        "keydiff",
        description="Eviction policy: the name of a file in engine/policies, such as keydiff, coverage, snapkv or full; a wrong name is answered with all of them.",
    )
    policy_options: dict[str, float | int | str | bool] = Field({}, description="Keyword options of the policy, e.g. {seed: 1} for random.")
    budget_tokens: int = Field(
        1024, ge=1, le=2**31 - 1, description="Entries each layer keeps per KV head after a block, protected prompt prefix included."
    )
    block_tokens: int = Field(
        784, ge=1, le=2**31 - 1, description="Tokens read between two evictions; blocks end on whole temporal groups or tiles."
    )
    alignment: Literal["group", "none"] = Field(
        "group",
        description="group: blocks are whole temporal groups or tiles. none: blocks of exactly block_tokens, structure ignored (for comparison).",
    )
    compress: Literal["during", "after"] = Field(
        "during",
        description="during: evict while prefilling. after: one full prefill, then one eviction (for comparison; its peak is the full cache).",
    )
    position_limit: int | None = Field(
        None,
        ge=1,
        description="Largest rotary position allowed; default: the checkpoint's max_position_embeddings. Input that would pass it is refused.",
    )
    system_prompt: str | None = Field(None, description="System prompt; default: the model family's own.")
    answer: AnswerConfig = AnswerConfig()
