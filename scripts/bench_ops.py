"""Time the GPU kernels at the shapes of real models, each against its reference first. Last line: one JSON object.

    python -m scripts.bench_ops [--workloads race,quality_all] [--sizes 0.8b,4b]

A kernel whose parity check fails gets no time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from flide.ops.fork_attention.reference import fork_attention_reference
from flide.ops.fork_attention.triton import fork_attention_triton
from flide.ops.fork_gated_delta.reference import fork_gated_delta_reference
from flide.ops.fork_gated_delta.triton import fork_gated_delta_triton
from flide.ops.fork_schedule import fork_schedule
from flide.runtime import ForkMetadata, TrunkCache
from flide.runtime.metadata import PAGE_SIZE, num_pages
from scripts.workloads import FIXED

# key heads, value heads; query heads, key/value heads
SIZES = {"0.8b": (16, 16, 8, 2), "4b": (16, 32, 16, 4), "27b": (16, 48, 24, 4)}
BUDGET = 3.0  # error relative to that of rounding the exact result


def median_us(run: Callable[[], object], *, calls: int = 20, repeats: int = 5) -> float:
    """Median over replays of a captured graph of ``calls`` calls, per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times[1:])[repeats // 2]


def error_ratio(out: Tensor, exact: Tensor) -> float:
    """Error against float64, relative to the error of rounding the exact result to the output's dtype."""
    best = (exact.to(out.dtype).double() - exact).norm()
    return ((out.double() - exact).norm() / best).item()


def bench(workload: str, size: str) -> dict[str, float | None]:
    key_heads, heads, query_heads, kv_heads = SIZES[size]
    trunk = FIXED[workload].trunk
    pages = tuple(range(num_pages(trunk)))
    meta = ForkMetadata.pack([FIXED[workload].tree()], caches=[TrunkCache(pages=pages)]).to("cuda")
    rows = meta.tokens.shape[0]
    tree = meta.segment_offsets, meta.segment_parents
    group = query_heads // kv_heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    channels = 2 * key_heads * 128 + heads * 128
    qkv, a, b = randn(rows, channels + 2 * heads).split([channels, heads, heads], -1)
    inputs = qkv, a, b, randn(channels, 4) * 0.5, torch.rand(heads, device="cuda").mul(16).log(), randn(heads)
    sizes = {"num_key_heads": key_heads, "key_dim": 128, "beta_scale": 1.0}
    pools = [torch.zeros(1, heads, 128, 128, device="cuda"), randn(1, 3, channels) * 0]
    scratch = torch.empty(1, heads, 128, 128, device="cuda")
    query, key, value = randn(rows, query_heads, 256), randn(rows, kv_heads, 256), randn(rows, kv_heads, 256)
    kv_pool = randn(len(pages), 2, kv_heads, PAGE_SIZE, 256)
    schedule = fork_schedule(meta, conv_width=4, group=group, head_dim=256)

    def delta() -> Tensor:
        slots = meta.row_segments, meta.initial_slots, meta.final_slots
        return fork_gated_delta_triton(*inputs, *pools, scratch, *tree, *slots, schedule, depth=2, **sizes)

    def attention(query_rows: Tensor | None = None) -> Tensor:
        selected = query if query_rows is None else query[: len(query_rows)]
        paged = meta.segment_starts, meta.segment_pages, meta.page_table
        stream = meta.row_segments, *tree, *paged, schedule
        return fork_attention_triton(selected, key, value, kv_pool, query_rows, *stream, scale=1 / 16, depth=2)

    exact = fork_gated_delta_reference(*(x.double() for x in inputs), *tree, **sizes)
    ratios = {"delta": error_ratio(delta(), exact)}
    for name, query_rows in (("attention", None), ("attention_readout", meta.readout_rows)):
        selected = query if query_rows is None else query[: len(query_rows)]
        doubles = (x.double() for x in (selected, key, value))
        exact = fork_attention_reference(*doubles, query_rows, *tree, scale=1 / 16, window=0)
        ratios[name] = error_ratio(attention(query_rows), exact)
    runs: dict[str, Callable[[], object]] = {
        "schedule": lambda: fork_schedule(meta, conv_width=4, group=group, head_dim=256),
        "delta": delta,
        "attention": attention,
        "attention_readout": lambda: attention(meta.readout_rows),
    }
    result: dict[str, float | None] = {}
    for name, run in runs.items():
        ratio = ratios.get(name, 0.0)
        time = median_us(run) if ratio <= BUDGET else None  # NaN is no ratio
        shown = "   parity check failed" if time is None else f"{time:9.1f} us"
        print(f"{workload:12} {size:5} {name:18} {shown}   error ratio {ratio:.2f}", flush=True)
        result[name] = time
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="race,multirc,quality_all")
    parser.add_argument("--sizes", default="0.8b,4b")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    results = {
        f"{size} {workload}": bench(workload, size)
        for size in arguments.sizes.split(",")
        for workload in arguments.workloads.split(",")
    }
    print(json.dumps({"microseconds": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
