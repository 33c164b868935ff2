"""The Ray Data graph: plan on CPUs, longest video first, one video a row to a pool of engines. The only module that knows Ray, metrics aside."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

# Ray reads these when it is imported or started; what the user has set stands.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

import pyarrow as pa
import ray
import ray.data
from ray.autoscaler.sdk import request_resources
from ray.data import ActorPoolStrategy, DataContext, ExecutionResources
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.errors import ConfigError, ReelkeepError
from engine.geometry import FrameGeometry
from pipeline.config import JobConfig
from pipeline.logs import Forwarder, set_up_logging, show_forwarded
from pipeline.metrics import EngineMetrics, RunMetrics, outcome_of
from pipeline.plan import VideoPlan, plan_video
from pipeline.progress import Progress, ProgressLine
from pipeline.results import fingerprint
from pipeline.room import DECODE_CPUS, PLAN_CPUS, Room, find_room, first_bundles
from pipeline.run import JobFailedError, Run, RunSummary, StoppedError
from pipeline.stopping import sigterm_like_ctrl_c
from pipeline.storage import split_s3
from pipeline.stream import Message, StageError, StreamTail, read_video
from pipeline.task import VideoTask
from pipeline.worker import VideoWorker, WorkerLost

log = logging.getLogger("reelkeep.dispatch")

NODES_ASKED_EVERY_S = 5.0
WAITING_TOLD_EVERY_S = 60.0
LOAD_MEASURED_EVERY_S = 5.0
DECODER_WAIT_S = 120.0
"""A decode task that has not begun by then finds no free CPU."""
LINES_KEPT = 10_000
PLANNED_AT_ONCE = 16
_GO_ON = "what is done is kept, run the same command again to go on"
_NOTHING_SEEN = {"answered": 0, "unanswered": 0, "video_s": 0.0, "tokens": 0}
_OWN_ERROR = re.compile(r"^(?:engine|pipeline)\.[\w.]+: (.+)$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^(?!ray\.data)[\w.]+(?:Error|Exception): .+$", re.MULTILINE)
LOCAL_OBJECT_STORE_BYTES = 512 * 2**20
"""A few blocks of frames per engine and nothing else live in the object store."""


def run(config: JobConfig) -> RunSummary:
    """Do what is missing of a job, on the Ray cluster that RAY_ADDRESS names or else on this machine.

    Raises:
        ConfigError, InputError: settings, manifest, model or cluster can't work; no video was begun.
        JobFailedError: the job as a whole failed; run it again to go on with what is missing.
        StoppedError: Ctrl-C or SIGTERM; tables of what is done were made.
    """
    job = Run(config)
    with job.held():
        if job.pending:
            # Ray puts a handler of its own in place when it starts, so ours comes after it.
            with _stopping_politely(job), _cluster(job.config), sigterm_like_ctrl_c():
                _watch_all(job, _find_room_soon(job.config, len(job.pending)))
        return job.finish()


def _find_room_soon(config: JobConfig, videos: int) -> Room:
    """`find_room`, patient with a cluster whose nodes are still to come, and asks for them; a machine of our own has all it will ever have."""
    grows = bool(os.environ.get("RAY_ADDRESS"))
    with _nodes_requested(config, videos) if grows else nullcontext():
        room = _awaited_room(config, videos, grows)
    cluster = ray.cluster_resources()
    log.info("%s; the cluster has %g CPUs and %g GPUs", room, cluster.get("CPU", 0), cluster.get("GPU", 0))
    if grows and not room.num_gpus and config.pool.num_gpus is None and config.engine.device == "auto":
        log.warning(
            "no GPU has joined the cluster, so engines run on CPU; set engine.device=cuda to wait for GPUs, or cpu if this is meant"
        )
    return room


def _awaited_room(config: JobConfig, videos: int, grows: bool) -> Room:
    began_s = told_s = time.monotonic()
    while True:
        try:
            return find_room(config, ray.cluster_resources(), videos, grows=grows)
        except ConfigError as error:
            now_s = time.monotonic()
            if not grows or now_s - began_s >= config.pool.cluster_wait_s:
                raise
            if told_s == began_s or now_s - told_s >= WAITING_TOLD_EVERY_S:
                log.warning(
                    "%s; waiting for nodes to join, %.0f of pool.cluster_wait_s=%g s", error, now_s - began_s, config.pool.cluster_wait_s
                )
                told_s = now_s
            time.sleep(min(NODES_ASKED_EVERY_S, config.pool.cluster_wait_s))


@contextmanager
def _nodes_requested(config: JobConfig, videos: int) -> Iterator[None]:
    """Ask an autoscaler for the first engines' nodes: nothing else would, as no engine is started before there is room.

    The request is taken back at the end of the block, since it would outlive a job that is killed and keep its nodes; from then on the
    engines themselves are the demand.
    """
    request_resources(bundles=cast(Any, first_bundles(config, ray.cluster_resources().get("GPU", 0.0), videos)))
    try:
        yield
    finally:
        request_resources(bundles=[])


def _watch_all(job: Run, room: Room) -> None:
    """Plan, then watch every pending video; returns when each has a committed result."""
    config = job.config
    _configure_ray_data(room)
    plans = _plan(job)
    tokens_known = all(plan.tokens for plan in plans.values())
    work = {t.video_id: float((plans[t.video_id].tokens if tokens_known else t.size_bytes) or 1) for t in job.pending}
    tasks = sorted(job.pending, key=lambda task: -work[task.video_id])
    rows = [{"task": task.model_dump_json(), "name": job.name_of(task.video_id)} for task in tasks]
    # With the driver, so that no node's death takes it away.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board: Any = ray.remote(num_cpus=0)(_Board).options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    results = (
        # A block a row, so that each video goes to whoever is free. Not by repartition(): that is one more operator, which waits for a
        # CPU for ever once the engines hold them all.
        ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            cast(Any, _Engine),
            fn_constructor_args=(config.model_dump_json(), job.run_id, room.num_gpus, board),
            compute=ActorPoolStrategy(
                min_size=room.min_actors,
                max_size=room.max_actors,
                initial_size=room.initial_actors,
                max_tasks_in_flight_per_actor=1,  # a video queued behind a long one would wait although another engine is free
            ),
            num_cpus=config.pool.num_cpus,
            num_gpus=room.num_gpus,
        )
    )
    progress = Progress(job.total_videos, job.total_videos - len(job.pending), work)
    metrics = RunMetrics(job.run_id, len(job.pending))
    failure = ""
    try:
        with ProgressLine(progress, config.log), _listening(board, progress, metrics):
            for batch in results.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
                for row in cast(pa.Table, batch).to_pylist():
                    if row["failure"]:
                        failure = row["failure"]  # what other engines have begun they finish
                        continue
                    progress.finish(row["video_id"], video_s=row["video_s"], tokens=row["tokens"], failed=row["outcome"] != "done")
                    metrics.finished(row)
    except RayError as error:
        raise JobFailedError(f"{_reason(error)}; {_GO_ON}") from error
    if failure:
        raise JobFailedError(f"{failure}; {_GO_ON}")


def _configure_ray_data(room: Room) -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # one video may take hours; a decoder that hangs is cut off by its own watchdog
    context.max_errored_blocks = 0  # a video's fault is a row, so an error here is the job's
    context.target_max_block_size = 2**20  # rows are small; nothing is gained by gathering them
    context.execution_options.resource_limits = ExecutionResources(cpu=room.data_cpus)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors come back as exceptions


def _plan(job: Run) -> dict[str, VideoPlan]:
    """Look at the headers of the files that are within reach, on as many CPUs as there are."""
    plans = {task.video_id: VideoPlan(task.video_id) for task in job.pending}
    watches = job.config.caches.missing == "watch"
    near = [task for task in job.pending if watches and split_s3(task.uri) is None]
    planned = [_plan_some.remote(near[i : i + PLANNED_AT_ONCE], job.geometry, job.config) for i in range(0, len(near), PLANNED_AT_ONCE)]
    for some in planned:
        try:
            plans |= {plan.video_id: plan for plan in ray.get(some)}
        except RayError as error:  # a file that kills whoever opens it; it gets its tries when its turn comes
            log.warning("up to %d videos couldn't be looked at beforehand (%s)", PLANNED_AT_ONCE, type(error).__name__)
    return plans


# Not a map of Ray Data, whose tasks are retried for ever when a process dies.
@ray.remote(num_cpus=PLAN_CPUS, max_retries=0)
def _plan_some(tasks: list[VideoTask], geometry: FrameGeometry, config: JobConfig) -> list[VideoPlan]:
    return [plan_video(task, geometry, config) for task in tasks]


class _Engine:
    """One actor of the pool: a `VideoWorker` whose blocks come from a decode task or from its own process."""

    def __init__(self, config_json: str, run_id: str, num_gpus: float, board: Any) -> None:
        if not num_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides no GPU from those that asked for none
        import torch

        config = JobConfig.model_validate_json(config_json)
        self.lines_arrived = _log_here_and_there(config, board)
        torch.set_num_threads(config.pool.threads or max(1, math.ceil(config.pool.num_cpus)))
        self.failure: str | None = None
        try:
            self.worker = VideoWorker.for_job(
                config,
                run_id,
                read=partial(read_in_task, board=board) if config.decode.where == "worker" else read_video,
                report=lambda *seen: board.seen.remote(*seen),
                retried=lambda cause: board.retried.remote(cause),
            )
        except ReelkeepError as error:
            self.failure = str(error)  # an exception here would be tried again, and printed with its stack on the driver's output
            return
        threading.Thread(target=self._measure, args=(EngineMetrics(run_id),), name="metrics", daemon=True).start()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Watch one video; returns a small row that says how it went, or with `failure` why this engine can't."""
        task = VideoTask.model_validate_json(row["task"])
        if self.failure is None and fingerprint(self.worker.config, task) != row["name"]:
            self.failure = f"engine.model={self.worker.config.engine.model}: other files on this node than where the job was started"
        if self.failure is not None:
            return {"video_id": task.video_id, "outcome": "failed", **_NOTHING_SEEN, "failure": self.failure}
        try:
            result = self.worker(task)
        except WorkerLost:
            # Not exit_actor(), which Ray doesn't retry: a process that dies is replaced, and its video goes to the new one.
            logging.shutdown()
            os._exit(1)
        self.lines_arrived()
        answered = sum(not row.get("error") for row in result.answers)
        return {
            "video_id": result.video_id,
            "outcome": outcome_of(result),
            "answered": answered,
            "unanswered": len(result.answers) - answered,
            "video_s": float(result.memory.get("duration_s") or 0.0),
            "tokens": int(result.memory.get("total_tokens") or 0),
            "failure": "",
        }

    def _measure(self, metrics: EngineMetrics) -> None:
        for pause_s in itertools.chain([1.0], itertools.repeat(LOAD_MEASURED_EVERY_S)):  # soon for the first time: a job may be short
            time.sleep(pause_s)
            metrics.note(self.worker.load.sample())


@ray.remote(num_returns="streaming", num_cpus=DECODE_CPUS, max_retries=0)
def _read(task_json: str, geometry: FrameGeometry, config_json: str, first_group: int, board: Any) -> Iterator[Message | None]:
    yield None  # it runs; what follows is watched over here, and may take long for good reasons
    config = JobConfig.model_validate_json(config_json)
    lines_arrived = _log_here_and_there(config, board)
    try:
        yield from read_video(VideoTask.model_validate_json(task_json), geometry, config, first_group)
    finally:
        lines_arrived()


def read_in_task(
    task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0, *, board: Any = None, wait_s: float = DECODER_WAIT_S
) -> Iterator[Message]:
    """`read_video` in a process of its own, at most `decode.prefetch_blocks` blocks ahead; stopped when the consumer stops.

    Where the cluster gives that process no CPU, it is done here, with a warning: whoever waits holds the engine.

    Args:
        board: who shows warnings and errors of that process.
        wait_s: seconds to wait for it to begin.

    Raises:
        StageError: as `read_video`, or that process died.
    """
    reading = _read.options(_generator_backpressure_num_objects=config.decode.prefetch_blocks)
    references: Any = reading.remote(task.model_dump_json(), geometry, config.model_dump_json(), first_group, board)
    finished = False
    try:
        if not ray.wait([references], timeout=wait_s)[0]:
            note = f"decoded in the engine's own process: no CPU was free for a decoder within {wait_s:g} s; lower pool.max_actors"
            log.warning("%s", note, extra={"video_id": task.video_id})
            ray.cancel(references)
            finished = True
            for message in read_video(task, geometry, config, first_group):
                yield replace(message, warnings=(*message.warnings, note)) if isinstance(message, StreamTail) else message
            return
        ray.get(next(references))
        for reference in references:
            yield ray.get(reference)
        finished = True
    except RayTaskError as error:
        finished = True
        raise (error.cause if isinstance(error.cause, StageError) else StageError("decode", _reason(error))) from None
    except RayError as error:
        finished = True
        raise StageError("decode", f"the process that decoded it died ({type(error).__name__})", lost="reader") from error
    finally:
        if not finished:
            ray.cancel(references)  # dropping the references doesn't stop the task


class _Board:
    """Where engines and decoders say how far they are and what went wrong; the driver reads it for the progress line and the log."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        self._retries: list[str] = []

    def seen(self, video_id: str, video_s: float, tokens: int) -> None:
        self._seen[video_id] = (video_s, tokens)

    def log(self, line: dict[str, Any]) -> None:
        self._lines.append(line)

    def retried(self, cause: str) -> None:
        self._retries.append(cause)

    def take(self) -> tuple[dict[str, tuple[float, int]], list[dict[str, Any]], list[str]]:
        seen, lines, retries = self._seen, list(self._lines), self._retries
        self._seen, self._retries = {}, []
        self._lines.clear()
        return seen, lines, retries


def _log_here_and_there(config: JobConfig, board: Any) -> Callable[[], None]:
    """Log in this worker, and send warnings and errors to the driver; returns what waits until they are there.

    At log.level=debug Ray itself shows everything that workers write.
    """
    set_up_logging(config.log)
    sent: list[Any] = []

    def send(line: dict[str, Any]) -> None:
        sent[:] = [board.log.remote(line)]

    def wait() -> None:
        with suppress(RayError, IndexError):
            ray.wait([sent.pop()], timeout=10)  # the others came before it

    if board is not None and config.log.level != "debug":
        logging.getLogger("reelkeep").addHandler(Forwarder(send, wait))
    return wait


@contextmanager
def _listening(board: Any, progress: Progress, metrics: RunMetrics, every_s: float = 1.0) -> Iterator[None]:
    """Carry what engines say to the progress line, the log and the metrics, beside the loop that waits for results."""
    over = threading.Event()

    def carry() -> None:
        with suppress(RayError):
            seen, lines, retries = ray.get(board.take.remote(), timeout=10)
            for video_id, so_far in seen.items():
                progress.seen(video_id, *so_far)
            for line in lines:
                show_forwarded(line)
            for cause in retries:
                metrics.retried(cause)

    def listen() -> None:
        while not over.wait(every_s):
            carry()
        carry()

    listener = threading.Thread(target=listen, name="progress", daemon=True)
    listener.start()
    try:
        yield
    finally:
        over.set()
        listener.join(timeout=15)


@contextmanager
def _cluster(config: JobConfig) -> Iterator[None]:
    """A Ray cluster: the one this process is in already, the one RAY_ADDRESS names, or one on this machine for the length of the job."""
    if ray.is_initialized():
        yield
        return
    local: dict[str, Any] = (
        {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False, "object_store_memory": LOCAL_OBJECT_STORE_BYTES}
    )
    log.info("starting Ray on this machine" if local else "joining the Ray cluster at %s", *([] if local else [os.environ["RAY_ADDRESS"]]))
    try:
        with _stderr_without(b"Set ray log level from environment variable"):
            ray.init(logging_level=logging.ERROR, log_to_driver=config.log.level == "debug", **local)
    except Exception as error:  # of any kind: Ray raises plain ones
        address = "" if local else f" at RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
        told = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "is this machine overloaded, or its memory or /tmp full?" if local else "is that cluster up, and of this Ray's version?"
        raise JobFailedError(
            f"Ray didn't start{address}: {told.rstrip('.')}; {remedy} Nothing is lost, run the same command again"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _stderr_without(unwanted: bytes) -> Iterator[None]:
    """Hold back what is written to standard error during the block, by Ray's C++ too, and leave out the lines with `unwanted`."""
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            os.write(2, b"".join(line for line in held if unwanted not in line))


@contextmanager
def _stopping_politely(job: Run) -> Iterator[None]:
    """When the job is interrupted, make tables of what is done and say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if job.lease.lost:
            raise JobFailedError(f"output={job.config.output} was taken over by another job; what is done is kept") from None
        job.finish(complete=False)
        raise StoppedError(
            f"stopped: {len(job.done())} of {job.total_videos} videos are done and kept under {job.config.output}; "
            "run the same command again to do the rest"
        ) from None


def _reason(error: BaseException) -> str:
    """What started a Ray error, in one line: the project's own message if there is one in its text, else the first error named there."""
    text = str(error)
    ours = _OWN_ERROR.findall(text)
    if ours:
        return ours[0]
    log.error("unforeseen error:\n%s", text)
    named = _ANY_ERROR.findall(text)
    return named[0] if named else type(error).__name__
