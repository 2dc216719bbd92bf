"""Compile every kernel for GPUs that need not be there, and print registers, spills and shared memory.

    python -m scripts.cross_compile [--arch 80,86,89,90]

Fails if a kernel does not compile, or needs more shared memory than a program may have on that GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flide.ops.fork_attention import triton as attention
from flide.ops.fork_gated_delta import triton as delta
from flide.ops.fork_schedule import triton as schedule
from flide.ops.fork_schedule.reference import CHUNK, query_block
from flide.runtime.metadata import MAX_SAVES, PAGE_SIZE

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes a program may have
FLOATS = {"p_A_log", "p_decay", "p_total_decay", "p_state_pool", "p_scratch"}
BFLOATS = {"p_qkv", "p_a", "p_b", "p_weight", "p_dt_bias", "p_conv_pool", "p_w", "p_u", "p_q", "p_k", "p_p", "p_v"}
BFLOATS |= {"p_out", "p_pool", "p_conv", "p_to"}
SCALARS = {"scale_log2": "fp32", "beta_scale": "fp32"}


def kernels() -> dict[str, tuple[Any, dict[str, Any], int]]:
    """Name -> (kernel, constants, warps), at the sizes of real models."""
    sizes = {"K": 128, "V": 128, "L": CHUNK, "PRECISION": "tf32"}
    found: dict[str, tuple[Any, dict[str, Any], int]] = {}
    for segments in (16, 2048):
        constants = {"SP": segments, "QP": min(1024, segments), "W": 4, "SAVES": MAX_SAVES, "L": CHUNK, "BQ": 32}
        constants |= {"DEPTH": 3, "B": schedule.ROWS}
        found[f"schedule, {segments} segments"] = schedule._fork_schedule_kernel, constants, 8
    for heads in (16, 32, 48):
        for cache in (False, True):
            kind = f"{heads} heads, {'cached' if cache else 'fresh'}"
            constants = {"N": heads, "E": 16, "K": 128, "V": 128, "WIDTH": 4, "HAS_CACHE": cache}
            convolution = {"BR": delta.CONV_ROWS, "FAST": True}
            found[f"conv, {kind}"] = delta._conv_kernel, constants | convolution, delta.CONV_WARPS
            constants |= {"L": CHUNK, "PRECISION": "tf32", "B": delta.BLOCK, "WINDOW": 4}
            found[f"prepare, {kind}"] = delta._prepare_kernel, constants, delta.PREPARE_WARPS
    for level, columns in delta.SCAN_COLUMNS.items():
        constants = {
            **sizes,
            "N": 16,
            "E": 16,
            "BV": columns,
            "LEVEL": level,
            "HAS_CACHE": True,
            "STAGES": delta.SCAN_STAGES,
        }
        found[f"scan, level {level}"] = delta._scan_kernel, constants, delta.SCAN_WARPS
    for group in (4, 6):
        padded = triton.next_power_of_2(group)
        for rows in (False, True):
            for depth in (2, 3):
                constants = {"M": 2, "G": group, "GP": padded, "H": 256, "BQ": query_block(group), "PAGE": PAGE_SIZE}
                constants |= {"BN": attention.KEY_BLOCK, "HAS_ROWS": rows, "DEPTH": depth, "PRECISION": "tf32"}
                constants |= {"STAGES": attention.STAGES}
                name = f"attention, group {group}, {'some' if rows else 'all'} rows, depth {depth}"
                found[name] = attention._fork_attention_kernel, constants, attention.WARPS
    constants = {"M": 2, "N": 8, "H": 256, "PAGE": PAGE_SIZE, "B": 16, "HAS_ROWS": False}
    found["write pages"] = attention._write_pages_kernel, constants, 4
    return found


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="80,86,89,90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    arguments = parser.parse_args()
    failed = 0
    for arch in map(int, arguments.arch.split(",")):
        for name, (kernel, constants, warps) in kernels().items():
            if arguments.only not in name:
                continue
            try:
                compiled = compile_for(kernel, constants, warps, arch)
            except Exception as error:  # noqa: BLE001 - reported, and the next kernel is tried
                print(f"sm_{arch} {name:40} FAILED {str(error).splitlines()[-1][:120]}", flush=True)
                failed += 1
                continue
            shared = compiled.metadata.shared
            fits = shared <= SHARED_MEMORY[arch]
            failed += not fits
            verdict = "" if fits else f"  TOO MUCH for {SHARED_MEMORY[arch]}"
            print(f"sm_{arch} {name:40} {shared:7} bytes shared {resources(compiled)}{verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
