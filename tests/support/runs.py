"""Finished runs without a model: results committed and tables made by the job's own code."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pipeline.config import JobConfig
from pipeline.results import ResultStore, VideoResult, fingerprint
from pipeline.storage import Storage
from pipeline.task import ManifestQuestion, VideoTask

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>\u2028\u2029]]>",
    "javascript:alert(1)' onmouseover='x\" {{ 7*7 }} ${7*7} {% raw %}",
    "\u202egnp.exe \x1b[31m \u0007 & &lt;",
)


def make_run(output: Path, videos: int, questions: int, *, hostile: bool = False, seed: int = 0, uri: str = "s3://archive/{}.mp4") -> Path:
    """Write the output of a run of so many videos, every twentieth of them set aside.

    Args:
        hostile: texts that would do harm on a page that trusts them, everywhere a text can stand.
    """
    made = random.Random(seed)
    config = JobConfig(manifest="m.jsonl", output=str(output), trace=False)
    store = ResultStore(str(output), Storage(), "20260301T220000Z_c0ffee")
    started_at = datetime.now(timezone.utc) - timedelta(hours=3)
    store.start()
    tasks = []
    for number in range(videos):
        name = f"camera{number % 7}/{number:04d}" + (HOSTILE[number % 4].replace("\n", " ") if hostile else "")
        asked = tuple(_question(i, number, made, hostile) for i in range(questions))
        tasks.append(VideoTask(video_id=name, uri=uri.format(number), questions=asked, size_bytes=1, content_tag="1"))
        store.commit(_result(config, tasks[-1], number, made, hostile))
    store.compact(config, tasks, started_at)
    return output


def _question(index: int, video: int, made: random.Random, hostile: bool) -> ManifestQuestion:
    bad = HOSTILE[(index + video) % len(HOSTILE)] if hostile else ""
    if index % 2:
        return ManifestQuestion(question_id=f"q{index}", question=f"What happens after {index} minutes? {bad}")
    options = ("red" + bad, "blue", "white", "none of these")
    return ManifestQuestion(
        question_id=f"q{index}", question=f"What colour is the car at the gate? {bad}", options=options, expected=made.choice("ABC")
    )


def _result(config: JobConfig, task: VideoTask, number: int, made: random.Random, hostile: bool) -> VideoResult:
    bad = HOSTILE[number % len(HOSTILE)] if hostile else ""
    name = fingerprint(config, task)
    if number % 20 == 19:
        error = f"decode: the stream is damaged at 12.3 s {bad}"
        answers = [{"question_id": q.question_id, "error": error, "finish_reason": "error"} for q in task.questions]
        memory = {"attempts": 3}
        return VideoResult(task.video_id, name, answers, memory, error=error, stage="decode", last_error=error)
    tokens = int(10 ** made.uniform(3, 6))
    memory = {
        "duration_s": tokens / 20,
        "frames": tokens // 128,
        "visual_tokens": tokens,
        "total_tokens": tokens + 40,
        "kv_peak_bytes": min(57_344 * tokens, 57_344 * 2048 + 784 * 2048),
        "kv_full_bytes": 57_344 * tokens,
        "vision_s": tokens / 9000,
        "prefill_s": tokens / 5000,
        "evict_s": tokens / 60000,
        "decode_wait_s": tokens / 40000,
        "decoder": "pyav",
        "attempts": 1 + (number % 11 == 0),
        "warnings": [f"rotated by 90 degrees {bad}"] if number % 9 == 0 else [],
    }
    return VideoResult(task.video_id, name, [_answer(q, made, bad) for q in task.questions], memory)


def _answer(question: ManifestQuestion, made: random.Random, bad: str) -> dict[str, Any]:
    row: dict[str, Any] = {"question_id": question.question_id, "error": None, "answer_tokens": 12, "answer_s": made.uniform(0.1, 3.0)}
    if not question.options:
        long = made.random() < 0.1
        text = f"A lorry turns left and leaves through the gate. {bad}"
        return row | {"answer": text, "finish_reason": "length" if long else "stop"}
    shares = [made.random() for _ in question.options]
    shares = [share / sum(shares) for share in shares]
    best = max(range(len(shares)), key=shares.__getitem__)
    chosen = {"answer": question.options[best], "choice": "ABCD"[best], "choice_probabilities": shares}
    return row | chosen | {"finish_reason": "choice"}
