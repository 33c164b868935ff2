"""Questions asked of one compressed cache, batched. The cache is read, never changed: each question has a tail of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.compressed import CompressedVideo
from engine.config import AnswerConfig
from engine.errors import InputError
from engine.models.base import LETTERS, ModelAdapter
from engine.types import Answer, FinishReason, Question

MAX_OPTIONS = len(LETTERS)


def answer(adapter: ModelAdapter, compressed: CompressedVideo, questions: Sequence[Question], config: AnswerConfig) -> list[Answer]:
    """Answer questions in batches of `config.batch_questions`.

    Returns:
        One answer a question, in order, equal to what each gets alone. A question that can't be answered has `text` None and `error`.

    Raises:
        InputError: a query-aware cache was kept for another question.
    """
    for question in questions:
        if compressed.question is not None and (question.text, *question.options) != compressed.question:
            raise InputError(
                f"this cache was kept for the question {' / '.join(compressed.question)!r} (a query-aware policy), not for "
                f"{' / '.join((question.text, *question.options))!r}; prefill again with question=, or use a query-agnostic policy "
                "such as keydiff"
            )
    size = config.batch_questions
    return [a for i in range(0, len(questions), size) for a in _together(adapter, compressed, questions[i : i + size], config)]


def _together(adapter: ModelAdapter, compressed: CompressedVideo, questions: Sequence[Question], config: AnswerConfig) -> list[Answer]:
    """One batch, or its halves when the device has no room for its tails."""
    try:
        return _Batch(adapter, compressed, questions, config).run()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        full = str(error).splitlines()[0]  # the retry waits until the error, and with it the tensors of the failed pass, are gone
    if len(questions) == 1:
        remedy = "shorten it, lower engine.budget_tokens or answer.max_new_tokens, or use a larger device"
        return [Answer(questions[0].question_id, None, finish_reason="error", error=f"no room to answer this question: {full}; {remedy}")]
    half = (len(questions) + 1) // 2
    compressed.trace.warnings.append(f"{len(questions)} questions answered in batches of {half}: out of memory")
    return [a for part in (questions[:half], questions[half:]) for a in _together(adapter, compressed, part, config)]


class _Batch:
    """Some questions, decoded together: one row each, right-padded, over the shared kept entries."""

    def __init__(self, adapter: ModelAdapter, compressed: CompressedVideo, questions: Sequence[Question], config: AnswerConfig):
        self.adapter, self.cache, self.config = adapter, compressed.cache, config
        self.questions, self.start_position = questions, compressed.state.cursor.next
        state = compressed.state
        close = adapter.tokenize(adapter.close_text(state.kind), special=True) if state.open and state.kind else []
        self.prompts = [close + adapter.question_ids(q) if _is_text(q) else close[:1] or [0] for q in questions]
        self.problems = [self.problem(row) for row in range(len(questions))]
        self.prompt_tokens = [len(p) for p in self.prompts]
        # A question that can't be put takes one token's room in the batch, however long it is.
        self.prompts = [p if problem is None else p[:1] for p, problem in zip(self.prompts, self.problems, strict=True)]
        self.counts = torch.tensor([len(p) for p in self.prompts], device=adapter.device)
        self.tokens: list[list[int]] = [[] for _ in questions]
        self.first_s, self.last_s = [0.0] * len(questions), [0.0] * len(questions)

    def run(self) -> list[Answer]:
        """Read the questions, score the choices, write the free-form answers token by token."""
        started = time.perf_counter()
        mark = self.cache.mark()
        try:
            longest = max((int(self.counts[row]) + self.config.max_new_tokens for row in self.rows(with_options=False)), default=0)
            self.cache.begin_tail(len(self.questions), max(longest, int(self.counts.max())))
            logits = self.read_questions()
            for row, finite in enumerate(torch.isfinite(logits).all(-1).tolist()):
                self.note_time(row, started)
                if self.problems[row] is None and not finite:
                    self.problems[row] = "the model returned NaN or infinite logits; load it in bfloat16 or float32"
            choices = {row: self.choose(row, logits[row]) for row in self.rows(with_options=True)}
            finished = self.write(logits, started)
        finally:
            self.cache.roll_back(mark)
        return [self.result(row, choices.get(row), finished) for row in range(len(self.questions))]

    def problem(self, row: int) -> str | None:
        """Why a question can't be put to the model, if so."""
        question, limit = self.questions[row], self.adapter.position_limit
        if not _is_text(question):
            return "the question or an option holds a lone surrogate, which is no character; remove it"
        if not question.text.strip():
            return "the question is empty; give it a text"
        if len(question.options) > MAX_OPTIONS:
            return f"{len(question.options)} options are more than the {MAX_OPTIONS} letters; split the question"
        if len(question.options) == 1:
            return "one option leaves nothing to choose; give at least two, or none for a free-form answer"
        if self.start_position + len(self.prompts[row]) + self.config.max_new_tokens > limit:
            return (
                f"the question's {len(self.prompts[row])} tokens and answer.max_new_tokens={self.config.max_new_tokens} reach past the model's "
                f"last position {limit} (engine.position_limit) behind this video; shorten them or the video"
            )
        return None

    def rows(self, *, with_options: bool) -> list[int]:
        """Answerable questions of one kind."""
        return [r for r, q in enumerate(self.questions) if self.problems[r] is None and bool(q.options) == with_options]

    def read_questions(self) -> Tensor:
        """(questions, vocabulary) logits behind each question's last token."""
        width = int(self.counts.max())
        padded = [p + [p[-1]] * (width - len(p)) for p in self.prompts]
        embeds = torch.stack([self.adapter.embed_text(p) for p in padded])
        positions = self.start_position + torch.arange(width, device=embeds.device).expand(len(padded), -1)
        self.cache.extend_tail(self.counts)
        hidden = self.forward(embeds, positions)
        return self.adapter.logits(hidden[torch.arange(len(padded), device=hidden.device), self.counts - 1])

    def write(self, logits: Tensor, started: float) -> dict[int, bool]:
        """Decode free-form answers until each has ended or is cut; tells which ended by themselves."""
        stop, ended = self.adapter.stop_ids(), {}
        writing = self.rows(with_options=False)
        ones = torch.ones_like(self.counts)
        generators = {row: self.generator(self.questions[row]) for row in writing}
        for step in range(self.config.max_new_tokens):
            likeliest = logits.argmax(-1).tolist()
            for row in list(writing):
                token = likeliest[row] if self.config.temperature == 0 else self.sample(logits[row], generators[row])
                self.note_time(row, started)
                if token in stop:
                    ended[row] = True
                    writing.remove(row)
                else:
                    self.tokens[row].append(token)
            if not writing or step + 1 == self.config.max_new_tokens:
                break
            last = [tokens[-1] if tokens else self.prompts[row][-1] for row, tokens in enumerate(self.tokens)]
            self.cache.extend_tail(ones)
            positions = (self.start_position + self.counts + step)[:, None]
            logits = self.adapter.logits(self.forward(self.adapter.embed_text(last)[:, None], positions)[:, 0])
            for row, finite in enumerate(torch.isfinite(logits).all(-1).tolist()):
                if row in writing and not finite:
                    self.problems[row] = (
                        f"the model returned NaN or infinite logits after {step + 1} tokens; load it in bfloat16 or float32"
                    )
                    writing.remove(row)
        return ended

    def forward(self, embeds: Tensor, positions: Tensor) -> Tensor:
        """The decoder over new tokens of every row: positions (questions, tokens), equal on all axes."""
        return self.adapter.forward(embeds, positions[..., None].expand(-1, -1, self.adapter.axes), self.cache)

    def choose(self, row: int, logits: Tensor) -> Tensor:
        """(options,) probabilities from the logits of the option letters."""
        letters = self.adapter.letter_ids(len(self.questions[row].options))
        return torch.softmax(logits[letters], dim=-1)

    def sample(self, logits: Tensor, generator: torch.Generator) -> int:
        """The next token, from the nucleus of `top_p`."""
        spread = (logits - logits.max()).double().cpu() / self.config.temperature
        ordered, ids = torch.softmax(spread, dim=-1).sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= self.config.top_p
        outside[0] = False  # the likeliest token stays, however small top_p is
        return int(ids[torch.multinomial(ordered.masked_fill(outside, 0.0), 1, generator=generator)])

    def generator(self, question: Question) -> torch.Generator:
        """A sampler that depends on the seed and the question alone, not on its place in the batch."""
        text = "\x1f".join([str(self.config.seed), question.text, *question.options])
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def note_time(self, row: int, started: float) -> None:
        """Seconds since the batch began, to the row's latest token."""
        self.last_s[row] = time.perf_counter() - started
        self.first_s[row] = self.first_s[row] or self.last_s[row]

    def result(self, row: int, choice: Tensor | None, ended: dict[int, bool]) -> Answer:
        """The finished answer of one row."""
        question = self.questions[row]
        blank = Answer(
            question.question_id,
            None,
            finish_reason="error",
            prompt_tokens=self.prompt_tokens[row],
            ttft_s=self.first_s[row],
            answer_s=self.last_s[row],
            error=self.problems[row],
        )
        if self.problems[row] is not None:
            return blank
        if choice is not None:
            best = int(choice.argmax())
            return replace(
                blank,
                text=question.options[best],
                choice=LETTERS[best],
                choice_probabilities=tuple(choice.tolist()),
                finish_reason="choice",
                answer_tokens=1,
            )
        text = self.adapter.tokenizer.decode(self.tokens[row], skip_special_tokens=True).strip()
        reason: FinishReason = "stop" if ended.get(row) else "length"
        return replace(blank, text=text, finish_reason=reason, answer_tokens=len(self.tokens[row]))


def _is_text(question: Question) -> bool:
    """Whether all of a question can be written as UTF-8, which tokenizers need."""
    try:
        "".join((question.text, *question.options)).encode()
    except UnicodeEncodeError:
        return False
    return True
