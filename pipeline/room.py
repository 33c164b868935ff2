"""How many engines fit into a cluster, decoders included. Knows what a cluster counts, not the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from engine.models import choose_dtype
from pipeline.config import JobConfig

DECODE_CPUS = 0.5  # bookkeeping, not a limit: a decoder is idle whenever its blocks aren't taken
PLAN_CPUS = 0.5


def expected_dtype(config: JobConfig) -> str:
    """What engines will hold weights and caches in, as far as this machine can tell; it need not have the engines' GPUs."""
    device = config.engine.device
    if device == "auto":
        device = "cuda" if config.pool.num_gpus or torch.cuda.is_available() else "cpu"
    return str(choose_dtype(config.engine.dtype, device)).removeprefix("torch.")


@dataclass(frozen=True)
class Room:
    """What the cluster gives this job.

    Attributes:
        min_actors, max_actors, initial_actors: size of the pool of engines.
        num_cpus, num_gpus: of one engine.
        data_cpus: CPUs that Ray Data's own operators may take; the rest is left to decoding.
    """

    min_actors: int
    max_actors: int
    initial_actors: int
    num_cpus: float
    num_gpus: float
    data_cpus: float

    def __str__(self) -> str:
        sort = f"{self.num_gpus:g} GPUs" if self.num_gpus else "no GPU"
        return f"{self.min_actors} to {self.max_actors} engines, {self.initial_actors} at first, each on {self.num_cpus:g} CPUs and {sort}"


def find_room(config: JobConfig, cluster: dict[str, float], videos: int, *, grows: bool = False) -> Room:
    """Fit the pool of engines and its decoders into a cluster, before anything waits for what will never be free.

    Args:
        cluster: resources as Ray counts them: {"CPU": 8.0, "GPU": 1.0}.
        videos: videos to watch; more engines than that aren't started.
        grows: nodes may still join: engines beyond what fits now are allowed where they were asked for.

    Raises:
        ConfigError: the smallest pool doesn't fit; says what is missing.
    """
    pool, cpus, gpus = config.pool, cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    num_gpus, decode_cpus = gpus_of_an_engine(config, gpus, grows=grows), _decode_cpus(config)
    least = min(pool.min_actors, videos)
    cpus_wanted, gpus_wanted = least * (pool.num_cpus + decode_cpus), least * num_gpus
    if cpus_wanted > cpus or gpus_wanted > gpus:
        decoders = f" and {decode_cpus:g} for its decoder" if decode_cpus else ""
        remedy = ["lower pool.min_actors"] if least > 1 else []
        remedy += ["lower pool.num_cpus"] if cpus_wanted > cpus else []
        remedy += ["set decode.where=actor"] if cpus_wanted > cpus and decode_cpus else []
        if gpus_wanted > gpus:
            remedy += ["set engine.device=cpu and engine.dtype=float32" if pool.num_gpus is None else "lower pool.num_gpus"]
        raise ConfigError(
            f"pool.min_actors={least} needs {cpus_wanted:g} CPUs and {gpus_wanted:g} GPUs ({pool.num_cpus:g} CPUs{decoders} and "
            f"{num_gpus:g} GPUs each), the cluster has {cpus:g} and {gpus:g}: missing {max(0, cpus_wanted - cpus):g} CPUs and "
            f"{max(0, gpus_wanted - gpus):g} GPUs; {', '.join(remedy)}, or use a larger cluster"
        )
    fitting = [cpus // (pool.num_cpus + decode_cpus)] if pool.num_cpus + decode_cpus else []
    fitting += [gpus // num_gpus] if num_gpus >= 1 else [math.floor(gpus) * math.floor(1 / num_gpus)] if num_gpus else []
    # Where nothing limits them, as many as were asked for. Elsewhere never more than leave each a decoder: engines don't let go of their
    # CPUs, and a decoder that never gets one would never begin.
    fits = int(min(fitting, default=pool.max_actors or 1))
    asked = pool.max_actors or max(fits, pool.initial_actors or 0)
    most = max(least, min(videos, asked if grows else min(asked, fits)))
    first = min(max(pool.initial_actors or least, least), most)
    data_cpus = max(cpus - most * decode_cpus, most * pool.num_cpus, PLAN_CPUS)
    return Room(least, most, first, pool.num_cpus, num_gpus, data_cpus)


def gpus_of_an_engine(config: JobConfig, gpus: float, *, grows: bool) -> float:
    """GPUs that one engine gets: as set; else one where the settings speak of a GPU or the cluster has any.

    Args:
        gpus: GPUs of the cluster, as far as it has come up.
        grows: nodes may still join, so a half-precision dtype is enough to wait for a GPU.
    """
    pool, engine = config.pool, config.engine
    if pool.num_gpus is not None:
        return pool.num_gpus
    if engine.device == "cpu":
        return 0.0
    meant = engine.device.startswith("cuda") or (grows and engine.dtype in ("bfloat16", "float16"))
    return 1.0 if meant or gpus else 0.0


def first_bundles(config: JobConfig, gpus: float, videos: int) -> list[dict[str, float]]:
    """What to ask a cluster for that starts from nothing: the first engines, and a decoder each. Arguments as for `find_room`."""
    pool = config.pool
    engine = {"CPU": pool.num_cpus, "GPU": gpus_of_an_engine(config, gpus, grows=True)}
    count = min(max(pool.initial_actors or 0, pool.min_actors), videos)
    wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in (engine, {"CPU": _decode_cpus(config)})]
    return [dict(bundle) for bundle in wanted if bundle for _ in range(count)]


def _decode_cpus(config: JobConfig) -> float:
    return DECODE_CPUS if config.decode.where == "worker" else 0.0
