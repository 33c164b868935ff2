"""Stage two: the language model learns to find needles, on videos or pictures that grow from a few groups to 64."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jobs.bundled_training.architecture import Architecture
from jobs.bundled_training.bank import COLOUR_NAMES
from jobs.bundled_training.gauges import Clock, Compass
from jobs.bundled_training.lessons import RECALL, FeatureBank, Lesson, draw_lesson
from jobs.bundled_training.optimizer import MuonAndAdamW
from pipeline.synthetic.vocabulary import DIGITS, PLURALS, SHAPES

_PASS_MARK = 0.85
_PRIMER_LEVELS = 2
_HINT_WEIGHT, _LOOKUP_WEIGHT = 0.5, 0.3
_EARLY_LAYERS = 2
_WINDOW_QUESTIONS = 120


def train_language(
    architecture: Architecture,
    model: Any,
    bank: FeatureBank,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: int,
    resumed: dict[str, Any] | None,
    save: Callable[[dict[str, Any]], None],
    log: Callable[[str], None],
    learning_rate: float = 1.5e-3,
) -> None:
    """Train the language model in place; the vision tower stays as it is.

    A length is passed when most colours, shapes and digits are named rightly at it; then the next one joins.
    Every step draws from its own seed, so a resumed training of as many steps goes the same way.

    Args:
        resumed: what an earlier start handed to `save`.
        save: called every 100 steps and after the last.
    """
    hidden = model.get_input_embeddings().embedding_dim
    gauge = Clock(hidden, seed) if architecture.timed else Compass(hidden, seed, architecture.lengths)
    parameters = [*model.model.language_model.parameters(), *gauge.parameters()]
    layers = model.model.language_model.layers
    optimizer = MuonAndAdamW(layers, parameters, steps=steps, learning_rate=learning_rate, weight_decay=0.05)
    progress, lengths = Progress(), architecture.lengths
    if resumed is None:
        name_what_is_seen(model, bank, tokenizer)
    else:
        model.load_state_dict(resumed["model"])
        gauge.load_state_dict(resumed["gauge"])
        optimizer.load_state_dict(resumed["optimizer"])
        progress = Progress(**(resumed["progress"] | {"scores": Scores(**resumed["progress"]["scores"])}))
    started = time.monotonic() - progress.seconds
    while progress.step < steps:
        progress.step += 1
        step, scores = progress.step, progress.scores
        rng = np.random.default_rng([seed, step])
        length = _draw_length(rng, progress, architecture)
        primer = progress.level < _PRIMER_LEVELS
        questions, with_options = min(14, 3 + length // 2), not primer and bool(rng.random() < 0.5)
        kinds = {kind: weight for kind, weight in architecture.kind_weights.items() if kind in (*RECALL, "glimpse", "where") or not primer}
        step_tokens = 1600 + 20 * length
        videos = max(4, step_tokens // (16 + 4 * length + (36 if with_options else 18) * questions))
        lesson = draw_lesson(
            rng,
            architecture,
            bank,
            tokenizer,
            groups=length,
            videos=videos,
            questions=questions,
            with_options=with_options,
            kind_weights=kinds,
        )
        labels = torch.where(lesson.targets != -100, lesson.targets, lesson.hints)
        places = labels != -100
        logits, early = logits_at(model, lesson, places)
        is_answer = (lesson.targets != -100)[places]
        weights = torch.where(is_answer, 1.0, _HINT_WEIGHT)
        losses = functional.cross_entropy(logits, labels[places], reduction="none")
        loss = (weights * losses).sum() / weights.sum() + gauge.loss(early, lesson) + _LOOKUP_WEIGHT * lookup_loss(model, lesson, early[-1])
        optimizer.descend(loss, step)
        scores.add(lesson, logits.detach().argmax(-1)[is_answer], length, loss.item(), losses[~is_answer].mean().item())
        if progress.level < len(lengths) - 1 and scores.passed(lengths[progress.level]):
            progress.level += 1
            log(f"language step {step}: on to {lengths[progress.level]} groups after {time.monotonic() - started:.0f} s")
        if step % 50 == 0:
            shown = lengths[progress.level] if step % 100 == 0 else architecture.short[1]
            log(f"language step {step}/{steps} {time.monotonic() - started:.0f} s {scores.line(shown)}")
        if step % 100 == 0 or step == steps:
            progress.seconds = time.monotonic() - started
            save(
                {
                    "model": model.state_dict(),
                    "gauge": gauge.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "progress": asdict(progress),
                }
            )


@torch.no_grad()
def name_what_is_seen(model: Any, bank: FeatureBank, tokenizer: PreTrainedTokenizerFast) -> None:
    """Start each word that names a colour, shape or digit at the mean feature of what it names, and queries like keys.

    So the first attention scores already say "this is what that word means". Left to chance, finding that takes longer than all the rest.
    """
    embedding = model.get_input_embeddings().weight
    for words in (COLOUR_NAMES, SHAPES, DIGITS):
        seen = [np.concatenate([rows for pair, rows in bank.needles.items() if word in pair]) for word in words]
        means = torch.stack([bank.features[torch.from_numpy(rows)].flatten(0, 1).mean(dim=0) for rows in seen])
        # What tells red from other colours is to be the word's meaning, not what tells any needle from none.
        for word, meaning in zip(words, functional.normalize(means - means.mean(dim=0), dim=1), strict=True):
            for name in {word, PLURALS.get(word, word)}:
                embedding[tokenizer.convert_tokens_to_ids(name)] = meaning
    for layer in model.model.language_model.layers:
        attention: Any = layer.self_attn
        heads = attention.k_proj.weight.view(-1, attention.head_dim, attention.k_proj.in_features)
        attention.q_proj.weight.copy_(heads.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1))


def logits_at(model: Any, lesson: Lesson, places: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits at some tokens of the questions, and hidden states after the first layers.

    Args:
        places: bool, shaped like `lesson.questions`.

    Returns:
        (places, vocabulary) and `_EARLY_LAYERS` times (videos, all tokens, hidden).
    """
    language = model.model.language_model
    prefix = language.embed_tokens(lesson.prefix).expand(len(lesson.features), -1, -1)
    questions = language.embed_tokens(lesson.questions)
    embedded = torch.cat([prefix, lesson.features, questions.flatten(1, 2)], dim=1)
    language.set_attn_implementation("packed_questions")
    out = language(
        inputs_embeds=embedded,
        position_ids=lesson.positions.squeeze(0),  # a single axis is no axis to transformers
        attention_mask={"full_attention": torch.tensor(lesson.questions.shape[1:])},
        use_cache=False,
        output_hidden_states=True,
    )
    language.set_attn_implementation("sdpa")
    asked = out.last_hidden_state[:, -questions.shape[1] * questions.shape[2] :].reshape(questions.shape)
    return model.lm_head(asked[places]), out.hidden_states[1 : 1 + _EARLY_LAYERS]


def lookup_loss(model: Any, lesson: Lesson, early: Tensor) -> Tensor:
    """How far an early layer is from knowing what was asked for, read as the last layer is.

    Args:
        early: hidden states (videos, all tokens, hidden).
    """
    places = lesson.lookups != -100
    asked = early[:, -places.shape[1] * places.shape[2] :].reshape(*places.shape, -1)[places]
    logits = model.lm_head(model.model.language_model.norm(asked))
    return functional.cross_entropy(logits, lesson.lookups[places], reduction="sum") / max(1, len(logits))


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal attention in which each question sees the prompt and video in front, and of the questions only itself.

    Args:
        query, key, value: (videos, heads, common + questions * question tokens, head_dim).
        attention_mask: the two numbers (questions, question tokens).
    """
    questions, width = attention_mask.tolist()
    common = query.shape[2] - questions * width
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    seen = functional.scaled_dot_product_attention(
        query[:, :, :common], key[:, :, :common], value[:, :, :common], is_causal=True, scale=scaling
    )
    query, own_key, own_value = (x[:, :, common:].unflatten(2, (questions, width)) for x in (query, key, value))
    to_own = query @ own_key.transpose(-1, -2)
    to_own = to_own.masked_fill(torch.ones(width, width, dtype=torch.bool).triu(1), float("-inf"))
    to_common = query.flatten(2, 3) @ key[:, :, :common].transpose(-1, -2)
    weights = (torch.cat([to_common, to_own.flatten(2, 3)], dim=-1) * scaling).softmax(dim=-1)
    asked = weights[..., :common] @ value[:, :, :common]
    asked = asked + (weights[..., common:].unflatten(2, (questions, width)) @ own_value).flatten(2, 3)
    return torch.cat([seen, asked], dim=2).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("packed_questions", _packed_attention)


@dataclass
class Progress:
    """How far training has come.

    Attributes:
        level: index into the architecture's lengths of the longest videos so far.
        seconds: training time, earlier runs included.
    """

    step: int = 0
    level: int = 0
    seconds: float = 0.0
    scores: Scores = field(default_factory=lambda: Scores())


@dataclass
class Scores:
    """Running share of right answers by kind, length and form.

    Attributes:
        shares, seen: of the last questions, how many were right; and how many questions there were.
        loss, hint_loss: running means.
    """

    shares: dict[tuple[str, int, str], float] = field(default_factory=dict)
    seen: dict[tuple[str, int, str], int] = field(default_factory=dict)
    loss: float = 0.0
    hint_loss: float = 0.0

    def add(self, lesson: Lesson, guesses: Tensor, length: int, loss: float, hint_loss: float) -> None:
        """Count a batch; an answer is right when each of its tokens is."""
        self.loss += 0.02 * (loss - self.loss) if self.loss else loss
        self.hint_loss += 0.02 * (hint_loss - self.hint_loss) if self.hint_loss else hint_loss
        due = lesson.targets != -100
        wrong = torch.zeros(lesson.targets.shape, dtype=torch.bool)
        wrong[due] = guesses != lesson.targets[due]
        failed = wrong.any(dim=-1)
        for video, asked in enumerate(lesson.asked):
            for index, question in enumerate(asked):
                key = (question.kind, length, "options" if question.options else "words")
                self.seen[key] = self.seen.get(key, 0) + 1
                share = self.shares.get(key, 0.0)
                self.shares[key] = share + (float(not failed[video, index]) - share) / min(self.seen[key], _WINDOW_QUESTIONS)

    def passed(self, length: int) -> bool:
        """Whether naming colours, shapes and digits at a length goes well enough for a longer one."""
        keys = [(kind, length, "words") for kind in ("colour", "shape", "digit")]
        return all(self.seen.get(k, 0) >= _WINDOW_QUESTIONS for k in keys) and self._mean(keys) >= _PASS_MARK

    def compares(self, length: int) -> bool:
        """Whether "is there" and options, at a length, are answered clearly better than by chance."""
        keys = [("exists", length, "words"), *((kind, length, "options") for kind in RECALL)]
        return self._mean(keys) >= _PASS_MARK

    def line(self, length: int) -> str:
        """Loss and right answers in percent, words/options, at one length."""
        shown = []
        for kind in sorted({kind for kind, _, _ in self.shares}):
            words, options = (100 * self.shares.get((kind, length, form), 0.0) for form in ("words", "options"))
            shown.append(f"{kind} {words:.0f}/{options:.0f}")
        return f"loss {self.loss:.3f} (hints {self.hint_loss:.3f}) at {length} groups: " + " ".join(shown)

    def _mean(self, keys: list[tuple[str, int, str]]) -> float:
        return sum(self.shares.get(k, 0.0) for k in keys) / len(keys)


def _draw_length(rng: np.random.Generator, progress: Progress, architecture: Architecture) -> int:
    """Mostly the longest so far; but comparing (exists, options) is learnt on short videos, where a step costs little."""
    reached = architecture.lengths[: progress.level + 1]
    if progress.level < _PRIMER_LEVELS or progress.scores.compares(architecture.short[1]):
        return reached[-1] if rng.random() < 0.6 else int(rng.choice(reached))
    return reached[-1] if rng.random() < 0.1 else int(rng.choice([length for length in architecture.short if length in reached]))
