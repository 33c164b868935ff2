"""The rooms that a pool of engines fits into."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from pipeline.config import JobConfig
from pipeline.room import find_room, first_bundles


def config(**pool: object) -> JobConfig:
    where = pool.pop("where", "worker")
    engine = {name: pool.pop(name) for name in ("device", "dtype") if name in pool}
    return JobConfig.model_validate(
        {"videos": "v", "questions": "q", "output": "o", "pool": pool, "decode": {"where": where}, "engine": engine}
    )


def test_the_defaults_fit_two_cores() -> None:
    room = find_room(config(), {"CPU": 2.0}, videos=10)
    assert (room.min_actors, room.max_actors, room.num_gpus) == (1, 1, 0.0)
    assert room.data_cpus == 1.5, "half a CPU is left to the decoder"


def test_a_pool_grows_to_what_cluster_and_videos_allow() -> None:
    assert find_room(config(num_cpus=1), {"CPU": 64.0, "GPU": 4.0}, videos=100).max_actors == 4
    assert find_room(config(num_gpus=0.5), {"CPU": 64.0, "GPU": 4.0}, videos=100).max_actors == 8
    assert find_room(config(num_gpus=0.4), {"CPU": 64.0, "GPU": 4.0}, videos=100).max_actors == 8, "a fraction never spans two GPUs"
    assert find_room(config(), {"CPU": 64.0}, videos=3).max_actors == 3
    assert find_room(config(min_actors=4, initial_actors=4), {"CPU": 64.0}, videos=2).initial_actors == 2
    assert find_room(config(max_actors=5, initial_actors=2), {"CPU": 64.0}, videos=100).initial_actors == 2
    assert find_room(config(max_actors=9), {"CPU": 2.0}, videos=100, grows=True).max_actors == 9, (
        "what is asked for may come by autoscaling"
    )
    assert find_room(config(initial_actors=4), {"CPU": 2.0}, videos=100, grows=True).initial_actors == 4


@pytest.mark.parametrize("cpus", [2.0, 3.0, 4.0, 7.0])
def test_engines_never_take_the_cpus_that_their_decoders_need(cpus: float) -> None:
    room = find_room(config(max_actors=64), {"CPU": cpus}, videos=100)
    assert room.max_actors * (1 + 0.5) <= cpus and room.data_cpus + 0.5 * room.max_actors <= cpus
    alone = find_room(config(max_actors=64, where="actor"), {"CPU": cpus}, videos=100)
    assert alone.max_actors == int(cpus), "engines that decode for themselves need no more"


def test_settings_that_speak_of_a_gpu_are_not_given_a_cpu() -> None:
    cpus_only = {"CPU": 8.0}
    assert find_room(config(device="cpu"), {"CPU": 8.0, "GPU": 2.0}, videos=9).num_gpus == 0
    assert find_room(config(), {"CPU": 8.0, "GPU": 2.0}, videos=9).num_gpus == 1
    assert find_room(config(dtype="bfloat16"), cpus_only, videos=9).num_gpus == 0, "this machine won't get one"
    for settings in ({"device": "cuda"}, {"device": "cuda:0", "dtype": "float32"}, {"dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match=r"missing 0 CPUs and 1 GPUs; set engine\.device=cpu"):
            find_room(config(**settings), cpus_only, videos=9, grows=True)
    assert find_room(config(device="cuda", num_gpus=0), cpus_only, videos=9).num_gpus == 0, "said is said"


def test_what_is_asked_of_a_cluster_that_starts_from_nothing() -> None:
    assert first_bundles(config(), 0.0, videos=9) == [{"CPU": 1.0}, {"CPU": 0.5}]
    many = config(device="cuda", min_actors=2, initial_actors=4, num_cpus=2)
    assert first_bundles(many, 0.0, videos=3) == 3 * [{"CPU": 2.0, "GPU": 1.0}] + 3 * [{"CPU": 0.5}]
    assert first_bundles(config(num_gpus=0.5, num_cpus=0, where="actor"), 0.0, videos=9) == [{"GPU": 0.5}]


@pytest.mark.parametrize(
    ("pool", "cluster", "words"),
    [
        ({}, {"CPU": 1.0}, ["missing 0.5 CPUs", "decode.where=actor"]),
        ({"min_actors": 4, "where": "actor"}, {"CPU": 3.0}, ["missing 1 CPUs", "lower pool.min_actors"]),
        ({"num_gpus": 1}, {"CPU": 8.0}, ["missing 0 CPUs and 1 GPUs", "lower pool.num_gpus"]),
    ],
)
def test_what_is_missing_is_said(pool: dict[str, object], cluster: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_room(config(**pool), cluster, videos=10)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
