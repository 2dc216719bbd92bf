"""Compile every kernel for GPUs that need not be there, and print registers, spills and shared memory.

    python -m scripts.cross_compile [--arch 80,86,89,90] [--jobs 2]

Fails if a kernel does not compile, or needs more shared memory than a program may have on that GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flide.ops.fork_attention import triton as attention
from flide.ops.fork_gated_delta import triton as delta
from flide.ops.fork_schedule import triton as schedule
from flide.ops.fork_schedule.reference import CHUNK
from flide.ops.gated_norm import triton as gated_norm
from flide.ops.launch import TABLES
from flide.ops.norm_rotary import triton as norm_rotary
from flide.runtime.metadata import MAX_SAVES, PAGE_SIZE
from flide.runtime.tree import MAX_DEPTH

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes a program may have
FLOATS = {"p_cos", "p_sin", "p_partial", "p_stats", "p_A_log", "p_decay", "p_total_decay", "p_state_pool", "p_scratch"}
FLOATS |= {"p_norm_weight"}
BFLOATS = {"p_qkv", "p_a", "p_b", "p_weight", "p_dt_bias", "p_conv_pool", "p_w", "p_q", "p_k", "p_p", "p_v"}
BFLOATS |= {"p_x", "p_gate", "p_out", "p_pool", "p_conv", "p_to", "p_rounded"}
SCALARS = {"scale_log2": "fp32", "beta_scale": "fp32", "eps": "fp32", "offset": "fp32"}


def kernels(arch: int) -> dict[str, tuple[Any, dict[str, Any], int]]:
    """Name -> (kernel, constants, warps), at the sizes of real models and with the launch table of the GPU."""
    table = TABLES[arch // 10, arch % 10]
    found: dict[str, tuple[Any, dict[str, Any], int]] = {}
    for segments in (16, 2048):
        constants = {"SP": segments, "QP": min(1024, segments), "W": 4, "SAVES": MAX_SAVES, "L": CHUNK}
        constants |= {"BQ": table.attention.query_block(4), "DEPTH": MAX_DEPTH, "B": schedule.ROWS}
        found[f"schedule, {segments} segments"] = schedule._fork_schedule_kernel, constants, 8
    for heads, key_heads, key_dim, value_dim in ((16, 16, 128, 128), (48, 16, 128, 128), (30, 30, 96, 192)):
        for cache in (False, True):
            sizes = "" if key_dim == value_dim else f" of {key_dim} x {value_dim}"
            kind = f"{heads} heads{sizes}, {'cached' if cache else 'fresh'}"
            constants = {"N": heads, "E": key_heads, **head_sizes(key_dim, value_dim), "WIDTH": 4, "HAS_CACHE": cache}
            channels = 2 * key_heads * key_dim + heads * value_dim
            convolution = {"BR": table.conv_rows, "FAST": True}
            convolution |= {f"G{x}": max(1, table.conv_channels // constants[f"{x}P"]) for x in "KV"}
            convolution |= {"C": channels, "S_QKV": channels + value_dim * heads + 2 * heads}
            found[f"conv, {kind}"] = delta._conv_kernel, constants | convolution, table.conv_warps
            constants |= {"L": CHUNK, "PRECISION": "tf32", "FAST": True, "WINDOW": 4}
            for rows, short, warps in (
                (CHUNK, 0, table.prepare_warps),
                (CHUNK, delta.SHORT, table.prepare_warps),
                (delta.SHORT, delta.SHORT, table.short_warps),
            ):
                tile = {"ROWS": rows, "SHORT": short, "LEVELS": rows.bit_length() - 1}
                which = "" if not short else f" of tiles of {rows}"
                found[f"prepare{which}, {kind}"] = delta._prepare_kernel, constants | tile, warps
    for level, narrow, cache in ((0, 16, True), (0, 16, False), (0, 32, False), (1, 128, True), (2, 128, True)):
        columns = table.scan_columns
        pipelined = level == 0 or columns < delta.UNPIPELINED
        constants = {"BV": columns, "BV_FEW": min(narrow, columns), "L": CHUNK, "LEVEL": level, "HAS_CACHE": cache}
        constants |= {"SHORT": delta.SHORT, "PRECISION": "tf32", "STAGES": table.scan_stages if pipelined else 0}
        kind = f"level {level}, {narrow} columns of few, {'cached' if cache else 'fresh'}"
        for name, heads, key_dim, value_dim in (("scan", 16, 128, 128), ("scan of 96 x 192", 30, 96, 192)):
            sizes = {name: size for name, size in head_sizes(key_dim, value_dim).items() if name != "VP"}
            scan = {"N": heads, "E": heads, **sizes, **constants}
            found[f"{name}, {kind}"] = delta._scan_kernel, scan, table.scan_warps
    for group, head_dim, window in (
        *((4, 256, 0), (6, 256, 0), (1, 128, 0)),
        *((8, 256, 512), (2, 256, 1024), (8, 512, 0), (16, 512, 0)),
    ):
        launch = table.attention_of(head_dim)
        for rows in (False, True):
            for depth in (3,) if window or head_dim > 256 else (2, 3):  # 3 has all of 2's code
                constants = {"M": 2, "G": group, "GP": triton.next_power_of_2(group), "H": head_dim, "PAGE": PAGE_SIZE}
                constants |= {"BQ": launch.query_block(group), "BN": launch.key_block, "STAGES": launch.stages}
                constants |= {
                    "VALUE_SPLITS": launch.value_splits,
                    "HAS_ROWS": rows,
                    "DEPTH": depth,
                    "PRECISION": "tf32",
                    "WINDOW": window,
                }
                constants |= {"SPLITS": attention.READOUT_SPLITS if rows else 1}
                name = f"attention{heads_of_size(head_dim)}, group {group}, {'some' if rows else 'all'} rows"
                name += f"{f', window {window}' if window else ''}, depth {depth}"
                found[name] = attention._fork_attention_kernel, constants, launch.warps
    for head_dim, rotated in ((256, 32), (256, 128), (512, 256)):
        size = heads_of_size(head_dim)
        constants = {"M": 2, "N": 8, "H": head_dim, "PAGE": PAGE_SIZE, "B": 16, "HAS_ROWS": False}
        for write in (True, False):
            kernel = attention._write_pages_kernel, constants | {"WRITE": write}, 4
            found[f"write pages{size}" if write else f"zeros of padding{size}"] = kernel
        constants = {"N": 8, "H": head_dim, "SPLITS": attention.READOUT_SPLITS}
        found[f"combine readouts{size}"] = attention._combine_kernel, constants, attention.combine_warps(head_dim)
        constants = {"N": 8, "H": head_dim, "F": rotated, "B": norm_rotary.HEADS}
        kind = "norm and rotary" if rotated == 32 else f"norm and rotary of {rotated} pairs"
        found[kind] = norm_rotary._norm_rotary_kernel, constants, norm_rotary.WARPS
    for heads, value_dim in ((16, 128), (48, 128), (30, 192)):
        constants = {"N": heads, "V": value_dim, "VP": triton.next_power_of_2(value_dim), "B": gated_norm.HEADS}
        found[f"gated norm, {heads} heads"] = gated_norm._gated_norm_kernel, constants, gated_norm.WARPS
    return found


def heads_of_size(head_dim: int) -> str:
    return f" of {head_dim}" if head_dim > 256 else ""


def head_sizes(key_dim: int, value_dim: int) -> dict[str, int]:
    """Constants of the delta rule's kernels."""
    sizes = {"K": key_dim, "V": value_dim}
    return sizes | {f"{name}P": triton.next_power_of_2(size) for name, size in sizes.items()}


def compile_for(kernel: Any, constants: dict[str, Any], warps: int, arch: int) -> Any:
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = "*fp32" if name in FLOATS else "*bf16" if name in BFLOATS else "*i32"
        signature[name] = pointer if name.startswith("p_") else SCALARS.get(name, "i32")
        if name.startswith(("p_", "s_")) or name == "C":
            attributes[(index,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


def resources(compiled: Any) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return f"{found.get('REG', 0):4} registers {found.get('STACK', 0):5} bytes of stack"


def report(arch: int, name: str) -> tuple[str, bool]:
    """One line about one kernel, and whether it compiles and fits."""
    try:
        compiled = compile_for(*kernels(arch)[name], arch)
    except Exception as error:  # noqa: BLE001 - reported, and the next kernel is tried
        return f"sm_{arch} {name:40} FAILED {str(error).splitlines()[-1][:120]}", False
    shared = compiled.metadata.shared
    fits = shared <= SHARED_MEMORY[arch]
    verdict = "" if fits else f"  TOO MUCH for {SHARED_MEMORY[arch]}"
    return f"sm_{arch} {name:40} {shared:7} bytes shared {resources(compiled)}{verdict}", fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="80,86,89,90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile at the same time")
    arguments = parser.parse_args()
    archs = map(int, arguments.arch.split(","))
    work = [(arch, name) for arch in archs for name in kernels(arch) if arguments.only in name]
    if not work:
        parser.error(f"no kernel's name contains {arguments.only!r}")
    all_fit = True
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for line, fits in pool.map(report, *zip(*work, strict=True)):
            print(line, flush=True)
            all_fit &= fits
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
