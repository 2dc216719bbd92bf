"""Whole models in bfloat16 at their true shape: how far from float32 are Flide's kernels, and how far is transformers?

    python -m scripts.fidelity --size 0.8b [--prompts 64] [--seed 0] [--compiled]

Random weights, made on the device; requests with the lengths of real ones. The reference is transformers in float32,
every prompt alone. Against it stand transformers in bfloat16, every prompt alone, and Flide in bfloat16, forked and
several requests a round. Exit code 1 if Flide's RMS logit error is more than BF16_ERROR_RATIO times transformers'. Last
line: one JSON object. Two bytes and four bytes a parameter are held at once: 9b takes about 60 GB.

Shapes: N prompts, D hidden size, L labels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.fx.experimental import _config as symbolic_shapes
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from flide.models.decision import ForDecision, config_fields
from flide.runtime import ForkMetadata, StreamCapacity, TokenTree
from flide.runtime.metadata import fresh_caches
from flide.runtime.tree import prompts_of
from scripts.random_models import SIZES, config_of, random_model
from scripts.workloads import Shape, realistic
from tests.oracle import random_tree
from tests.tolerance import BF16_ERROR_RATIO

REFERENCE, THEIRS, OURS, COMPILED = "transformers float32", "transformers", "flide", "flide compiled"
LABELS = 26  # A to Z
TRUNK_SHARE = 4  # a QuALITY trunk is cut to a quarter: the reference runs it once per question
ROUND_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Errors:
    """How far one computation is from the float32 reference.

    Attributes:
        logit_rms, hidden_rms: root-mean-square error of the label logits and of the final hidden states.
        tv_mean, tv_max: total-variation distance of the label probabilities, over prompts.
        top1: share of prompts whose likeliest label is the reference's.
    """

    logit_rms: float
    hidden_rms: float
    tv_mean: float
    tv_max: float
    top1: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ``compare`` found. ``errors`` has THEIRS, OURS and, if asked for, COMPILED; ``seconds`` also REFERENCE."""

    prompts: int
    rounds: int
    logit_std: float
    errors: dict[str, Errors]
    seconds: dict[str, float]

    def ratio(self, name: str, quantity: str = "logit_rms") -> float:
        """An error of one computation relative to that of transformers in bfloat16."""
        ours, theirs = (getattr(self.errors[key], quantity) for key in (name, THEIRS))
        return ours / theirs if theirs else math.inf

    @property
    def passes(self) -> bool:
        """Whether no computation of Flide errs more than it may. Not-a-number does not pass."""
        return all(self.ratio(name) <= BF16_ERROR_RATIO for name in self.errors)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a number that is none becomes null."""

        def finite(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: finite(inner) for key, inner in value.items()}
            return None if isinstance(value, float) and not math.isfinite(value) else value

        names = [name for name in self.errors if name != THEIRS]
        ratios: dict[str, Any] = {"ratio": {name: self.ratio(name) for name in names}}
        ratios["hidden_ratio"] = {name: self.ratio(name, "hidden_rms") for name in names}
        return finite(asdict(self) | ratios | {"passes": self.passes})


def random_requests(prompts: int, vocab: int, *, seed: int = 0) -> list[TokenTree]:
    """Requests with ``prompts`` branches in all: one long trunk, then MultiRC and RACE in turn; random tokens.

    No request has more than a quarter of the branches, so that there are several.
    """
    long, multirc, race = (realistic(name, seed=seed) for name in ("quality_all", "multirc", "race_all"))
    shape = next(long)
    shape = Shape(shape.trunk // TRUNK_SHARE, shape.branches)
    generator = torch.Generator().manual_seed(seed)
    most, left, trees = max(1, prompts // 4), prompts, []
    for following in itertools.cycle((multirc, race)):
        branches = shape.branches[: min(most, left)]
        trees.append(random_tree((shape.trunk, list(branches)), vocab, generator))
        left -= len(branches)
        if not left:
            break
        shape = next(following)
    return trees


def random_labels(vocab: int, *, seed: int = 0) -> list[int]:
    """Token ids of the options of every prompt."""
    return random.Random(seed).sample(range(vocab), LABELS)


def compare(
    model: ForDecision,
    config: Mapping[str, Any],
    trees: Sequence[TokenTree],
    label_ids: Sequence[int],
    *,
    compiled: bool = False,
    weights: Mapping[str, Tensor] | None = None,
) -> Comparison:
    """Run every prompt the three (or four) ways. Merges the model's projections and gives it pools.

    Args:
        model: in bfloat16; on CUDA it runs through the kernels, on a CPU through their references.
        config: transformers' text config, from which its models are built.
        trees: the requests; each leaf is a prompt.
        label_ids: token ids of the options.
        compiled: whether to run Flide through torch.compile, too.
        weights: what transformers gets, under its names; None for the model's own.
    """
    prompts = [prompt for tree in trees for prompt in prompts_of(tree)]
    labels_LD = model.label_rows(label_ids).cpu()
    hidden: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - begun
        print(f"{name}: {seconds[name]:.1f} s", flush=True)

    with full_float32():
        rounds = pack_rounds(model, trees)
        weights = model.state_dict() if weights is None else weights  # after the merge, or memory would hold both
        with timed(OURS):
            hidden[OURS] = flide_hidden_states(model, rounds)
        if compiled:
            # Without duck shapes: sizes that happen to be equal in the first round are not one size.
            with timed(COMPILED), symbolic_shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                hidden[COMPILED] = flide_hidden_states(torch.compile(model, fullgraph=True, dynamic=True), rounds)
        for name, dtype in ((THEIRS, torch.bfloat16), (REFERENCE, torch.float32)):
            with timed(name):
                hidden[name] = isolated_hidden_states(transformers_model(config, weights, dtype), prompts)
    exact_ND = hidden.pop(REFERENCE)

    def read(hidden_ND: Tensor) -> Tensor:
        return model.label_logits(hidden_ND, labels_LD)

    # All read their labels in float32, as Flide does; transformers' own bfloat16 logits would only add to its error.
    errors = {name: measure(hidden[name], exact_ND, read) for name in (THEIRS, OURS, COMPILED) if name in hidden}
    return Comparison(len(prompts), len(rounds), read(exact_ND).std().item(), errors, seconds)


def pack_rounds(model: ForDecision, trees: Sequence[TokenTree]) -> list[tuple[int, ForkMetadata]]:
    """Rounds of up to ROUND_ROWS rows, padded, on the model's device: (prompts, metadata). Gives the model pools."""
    device = model.lm_head.weight.device
    groups: list[list[TokenTree]] = [[]]
    for tree in trees:
        if groups[-1] and sum(other.num_tokens for other in (*groups[-1], tree)) > ROUND_ROWS:
            groups.append([])
        groups[-1].append(tree)
    rounds, pages = [], 0
    for group in groups:
        caches = fresh_caches(group)
        c = ForkMetadata.pack(group, caches=caches).capacity
        pages = max(pages, c.pages)
        capacity = StreamCapacity(c.tokens + 37, c.segments + 5, c.readouts + 3, c.pages + 2, c.depth)
        meta = ForkMetadata.pack(group, capacity=capacity, caches=caches)
        rounds.append((c.readouts, meta.to(device)))
    if device.type == "cuda":
        model.check_kernels()
    model.merge_projections()
    model.allocate_pools(pages=pages, parents=max(len(group) for group in groups))
    return rounds


@torch.inference_mode()
def flide_hidden_states(forward: Callable[..., Tensor], rounds: Sequence[tuple[int, ForkMetadata]]) -> Tensor:
    """``[N, D]`` float32 final hidden states of all rounds, on the CPU."""
    return torch.cat([forward(meta.tokens, meta)[:prompts].float().cpu() for prompts, meta in rounds])


def transformers_model(config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """transformers' model of some weights, all in one dtype, as it would load a checkpoint; memory of equal dtype is
    shared. Rotary frequencies stay float32, which casting a whole model would round."""
    is_gemma = str(config["model_type"]).startswith("gemma4")
    text = (Gemma4TextConfig if is_gemma else Qwen3_5TextConfig).from_dict(dict(config))
    if dtype == torch.float32:
        text._attn_implementation = "eager"  # plain products and softmax; below, its default
    with torch.device("meta"):
        model = (Gemma4ForCausalLM if is_gemma else Qwen3_5ForCausalLM)(text)
    cast: dict[int, Tensor] = {}  # tied weights stay one
    for weight in weights.values():
        cast.setdefault(weight.data_ptr(), weight.detach().to(dtype))
    model.load_state_dict({name: cast[weight.data_ptr()] for name, weight in weights.items()}, assign=True)
    device = model.lm_head.weight.device
    model.model.rotary_emb = type(model.model.rotary_emb)(text).to(device)
    for module in model.modules():
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
    assert all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    return model.eval()


@torch.inference_mode()
def isolated_hidden_states(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """``[N, D]`` float32 final hidden states of prompts that run alone, unpadded, one at a time; on the CPU."""
    device = model.lm_head.weight.device
    rows = []
    for prompt in prompts:
        output = model.model(input_ids=torch.tensor([prompt], device=device), use_cache=False)
        rows.append(output.last_hidden_state[0, -1].float().cpu())
    return torch.stack(rows)


def measure(hidden_ND: Tensor, exact_ND: Tensor, read: Callable[[Tensor], Tensor]) -> Errors:
    """The errors of one computation's final hidden states, and of the label logits that are read from them."""
    logits_NL, exact_NL = read(hidden_ND), read(exact_ND)
    tv_N = (logits_NL.softmax(-1) - exact_NL.softmax(-1)).abs().sum(-1) / 2
    return Errors(
        logit_rms=(logits_NL - exact_NL).square().mean().sqrt().item(),
        hidden_rms=(hidden_ND - exact_ND).square().mean().sqrt().item(),
        tv_mean=tv_N.mean().item(),
        tv_max=tv_N.max().item(),
        top1=(logits_NL.argmax(-1) == exact_NL.argmax(-1)).float().mean().item(),
    )


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32, neither in products nor (where it is the default) in convolutions."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


def run(
    size: str, *, prompts: int = 64, seed: int = 0, compiled: bool = False, device: torch.device | str = "cuda"
) -> Comparison:
    """Compare and print one published size."""
    config = config_fields(config_of(size))
    begun = time.perf_counter()
    model = random_model(config, device=device, seed=seed)
    vocab = model.config.vocab_size
    trees = random_requests(prompts, vocab, seed=seed)
    result = compare(model, config, trees, random_labels(vocab, seed=seed), compiled=compiled)
    print(
        f"{size}: {result.prompts} prompts of {len(trees)} requests in {result.rounds} rounds, {LABELS} labels,"
        f" logit deviation {result.logit_std:.3f}, {time.perf_counter() - begun:.0f} s"
    )
    print(f"{'bfloat16':15} logit RMS  ratio  hidden RMS  ratio  TV mean     max   top-1")
    for name, errors in result.errors.items():
        print(
            f"{name:15} {errors.logit_rms:9.5f} {result.ratio(name):6.3f} {errors.hidden_rms:11.5f}"
            f" {result.ratio(name, 'hidden_rms'):6.3f} {errors.tv_mean:8.5f} {errors.tv_max:7.4f} {errors.top1:7.3f}"
        )
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", required=True, type=str.lower, choices=SIZES)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="run Flide through torch.compile, too")
    parser.add_argument("--device", default="cuda", help="cpu: the references of the kernels; slow")
    options = parser.parse_args(arguments)
    if options.prompts < 1:
        parser.error("--prompts must be at least 1")
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    print(gpu, "torch", torch.__version__, "transformers", transformers.__version__)
    result = run(
        options.size, prompts=options.prompts, seed=options.seed, compiled=options.compiled, device=options.device
    )
    print(f"at most {BF16_ERROR_RATIO} times transformers' logit error: {'yes' if result.passes else 'NO'}")
    print(json.dumps({"size": options.size, "seed": options.seed, "gpu": gpu, **result.to_dict()}))
    return 0 if result.passes else 1


if __name__ == "__main__":
    sys.exit(main())
