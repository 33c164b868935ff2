"""The cells of a grid, and the one process that fills them: each cell's output is that of the main job under the cell's settings."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, OutOfMemoryError
from engine.models import ModelAdapter, load_adapter
from engine.models.base import Encoded
from engine.policies import make_policy
from engine.types import VideoBlock
from jobs.evaluation.reading import ReadTogether
from jobs.evaluation.turns import Seat
from pipeline.attempts import Attempts
from pipeline.config import JobConfig, describe_errors
from pipeline.results import ResultStore, VideoResult, digest
from pipeline.run import JobFailedError, Run, RunSummary, StoppedError
from pipeline.storage import join_uri
from pipeline.task import VideoTask
from pipeline.weights import checkpoint_folder
from pipeline.worker import VideoWorker, WorkerLost

log = logging.getLogger("reelkeep.evaluate")


@dataclass(frozen=True)
class Cell:
    """One combination of settings, and the job that it is.

    Attributes:
        name: of its folder.
        config: `jobs.answer` with it gives the same tables.
        evicts: whether its policy does; the budget of one that doesn't means nothing.
        query_aware: whether its policy reads a video once a question.
    """

    name: str
    config: JobConfig
    evicts: bool
    query_aware: bool

    @property
    def engine(self) -> EngineConfig:
        """Its engine's settings."""
        return self.config.engine


def grid(
    config: JobConfig, output: str, models: Sequence[str], policies: Sequence[str], budgets: Sequence[int], blocks: Sequence[int]
) -> list[Cell]:
    """Every combination, in this order; a policy that evicts nothing comes once, not once a budget.

    Args:
        config: all other settings.
        output: folder or prefix under which each cell gets a folder.

    Raises:
        ConfigError: a policy or a value that there isn't.
    """
    cells: dict[str, Cell] = {}
    slugs = {model: _slug(model, models) for model in models}
    for model, policy, budget, block in itertools.product(models, policies, budgets, blocks):
        options = config.engine.policy_options if policy == config.engine.policy else {}
        made = make_policy(policy, options)
        evicts = made.evicts
        chosen = {"model": model, "policy": policy, "policy_options": options, "block_tokens": block}
        chosen["budget_tokens"] = budget if evicts else config.engine.budget_tokens  # means nothing then, and mustn't change with the list
        try:
            engine = EngineConfig(**(config.engine.model_dump() | chosen))
        except ValidationError as error:
            raise ConfigError("\n".join("engine." + line for line in describe_errors(error, EngineConfig))) from None
        name = f"{slugs[model]}-{policy}" + (f"-m{budget}" if evicts else "") + f"-b{block}"
        settings = {"engine": engine, "output": join_uri(output, "cells", name)}
        cells[name] = Cell(name, config.model_copy(update=settings), evicts, made.needs_question)
    return list(cells.values())


def _slug(model: str, models: Sequence[str]) -> str:
    def plain(name: str) -> str:
        return re.sub(r"[^A-Za-z0-9._]+", "_", name.rstrip("/").rpartition("/")[2]).strip("._")[:60] or "model"

    alike = sum(plain(other) == plain(model) for other in dict.fromkeys(models)) > 1
    return plain(model) + (f"_{digest(model)[:6]}" if alike else "")


class SharedVision:
    """The vision tower, run once a block for all cells of a model that read the very same block.

    Attributes:
        seconds: what the latest block took.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self.adapter, self.seconds = adapter, 0.0
        self._latest: tuple[VideoBlock, Encoded] | None = None

    def __call__(self, block: VideoBlock) -> Encoded:
        if self._latest is None or self._latest[0] is not block:
            self._latest = None
            started = time.perf_counter()
            piece = self.adapter.encode(block)
            if self.adapter.device.type == "cuda":
                torch.cuda.synchronize(self.adapter.device)
            self.seconds = time.perf_counter() - started
            self._latest = block, piece
        return self._latest[1]


class CellWorker(VideoWorker):
    """A worker whose rows tell what the video costs this cell alone: times of shared work in full, waiting for other cells not at all."""

    seat: Seat | None = None
    vision_s = 0.0

    def __init__(self, cell: Cell, job: Run, adapter: ModelAdapter, vision: SharedVision, together: ReadTogether) -> None:
        config = cell.config

        def encode(block: VideoBlock) -> Encoded:
            piece = vision(block)
            self.vision_s += vision.seconds
            return piece

        def seat() -> Seat:
            assert self.seat is not None
            return self.seat

        super().__init__(
            config,
            engine=Engine(type(adapter)(adapter.model, adapter.processor, config.engine), config.engine, encode),
            read=together.reader(seat),
            store=ResultStore(config.output, job.storage, job.run_id),
            attempts=Attempts(job.storage, config.output, job.run_id),
        )
        self.cell, self.together = cell, together

    def watch(self, task: VideoTask, attempt: int = 1) -> VideoResult:
        """As every worker does, the shared work's times put right."""
        self.vision_s = 0.0
        result = super().watch(task, attempt)
        if self.seat is not None and result.memory.get("blocks"):
            result.memory |= {"vision_s": self.vision_s, "decode_wait_s": self.together.decode_s[self.seat]}
        return result


def fill(cells: Sequence[Cell]) -> list[RunSummary]:
    """Do what is missing of every cell: a model at a time, a video at a time, all of its cells in lock-step.

    Raises:
        ConfigError, InputError: settings, manifest or a model can't work; the tables of the models before it were made.
        JobFailedError: the process can't go on; run it again to go on with what is missing.
        StoppedError: Ctrl-C; tables of what is done were made.
    """
    starts = [(cell, Run(cell.config)) for cell in cells]
    jobs = [(replace(cell, config=job.config), job) for cell, job in starts]
    with ExitStack() as held:
        for _, job in jobs:
            held.enter_context(job.held())
        summaries: dict[str, RunSummary] = {}
        try:
            for model in dict.fromkeys(cell.engine.model for cell in cells):
                of_model = [(cell, job) for cell, job in jobs if cell.engine.model == model]
                _fill_model(model, of_model)
                _free_memory()
                summaries |= {cell.name: job.finish() for cell, job in of_model}
        except KeyboardInterrupt:
            if lost := [cell.name for cell, job in jobs if job.lease.lost]:
                raise JobFailedError(f"{', '.join(lost)}: taken over by another job; what is done is kept") from None
            done = sum(len(job.done()) for _, job in jobs)
            for cell, job in jobs:
                if cell.name not in summaries:
                    job.finish(complete=False)
            raise StoppedError(
                f"stopped: {done} of {sum(job.total_videos for _, job in jobs)} videos are done, all cells together; "
                "run the same command again to do the rest"
            ) from None
        return [summaries[cell.name] for cell, _ in jobs]


def _fill_model(model: str, jobs: list[tuple[Cell, Run]]) -> None:
    pending = [(cell, job) for cell, job in jobs if job.pending]
    if not pending:
        log.info("%s: nothing to do, %d cells are done", model, len(jobs))
        return
    config, first = pending[0][0].config, pending[0][1]
    if config.pool.threads:
        torch.set_num_threads(config.pool.threads)
    adapter = load_adapter(config.engine, checkpoint_folder(config.engine, first.storage))
    vision, together = SharedVision(adapter), ReadTogether()
    workers = [(CellWorker(cell, job, adapter, vision, together), {task.video_id for task in job.pending}) for cell, job in pending]
    tasks = [task for task in first.manifest.tasks if any(task.video_id in todo for _, todo in workers)]
    for number, task in enumerate(tasks, 1):
        started = time.monotonic()
        at_work = [worker for worker, todo in workers if task.video_id in todo]
        _watch(task, at_work, together, first.geometry, config)
        took = time.monotonic() - started
        log.info("%s: video %d of %d in %.1f s, %d cells", model, number, len(tasks), took, len(at_work), extra={"video_id": task.video_id})


def _watch(task: VideoTask, workers: list[CellWorker], together: ReadTogether, geometry: Any, config: JobConfig) -> None:
    def work(worker: CellWorker) -> Callable[[Seat], None]:
        def watch(seat: Seat) -> None:
            worker(task)

        return watch

    while workers:
        for worker in workers:
            worker.seat = Seat(work(worker), worker.cell.name)
        seats = [worker.seat for worker in workers if worker.seat is not None]
        together.watch(task, geometry, config, seats)
        again = []
        for worker, error in _failures(workers):
            if not isinstance(error, WorkerLost):
                raise error
            if not _out_of_memory(error):
                raise JobFailedError(f"{worker.cell.name}: {error}; what is done is kept, run the same command again to go on") from error
            again.append(worker)
        for worker in again:
            worker.seat = None  # its error keeps every tensor of the failed pass alive
        workers = again
        if again:
            del seats, error
            _free_memory()


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error came from memory that ran out, which the next try begins with again; a lost GPU never comes back."""
    while error is not None:
        if isinstance(error, OutOfMemoryError | MemoryError | torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_memory() -> None:
    gc.collect()  # engines and their seats hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _failures(workers: list[CellWorker]) -> Iterator[tuple[CellWorker, BaseException]]:
    for worker in workers:
        if worker.seat is not None and worker.seat.error is not None:
            yield worker, worker.seat.error
