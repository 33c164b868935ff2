"""`python -m jobs.bench memory`: peak memory against the length of the stream, beside the full cache's.

Each row is a process of its own, so that its peak resident set is its own. The bytes held are counted by the cache; the formula is
layers * budget + block entries. On CUDA the device's peak allocation is shown as well.
"""

from __future__ import annotations

import argparse
import json

from rich.table import Table

from jobs.bench._measure import MIB, add_json, apart, publish, say


def main(argv: list[str]) -> int:
    """Run the rows, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench memory", description=__doc__)
    parser.add_argument("--tokens", default="2048,8192,32768", help="visual tokens of each stream (default: 1x, 4x and 16x of 2048)")
    parser.add_argument("--budget-tokens", type=int, default=1024)
    parser.add_argument("--block-tokens", type=int, default=784)
    parser.add_argument("--policies", default="keydiff,full", help="full is the cache without eviction")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--plot", help="write the picture of memory against length to this PNG or SVG file (needs the plot extra)")
    add_json(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(measure(arguments, arguments.child)))
        return 0
    rows = []
    for policy in arguments.policies.split(","):
        for tokens in arguments.tokens.split(","):
            rows.append(apart("memory", [*argv, "--tokens", tokens, "--child", policy]))
            say(f"{policy} {tokens} tokens: done")
    if arguments.plot:
        plot(rows, arguments)
    publish({"rows": rows}, as_table(rows), only_json=arguments.json)
    return 0


def measure(arguments: argparse.Namespace, policy: str) -> dict:
    """Read one stream and report what it took."""
    from engine.memory import peak_kv_bytes
    from jobs.bench._model import bench_engine, noise_blocks

    settings = {k: getattr(arguments, k) for k in ("hidden", "layers", "heads", "kv_heads", "budget_tokens", "block_tokens")}
    engine = bench_engine(policy=policy, **settings)
    trace = engine.prefill(noise_blocks(engine, int(arguments.tokens))).trace
    largest = max(b.block_tokens for b in trace.blocks)
    formula = peak_kv_bytes(engine.adapter.model.config, arguments.budget_tokens, largest, engine.adapter.dtype)
    return {
        "policy": policy,
        "tokens": trace.visual_tokens,
        "kv_held_bytes": trace.kv_peak_bytes,
        "kv_formula_bytes": formula if policy != "full" else trace.kv_predicted_bytes,
        "kv_full_bytes": trace.kv_full_bytes,
        "process_peak_bytes": trace.process_peak_bytes,
        "device_peak_bytes": trace.device_peak_bytes,
    }


def as_table(rows: list[dict]) -> Table:
    """The table for people, in MiB."""
    table = Table(title="Peak memory against the length of the stream (MiB)")
    for name in ("policy", "visual tokens", "KV held", "by formula", "full cache", "process peak", "device peak"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(row["policy"], f"{row['tokens']:,}", *(f"{row[k] / MIB:,.1f}" for k in list(row)[2:]))
    return table


def plot(rows: list[dict], arguments: argparse.Namespace) -> None:
    """Held bytes and process peak against visual tokens, a line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for ax, key, title in zip(
        axes, ("kv_held_bytes", "process_peak_bytes"), ("KV cache, peak held", "Process, peak resident"), strict=True
    ):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            chosen = [row for row in rows if row["policy"] == policy]
            style = {"color": "#b0413e", "linestyle": "--"} if policy == "full" else {"color": "#1f6f8b"}
            label = "full cache" if policy == "full" else f"{policy}, {arguments.budget_tokens} tokens a layer"
            ax.plot([r["tokens"] for r in chosen], [r[key] / MIB for r in chosen], marker="o", label=label, **style)
        ax.set(title=title, xlabel="visual tokens read", ylabel="MiB", ylim=(0, 1.1 * max(row[key] for row in rows) / MIB))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(arguments.plot, dpi=150)
