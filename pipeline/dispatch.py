"""The Ray Data graph: plan on CPUs, longest video first, one video a row to a pool of engines. The only module that knows Ray."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

# Ray reads these when it is imported or started; what the user has set stands.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, ExecutionResources
from ray.exceptions import RayError, RayTaskError

from engine.errors import ConfigError
from engine.geometry import FrameGeometry
from pipeline.config import JobConfig
from pipeline.logs import set_up_logging
from pipeline.plan import VideoPlan, plan_video
from pipeline.progress import Progress, ProgressLine
from pipeline.results import fingerprint
from pipeline.run import JobFailedError, Run, RunSummary, StoppedError
from pipeline.storage import split_s3
from pipeline.stream import Message, StageError, read_video
from pipeline.task import VideoTask
from pipeline.worker import VideoWorker, WorkerLost

log = logging.getLogger("reelkeep.dispatch")

DECODE_CPUS = 0.5  # Ray's bookkeeping, not a limit: a decoder is idle whenever its blocks aren't taken.
PLAN_CPUS = 0.5
CLUSTER_WAIT_S = 120.0
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
            with _stopping_politely(job), _cluster(config), _sigterm_like_ctrl_c():
                _watch_all(job, _find_room_soon(config, len(job.pending)))
        return job.finish()


@dataclass(frozen=True)
class Room:
    """What the cluster gives this job.

    Attributes:
        min_actors, max_actors, initial_actors: size of the pool of engines.
        num_gpus: GPUs of one engine.
        data_cpus: CPUs that Ray Data's own operators may take; the rest is left to decoding.
    """

    min_actors: int
    max_actors: int
    initial_actors: int
    num_gpus: float
    data_cpus: float


def find_room(config: JobConfig, cluster: dict[str, float], videos: int) -> Room:
    """Fit the pool of engines and its decoders into a cluster, before anything waits for what will never be free.

    Args:
        cluster: resources as Ray counts them: {"CPU": 8.0, "GPU": 1.0}.
        videos: videos to watch; more engines than that aren't started.

    Raises:
        ConfigError: the smallest pool doesn't fit; says what is missing.
    """
    pool, cpus, gpus = config.pool, cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    num_gpus = pool.num_gpus if pool.num_gpus is not None else (1.0 if gpus else 0.0)
    decode_cpus = DECODE_CPUS if config.decode.where == "worker" else 0.0
    least = min(pool.min_actors, videos)
    cpus_wanted, gpus_wanted = least * (pool.num_cpus + decode_cpus), least * num_gpus
    if cpus_wanted > cpus or gpus_wanted > gpus:
        decoders = f" and {decode_cpus:g} for its decoder" if decode_cpus else ""
        remedy = ["lower pool.min_actors"] if least > 1 else []
        remedy += ["lower pool.num_cpus"] if cpus_wanted > cpus else []
        remedy += ["set decode.where=actor"] if cpus_wanted > cpus and decode_cpus else []
        remedy += ["lower pool.num_gpus"] if gpus_wanted > gpus else []
        raise ConfigError(
            f"pool.min_actors={least} needs {cpus_wanted:g} CPUs and {gpus_wanted:g} GPUs ({pool.num_cpus:g} CPUs{decoders} and "
            f"{num_gpus:g} GPUs each), the cluster has {cpus:g} and {gpus:g}: missing {max(0, cpus_wanted - cpus):g} CPUs and "
            f"{max(0, gpus_wanted - gpus):g} GPUs; {', '.join(remedy)}, or use a larger cluster"
        )
    fitting = [cpus // (pool.num_cpus + decode_cpus)] if pool.num_cpus + decode_cpus else []
    fitting += [gpus // num_gpus] if num_gpus >= 1 else [math.floor(gpus) * math.floor(1 / num_gpus)] if num_gpus else []
    most = max(least, min(videos, pool.max_actors or int(min(fitting, default=1))))
    first = min(max(pool.initial_actors or least, least), most)
    return Room(least, most, first, num_gpus, max(cpus - most * decode_cpus, most * pool.num_cpus, PLAN_CPUS))


def _find_room_soon(config: JobConfig, videos: int) -> Room:
    """`find_room`, patient with a cluster whose nodes are still joining; a machine of our own has all it will ever have."""
    deadline = time.monotonic() + (CLUSTER_WAIT_S if os.environ.get("RAY_ADDRESS") else 0.0)
    while True:
        try:
            return find_room(config, ray.cluster_resources(), videos)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            log.warning("%s; waiting for nodes to join", error)
            time.sleep(10.0)


def _watch_all(job: Run, room: Room) -> None:
    """Plan, then watch every pending video; returns when each has a committed result."""
    config = job.config
    _configure_ray_data(room)
    plans = _plan(job, room)
    tokens_known = all(plan.tokens for plan in plans.values())
    work = {t.video_id: float((plans[t.video_id].tokens if tokens_known else t.size_bytes) or 1) for t in job.pending}
    tasks = sorted(job.pending, key=lambda task: -work[task.video_id])
    rows = [{"task": task.model_dump_json(), "name": job.name_of(task.video_id)} for task in tasks]
    board: Any = ray.remote(num_cpus=0)(_Board).remote()  # type: ignore[attr-defined]
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
    try:
        with ProgressLine(progress, config.log), _listening(board, progress):
            for batch in results.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
                for row in cast(pa.Table, batch).to_pylist():
                    progress.finish(row["video_id"], video_s=row["video_s"], tokens=row["tokens"], failed=row["failed"])
    except RayError as error:
        raise JobFailedError(f"{_reason(error)}; what is done is kept, run the same command again to go on") from error


def _configure_ray_data(room: Room) -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # one video may take hours; a decoder that hangs is cut off by its own watchdog
    context.max_errored_blocks = 0  # a video's fault is a row, so an error here is the job's
    context.target_max_block_size = 2**20  # rows are small; nothing is gained by gathering them
    context.execution_options.resource_limits = ExecutionResources(cpu=room.data_cpus)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors come back as exceptions


def _plan(job: Run, room: Room) -> dict[str, VideoPlan]:
    """Look at the headers of the files that are within reach, on as many CPUs as there are."""
    plans = {task.video_id: VideoPlan(task.video_id) for task in job.pending}
    watches = job.config.caches.missing == "watch"
    near = [{"task": task.model_dump_json()} for task in job.pending if watches and split_s3(task.uri) is None]
    if near:
        config, geometry = job.config, job.geometry

        def plan(row: dict[str, Any]) -> dict[str, Any]:
            return asdict(plan_video(VideoTask.model_validate_json(row["task"]), geometry, config))

        blocks = min(len(near), max(1, int(room.data_cpus / PLAN_CPUS)))
        for row in ray.data.from_items(near, override_num_blocks=blocks).map(plan, num_cpus=min(PLAN_CPUS, room.data_cpus)).take_all():
            plans[row["video_id"]] = VideoPlan(**row)
    return plans


class _Engine:
    """One actor of the pool: a `VideoWorker` whose blocks come from a decode task or from its own process."""

    def __init__(self, config_json: str, run_id: str, num_gpus: float, board: Any) -> None:
        if not num_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides no GPU from those that asked for none
        import torch

        config = JobConfig.model_validate_json(config_json)
        set_up_logging(config.log)
        torch.set_num_threads(config.pool.threads or max(1, math.ceil(config.pool.num_cpus)))
        self.worker = VideoWorker.for_job(
            config,
            run_id,
            read=read_in_task if config.decode.where == "worker" else read_video,
            report=lambda *seen: board.seen.remote(*seen),
        )

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Watch one video; returns a small row that says how it went."""
        task = VideoTask.model_validate_json(row["task"])
        if fingerprint(self.worker.config, task) != row["name"]:
            raise ConfigError(f"engine.model={self.worker.config.engine.model}: other files on this node than where the job was started")
        try:
            result = self.worker(task)
        except WorkerLost:
            # Not exit_actor(), which Ray doesn't retry: a process that dies is replaced, and its video goes to the new one.
            logging.shutdown()
            os._exit(1)
        return {
            "video_id": result.video_id,
            "failed": any(row.get("error") for row in result.answers),
            "video_s": float(result.memory.get("duration_s") or 0.0),
            "tokens": int(result.memory.get("total_tokens") or 0),
        }


@ray.remote(num_returns="streaming", num_cpus=DECODE_CPUS, max_retries=0)
def _read(task_json: str, geometry: FrameGeometry, config_json: str, first_group: int) -> Iterator[Message]:
    config = JobConfig.model_validate_json(config_json)
    set_up_logging(config.log)
    yield from read_video(VideoTask.model_validate_json(task_json), geometry, config, first_group)


def read_in_task(task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0) -> Iterator[Message]:
    """`read_video` in a process of its own, at most `decode.prefetch_blocks` blocks ahead; stopped when the consumer stops.

    Raises:
        StageError: as `read_video`, or that process died.
    """
    reading = _read.options(_generator_backpressure_num_objects=config.decode.prefetch_blocks)
    references: Any = reading.remote(task.model_dump_json(), geometry, config.model_dump_json(), first_group)
    finished = False
    try:
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
    """Where engines say how far they are; the driver reads it for the progress line."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}

    def seen(self, video_id: str, video_s: float, tokens: int) -> None:
        self._seen[video_id] = (video_s, tokens)

    def take(self) -> dict[str, tuple[float, int]]:
        taken, self._seen = self._seen, {}
        return taken


@contextmanager
def _listening(board: Any, progress: Progress, every_s: float = 1.0) -> Iterator[None]:
    """Carry what engines say to the progress line, beside the loop that waits for results."""
    over = threading.Event()

    def listen() -> None:
        while not over.wait(every_s):
            try:
                for video_id, seen in ray.get(board.take.remote(), timeout=10).items():
                    progress.seen(video_id, *seen)
            except RayError:
                continue

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
    ray.init(logging_level=logging.ERROR, log_to_driver=config.log.level == "debug", **local)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C. Entered once Ray is up, since Ray puts a handler of its own in place when it starts."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
