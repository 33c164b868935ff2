"""`python -m jobs.bench evict`: what it costs each policy to choose the entries that stay, counted and timed, beside the forward.

One layer of Qwen2.5-VL-7B's width reads a few blocks; what is shown is the last eviction. Counted are PyTorch's operations other than views
(on CUDA a kernel each, or a few), the floating-point operations of its matrix products, the bytes its operations read and write (gathers
as if they read all), and how often the host must wait for the device to learn a size or a number. The time is that of storing, choosing
and moving entries in all evictions, as a share of reading the blocks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from engine import Engine
from engine.policies import CacheView, EvictionPolicy, make_policy
from jobs.bench._measure import MIB, add_json, add_shape, device_name, publish, say, shape_of
from jobs.bench._model import WithoutTower, bench_engine
from jobs.bench.prefill import block_pass

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero"}


def main(argv: list[str]) -> int:
    """Run every policy, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench evict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default="keydiff,value_norm,leverage,coverage", help="which ones, separated by commas")
    parser.add_argument("--budget", type=int, default=2048, help="budget in tokens a layer (default 2048)")
    parser.add_argument("--block", type=int, default=784, help="block size in tokens (default 784)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks to read (default 6)")
    add_shape(parser, hidden=3584, layers=1, heads=28, kv_heads=4)
    add_json(parser)
    arguments = parser.parse_args(argv)
    policies = [name.strip() for name in arguments.policies.split(",") if name.strip()]
    for name in policies:
        make_policy(name, {})
    torch.set_num_threads(arguments.threads)
    settings = {"budget_tokens": arguments.budget, "block_tokens": arguments.block, "answer": {"max_new_tokens": 1}}
    engine = bench_engine(adapter=WithoutTower, **shape_of(arguments), **settings)
    rows = [measure(engine, name, arguments.block * arguments.blocks) for name in policies]
    title = f"Choosing what stays, one layer, {arguments.kv_heads} KV heads, budget {arguments.budget}, blocks of {arguments.block}, "
    publish(
        {"bench": "evict", **shape_of(arguments), "budget_tokens": arguments.budget, "block_tokens": arguments.block, "rows": rows},
        as_table(rows, title + device_name(engine.adapter.device)),
        only_json=arguments.json,
    )
    return 0


class Counted(EvictionPolicy):
    """A policy whose last choice is counted.

    Attributes:
        figures: of the last choice, as the columns of the table.
        flops: of all choices.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy, self.needs_question = policy, policy.needs_question
        self.figures: dict[str, int] = {}
        self.flops = 0

    def keep(self, view: CacheView, count: int) -> Tensor:
        """What the policy keeps."""
        with FlopCounterMode(display=False) as flops, _Ledger() as ledger:
            kept = self._policy.keep(view, count)
        self.flops += flops.get_total_flops()
        self.figures = {
            "slots": view.keys.shape[1],
            "operations": ledger.operations,
            "waits": ledger.waits,
            "flops": flops.get_total_flops(),
            "moved_bytes": ledger.moved_bytes,
        }
        return kept


class _Ledger(TorchDispatchMode):
    """Counts operations, waits of the host and bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            name = func.name().partition(".")[0]
            # Taking by a mask waits too: how many it names must be known.
            masked = name == "aten::index" and any(places.dtype == torch.bool for places in args[1] if places is not None)
            self.operations += 1
            self.waits += masked or name in _WAITS
            self.moved_bytes += sum(t.numel() * t.element_size() for t in tree_leaves((args, out)) if isinstance(t, Tensor))
        return out


def measure(engine: Engine, name: str, tokens: int) -> dict[str, Any]:
    """Read the blocks twice under a policy: counted, then timed."""
    policy = make_policy(name, {})
    engine.policy = counted = Counted(policy)
    with FlopCounterMode(display=False) as flops:
        read = block_pass(engine, tokens)
    engine.policy = policy
    timed = block_pass(engine, tokens)
    say(f"{name}: {timed['s']:.3f} s")
    per_token = (flops.get_total_flops() - counted.flops) / read["visual_tokens"]
    return {
        "policy": name,
        **counted.figures,
        "forward_flops": round(per_token * engine.config.block_tokens),
        "compress_share": timed["compress_share"],
    }


def as_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The table for people."""
    table = Table(title=title)
    for name in ("policy", "slots", "operations", "host waits", "GFLOP", "of the forward's %", "moved MiB", "time, % of reading"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['slots']:,}",
            str(row["operations"]),
            str(row["waits"]),
            f"{row['flops'] / 1e9:.2f}",
            f"{100 * row['flops'] / row['forward_flops']:.2f}",
            f"{row['moved_bytes'] / MIB:,.0f}",
            f"{100 * row['compress_share']:.1f}",
        )
    return table
