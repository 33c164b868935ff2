"""The tables a job writes: columns, types and what each means. Plain Parquet types, which pandas and DuckDB read alike."""

from __future__ import annotations

import pyarrow as pa


def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": description})


_RUN_ID = _field("run_id", pa.string(), "The run that watched the video; an earlier one where its work was taken over.", nullable=False)
_VIDEO_ID = _field("video_id", pa.string(), "The video, as the manifest names it.", nullable=False)
_URI = _field("uri", pa.string(), "Where the video was read from.", nullable=False)
_BUDGET = _field("budget_tokens", pa.int64(), "Entries each layer kept per KV head, protected prefix included.")
_WARNINGS = _field("warnings", pa.list_(pa.string()), "Everything that happened besides the plain path, in words; empty on the plain path.")
_EXTRA = _field("extra", pa.string(), "The manifest's further columns, as one JSON object; null when there are none.")

ANSWERS = pa.schema(
    [
        _RUN_ID,
        _VIDEO_ID,
        _URI,
        _field("question_id", pa.string(), "The question, unique within its video.", nullable=False),
        _field("question", pa.string(), "The question's text, byte for byte.", nullable=False),
        _field("options", pa.list_(pa.string()), "Answers to choose from, in order (A, B, ...); empty for a free-form question."),
        _field(
            "answer",
            pa.string(),
            "What the model said; the chosen option's text for a multiple-choice question; null when there is an error.",
        ),
        _field("choice", pa.string(), "Letter of the chosen option; null for free-form questions and errors."),
        _field("choice_probabilities", pa.list_(pa.float64()), "One per option, summing to 1; empty for free-form questions and errors."),
        _field("expected", pa.string(), "The right answer as the manifest gives it (an option's text or letter); null when it gives none."),
        _field("error", pa.string(), "Why there is no answer; null when there is one."),
        _field("finish_reason", pa.string(), "stop, length (cut off at max_new_tokens), choice, or error."),
        _field("model", pa.string(), "Model that answered."),
        _field("policy", pa.string(), "Eviction policy."),
        _BUDGET,
        _field("prompt_tokens", pa.int64(), "Tokens of this question, template included, the video's not counted."),
        _field("answer_tokens", pa.int64(), "Tokens generated."),
        _field("ttft_s", pa.float64(), "Seconds from the start of the question batch to this answer's first token."),
        _field("answer_s", pa.float64(), "Seconds from the start of the question batch to this answer's last token."),
        _field("cache_id", pa.string(), "Compressed cache that answered, where caches are kept; else null."),
        _EXTRA,
    ]
)
"""A row a question."""

MEMORY = pa.schema(
    [
        _RUN_ID,
        _VIDEO_ID,
        _URI,
        _field("duration_s", pa.float64(), "Length of what was watched, seconds."),
        _field("frames", pa.int64(), "Frames taken."),
        _field("groups", pa.int64(), "Temporal groups read."),
        _field("blocks", pa.int64(), "Prefill steps."),
        _field(
            "resumed_s",
            pa.float64(),
            "Time up to which an earlier attempt had read it, in the file's own clock; reading went on behind it. Null when read in one go.",
        ),
        _field("visual_tokens", pa.int64(), "Tokens of the video."),
        _field("total_tokens", pa.int64(), "Tokens read before the questions, text included."),
        _field("model", pa.string(), "Model that watched."),
        _field("policy", pa.string(), "Eviction policy."),
        _BUDGET,
        _field("kv_peak_bytes", pa.int64(), "Most bytes of keys and values held at once, measured."),
        _field("kv_predicted_bytes", pa.int64(), "The bound predicted before the work; kv_peak_bytes stays at or under it."),
        _field("kv_full_bytes", pa.int64(), "Bytes that a full cache would have held."),
        _field("device_peak_bytes", pa.int64(), "Peak of CUDA allocations; 0 on CPU."),
        _field("process_peak_bytes", pa.int64(), "Peak resident memory of the process so far."),
        _field("vision_s", pa.float64(), "Seconds in the vision tower."),
        _field("prefill_s", pa.float64(), "Seconds in the language model while prefilling, eviction included."),
        _field("evict_s", pa.float64(), "Seconds in eviction alone."),
        _field("decode_wait_s", pa.float64(), "Seconds the engine waited for frames."),
        _field("decoder", pa.string(), "Decoder that served the video."),
        _WARNINGS,
        _field("attempts", pa.int64(), "Tries since it last got on (its latest checkpoint), this one included."),
        _field("error", pa.string(), "Why the video has no answers; null when it was answered."),
        _EXTRA,
    ]
)
"""A row a video."""

TRACE = pa.schema(
    [
        _RUN_ID,
        _VIDEO_ID,
        _field("block", pa.int64(), "Index of the prefill step, from 0.", nullable=False),
        _field("time_s", pa.float64(), "Presentation time that the step reached, in the file's own clock."),
        _field("block_tokens", pa.int64(), "Tokens the step added."),
        _field("seen_tokens", pa.int64(), "Tokens read so far, prefix included."),
        _field("kept_tokens", pa.int64(), "Entries each layer held per KV head after the step."),
        _field("kv_held_bytes", pa.int64(), "Most bytes of keys and values held during the step."),
        _field("kv_full_bytes", pa.int64(), "Bytes a full cache would hold after the step."),
        _field("device_peak_bytes", pa.int64(), "Peak of CUDA allocations so far; 0 on CPU."),
        _field("process_peak_bytes", pa.int64(), "Peak resident memory of the process so far."),
        _field("vision_s", pa.float64(), "Seconds in the vision tower."),
        _field("prefill_s", pa.float64(), "Seconds in the language model, eviction included."),
        _field("evict_s", pa.float64(), "Seconds in eviction alone."),
    ]
)
"""A row a block, written on request."""

QUARANTINE = pa.schema(
    [
        _RUN_ID,
        _VIDEO_ID,
        _URI,
        _field("attempts", pa.int64(), "Tries that were made."),
        _field("error", pa.string(), "Why the video was set aside.", nullable=False),
        _field(
            "stage", pa.string(), "Where it failed last: fetch, probe, decode, prefill, cache or answer; null when nobody lived to say."
        ),
        _field("last_error", pa.string(), "What happened there, the last time."),
        _field("questions", pa.int64(), "Questions left unanswered."),
        _EXTRA,
    ]
)
"""A row a video that has no answers."""

TABLES = {"answers": ANSWERS, "memory": MEMORY, "trace": TRACE, "quarantine": QUARANTINE}


def columns_table(schema: pa.Schema) -> str:
    """The documentation of a table: Markdown, a line a column."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in schema:
        lines.append(f"| `{column.name}` | {_type_name(column.type)} | {column.metadata[b'description'].decode()} |")
    return "\n".join(lines)


def _type_name(kind: pa.DataType) -> str:
    return f"list of {_type_name(kind.value_type)}" if pa.types.is_list(kind) else str(kind)
