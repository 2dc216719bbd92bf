"""Gemma 4: every branch gets what its isolated prompt gets in transformers, and all else works with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoTokenizer,
    Gemma4ForCausalLM,
)

from flide import AutoModelForDecision, CheckpointError, Choice, DecisionRequest, Engine, EngineConfig, Noul
from flide.models import Gemma4Config, Gemma4ForDecision, gemma4
from flide.models.weights import StoredTensor
from flide.runtime import ForkMetadata, StreamCapacity, TokenTree, TrunkCache
from flide.runtime.metadata import fresh_caches
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.tree import prompts_of
from flide.train.trainee import checkpoint_layers
from scripts.make_checkpoint import load_config, meta_model, stored_tensors
from tests.models.gemma4 import (
    FULL,
    SLIDING,
    TINY,
    VARIANTS,
    VOCAB,
    WINDOW,
    published,
    tiny_config,
    tiny_gemma4,
    tiny_multimodal,
    write_tokenizer,
)
from tests.models.test_compile import CAPACITY, OTHER_CAPACITY, Counting, needs_compiler, pack
from tests.models.test_cuda import logits_of as logits_on_cuda
from tests.models.test_interpreter import needs_interpreter, run_kernels
from tests.oracle import isolated_logits, random_tree
from tests.runtime.test_engine import isolated_probabilities
from tests.tolerance import BF16_ERROR_RATIO, GRADIENT_FP32, LOGITS_FP32, PROBABILITY_FP32

CONFIGS = Path(__file__).parents[2] / "scripts" / "configs"
W = WINDOW
TREES: dict[str, list[tuple[int, list[Any]]]] = {
    "trunk_around_the_window": [(W - 1, [1, 2]), (W, [1, 2]), (W + 1, [1, 2])],
    "path_around_the_window": [(3, [W - 4, W - 3, W - 2]), (1, [W - 2, W - 1, W])],
    "branch_around_the_window": [(2 * W, [W - 1, W, W + 1])],
    "no_trunk": [(0, [1, W - 1, W, W + 1, 3 * W])],
    "single_token_branches": [(12, [1, 1, 1]), (1, [1])],
    "long_trunk": [(130, [5, 1, 70])],
    "mixed_round": [(0, [65]), (130, [1, 2]), (2, [64, 3]), (W, [5])],
    "reversed_round": [(W, [5]), (2, [3, 64]), (130, [2, 1]), (0, [65])],
    "trunk_alone": [(7, []), (5, [2])],
    "depth_three": [(5, [(W - 6, [1, 2, W]), (3, [7]), 4]), (66, [(1, [1, 1]), (W + 1, [2])])],
}


def copy_weights(hf: Any) -> Gemma4ForDecision:
    model = Gemma4ForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=VARIANTS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Gemma4ForDecision]:
    hf = tiny_gemma4(request.param)
    return hf, copy_weights(hf)


@pytest.fixture(scope="module")
def e2b() -> tuple[Any, Gemma4ForDecision]:
    hf = tiny_gemma4("e2b")
    return hf, copy_weights(hf)


def trees_of(name: str) -> list[TokenTree]:
    generator = torch.Generator().manual_seed(1)
    return [random_tree(shape, VOCAB, generator) for shape in TREES[name]]


def logits_of(model: Gemma4ForDecision, hidden_states: torch.Tensor) -> torch.Tensor:
    return model.softcap(hidden_states @ model.lm_head.weight.T)


def readout_logits(model: Gemma4ForDecision, meta: ForkMetadata, **options: Any) -> torch.Tensor:
    return logits_of(model, model(meta.tokens, meta, **options))


def expected_logits(hf: Any, trees: list[TokenTree]) -> torch.Tensor:
    return torch.stack([isolated_logits(hf, prompt) for tree in trees for prompt in prompts_of(tree)])


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert 0.3 < expected.std() < 3
    assert (logits[: len(expected)] - expected).abs().max() <= LOGITS_FP32 * expected.std()


@pytest.mark.parametrize("name", TREES)
def test_branch_matches_isolated_prompt(models: Any, name: str) -> None:
    hf, model = models
    trees = trees_of(name)
    c = ForkMetadata.pack(trees).capacity
    capacity = StreamCapacity(c.tokens + 37, c.segments + 9, c.readouts + 5, depth=c.depth)
    expected = expected_logits(hf, trees)
    for meta in (ForkMetadata.pack(trees), ForkMetadata.pack(trees, capacity=capacity)):
        assert_close(readout_logits(model, meta), expected)


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in ("e2b", "12b") else [pytest.mark.slow]) for v in VARIANTS]
)
def test_every_part_matters(variant: str) -> None:
    """A fault in any part would show in the logits."""
    model = copy_weights(tiny_gemma4(variant))
    meta = ForkMetadata.pack(trees_of("mixed_round"))
    before = readout_logits(model, meta)

    def moves() -> bool:
        return bool((readout_logits(model, meta) - before).abs().max() > 30 * LOGITS_FP32 * before.std())

    torch.manual_seed(0)
    last = model.model.layers[-1]
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        # Many vectors act up to their size only; that of the last layer is undone by the norm behind it.
        parameter.mul_(torch.rand_like(parameter)) if parameter.ndim == 1 else parameter.zero_()
        assert moves() == (parameter is not last.layer_scalar), name
        parameter.copy_(kept)
    for mixer in (layer.self_attn for layer in model.model.layers):
        for attribute, value in (("scale", 0.5), ("window", 2 * W if mixer.window else W)):
            kept = getattr(mixer, attribute)
            setattr(mixer, attribute, value)
            assert moves(), attribute
            setattr(mixer, attribute, kept)


@pytest.mark.parametrize("selective", [True, False])
def test_behind_the_last_writer_only_readout_rows_are_computed(models: Any, selective: bool) -> None:
    """Exactly: the ablation, which computes all rows, gives the same."""
    hf, model = models
    trees = trees_of("mixed_round")
    meta = ForkMetadata.pack(trees)
    rows: list[int] = []
    handles = [
        layer.mlp.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
        for layer in model.model.layers
    ]
    logits = readout_logits(model, meta, selective_readout=selective)
    for handle in handles:
        handle.remove()
    assert_close(logits, expected_logits(hf, trees))
    computed = len(model.config.layer_types) - model.config.num_kv_shared_layers - 1 if selective else len(rows)
    tokens, readouts = meta.capacity.tokens, meta.capacity.readouts
    assert rows == [tokens] * computed + [readouts] * (len(rows) - computed)


def test_merged_projections_move_no_answer(models: Any) -> None:
    hf, _ = models
    model = copy_weights(hf)
    model.merge_projections()
    layers = model.model.layers
    writers = [layer for layer in layers if not layer.is_reader]
    assert all(layer.self_attn.merged is not None for layer in writers)
    assert all(layer.mlp.merged is not None for layer in layers)
    trees = trees_of("mixed_round")
    for selective in (True, False):
        logits = readout_logits(model, ForkMetadata.pack(trees), selective_readout=selective)
        assert_close(logits, expected_logits(hf, trees))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in hf.state_dict().items())


def test_pools_change_nothing_and_readers_have_none(models: Any) -> None:
    hf, plain = models
    model = copy_weights(hf)
    trees = trees_of("mixed_round")
    meta = ForkMetadata.pack(trees, caches=fresh_caches(trees))
    model.allocate_pools(pages=meta.capacity.pages, parents=len(trees))
    assert torch.equal(readout_logits(model, meta), readout_logits(plain, meta))
    pooled = [layer for layer in model.model.layers if getattr(layer.self_attn, "kv_pool", None) is not None]
    assert pooled == [layer for layer in model.model.layers if not layer.is_reader]
    pools = sum(layer.self_attn.kv_pool.nbytes for layer in pooled)
    assert model.kv_bytes_per_token * meta.capacity.pages * 64 == pools


@pytest.mark.parametrize("length", [1, W - 1, W, 64, 70])
def test_a_resumed_trunk_equals_a_fresh_one(e2b: Any, length: int) -> None:
    hf, _ = e2b
    model = copy_weights(hf)
    model.allocate_pools(pages=2, parents=1)
    tree = random_tree((71, [2, 9]), VOCAB, torch.Generator().manual_seed(1))
    first = ForkMetadata.pack([TokenTree(tree.tokens[:length])], caches=[TrunkCache(pages=[1, 0][: -(-length // 64)])])
    readout_logits(model, first)
    rest = TokenTree(tree.tokens[length:], tree.children)
    meta = ForkMetadata.pack([rest], caches=[TrunkCache(length, slot=1, pages=[1, 0])])
    assert_close(readout_logits(model, meta), expected_logits(hf, [tree]))


def test_garbage_in_one_request_leaves_the_others_bit_identical(models: Any) -> None:
    model = copy_weights(models[0])
    garbage = VOCAB - 1  # a token whose embedding is NaN
    model.model.embed_tokens.weight[garbage] = float("nan")
    generator = torch.Generator().manual_seed(1)
    trees = [random_tree(shape, garbage, generator) for shape in ((W, [3, 1]), (70, [1, 2]), (0, [9]))]
    others = [True, True, False, False, True]
    dirty = [trees[0], TokenTree([garbage] * 70, (TokenTree([garbage]), TokenTree([garbage] * 2))), trees[2]]
    clean_ND, dirty_ND = (model(meta.tokens, meta) for meta in map(ForkMetadata.pack, (trees, dirty)))
    assert torch.equal(dirty_ND[others], clean_ND[others])
    assert clean_ND.isfinite().all()
    assert dirty_ND[2:4].isnan().all()


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("e2b", {"layer_types": [SLIDING, FULL] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}),
        pytest.param("12b", {"layer_types": [SLIDING, FULL], "num_hidden_layers": 2}, marks=pytest.mark.slow),
    ],
    ids=["e2b", "12b"],
)
def test_one_graph_serves_all_capacities(variant: str, changes: dict[str, Any]) -> None:
    hf = tiny_gemma4(variant, **changes)
    model = copy_weights(hf)
    torch._dynamo.reset()
    compiled = Counting(model, dynamic=True)
    for name, capacity in (("three", CAPACITY), ("many", OTHER_CAPACITY), ("deep", CAPACITY)):
        trees, meta = pack(name, capacity)
        assert_close(logits_of(model, compiled(meta)), expected_logits(hf, trees))
    assert compiled.graphs == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["e2b", "12b"])
def test_inductor_matches_isolated_prompts(variant: str) -> None:
    hf = tiny_gemma4(variant)
    model = copy_weights(hf)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for name, capacity in (("three", CAPACITY), ("many", OTHER_CAPACITY)):
            trees, meta = pack(name, capacity)
            assert_close(logits_of(model, compiled(meta.tokens, meta)), expected_logits(hf, trees))


def test_gradients_are_those_of_isolated_prompts(e2b: Any) -> None:
    """Of every parameter, layers recomputed: keys and values collect them from all layers that read them."""
    hf = tiny_gemma4("e2b")
    model = copy_weights(hf).requires_grad_(True)
    checkpoint_layers(model)
    trees = trees_of("path_around_the_window")
    meta = ForkMetadata.pack(trees)
    prompts = [prompt for tree in trees for prompt in prompts_of(tree)]
    targets = torch.arange(len(prompts))
    nn.functional.cross_entropy(readout_logits(model, meta), targets).backward()
    logits = torch.stack([hf(torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in prompts])
    nn.functional.cross_entropy(logits, targets).backward()
    expected = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name, parameter in model.named_parameters():
        if not name.endswith("layer_scalar"):  # a buffer in transformers
            largest = expected[name].abs().max().clamp(min=1)
            assert (parameter.grad - expected[name]).abs().max() <= GRADIENT_FP32 * largest, name


def test_options_are_read_behind_the_cap(e2b: Any) -> None:
    hf, model = e2b
    tree = random_tree((9, [3]), VOCAB, torch.Generator().manual_seed(1))
    meta = ForkMetadata.pack([tree])
    probabilities = model.option_probabilities(model(meta.tokens, meta), [[3, 5, 7]])
    expected = expected_logits(hf, [tree])[:, [3, 5, 7]].softmax(-1)
    torch.testing.assert_close(probabilities, expected, atol=PROBABILITY_FP32, rtol=0)


class TestKernels:
    @needs_interpreter
    @pytest.mark.parametrize(
        ("variant", "selective"), [("e2b", True), ("e2b", False), ("12b", True)], ids=["e2b", "e2b_all_rows", "12b"]
    )
    @torch.no_grad()
    def test_kernels_and_references_give_the_same_logits(
        self, monkeypatch: pytest.MonkeyPatch, variant: str, selective: bool
    ) -> None:
        """What runs on CUDA, merged, in Triton's interpreter; one round resumes what another wrote."""
        types, readers = ([SLIDING, FULL, SLIDING, FULL], 2) if variant == "e2b" else ([SLIDING, FULL], 0)
        hf = tiny_gemma4(variant, layer_types=types, num_hidden_layers=len(types), num_kv_shared_layers=readers)
        model = copy_weights(hf)
        model.check_kernels()
        generator = torch.Generator().manual_seed(0)
        trees = [random_tree(shape, VOCAB, generator) for shape in [(70, [3, (2, [W + 1, 1])]), (5, [1])]]
        expected = expected_logits(hf, trees)
        model.merge_projections()
        model.allocate_pools(pages=4, parents=len(trees))
        run_kernels(monkeypatch, gemma4)
        first = ForkMetadata.pack([TokenTree(trees[0].tokens[:66])], caches=[TrunkCache(pages=[2, 0])])
        model(first.tokens, first)
        trees[0] = TokenTree(trees[0].tokens[66:], trees[0].children)
        caches = [TrunkCache(66, slot=1, pages=[2, 0]), TrunkCache(pages=[1])]
        c = ForkMetadata.pack(trees, caches=caches).capacity
        capacity = StreamCapacity(c.tokens + 13, c.segments + 3, c.readouts + 2, c.pages + 1, c.depth)
        meta = ForkMetadata.pack(trees, capacity=capacity, caches=caches)
        assert_close(readout_logits(model, meta, selective_readout=selective), expected)

    @pytest.mark.parametrize("name", ["e2b", "e4b", "12b", "31b"])
    def test_published_sizes_are_served_in_bfloat16_only(self, name: str) -> None:
        config = load_config(CONFIGS / f"gemma-4-{name}.json", dtype="bfloat16")
        Gemma4ForDecision.on_meta(config).bfloat16().check_kernels()
        with pytest.raises(CheckpointError, match='head_dim 256 in float32.*use dtype="bfloat16", or device="cpu"'):
            Gemma4ForDecision.on_meta(config).float().check_kernels()

    def test_head_sizes_that_the_kernels_lack_are_refused(self) -> None:
        model = Gemma4ForDecision.on_meta(tiny_config("e2b", global_head_dim=1024))
        with pytest.raises(CheckpointError, match="Gemma4ForDecision cannot run on CUDA: .*head_dim 1024"):
            model.check_kernels()

    def test_one_graph_serves_all_capacities_through_pools(self) -> None:
        """As CUDA runs it: through the paged op, for layers that write and layers that read."""
        hf = tiny_gemma4("e2b", layer_types=[SLIDING, FULL] * 2, num_hidden_layers=4, num_kv_shared_layers=2)
        model = copy_weights(hf)
        model.merge_projections()
        model.allocate_pools(pages=16, parents=8)
        torch._dynamo.reset()
        compiled = Counting(model, dynamic=True)
        # All different: equal ones of the first round would be one size.
        rounds = {"path_around_the_window": (90, 21, 17, 9), "mixed_round": (400, 30, 25, 11)}
        for name, sizes in (rounds | {"depth_three": (120, 40, 33, 7)}).items():
            trees = trees_of(name)
            meta = ForkMetadata.pack(trees, capacity=StreamCapacity(*sizes, depth=3), caches=fresh_caches(trees))
            assert_close(logits_of(model, compiled(meta)), expected_logits(hf, trees))
        assert compiled.graphs == 1


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("variant", ["e2b", "12b"])
    def test_float32_matches_isolated_prompts(self, variant: str) -> None:
        hf = tiny_gemma4(variant)
        trees = [tree for name in TREES for tree in trees_of(name)]
        assert_close(logits_on_cuda(on_cuda(hf, torch.float32), trees), expected_logits(hf, trees))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_bfloat16_error_is_like_that_of_transformers(self, variant: str, tmp_path: Path) -> None:
        """With heads of published sizes, and scores as small as those of small heads."""
        hf = tiny_gemma4(variant, head_dim=256, global_head_dim=512, sliding_window=40)
        for name, parameter in hf.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.data.mul_(0.5)
        hf.save_pretrained(tmp_path)
        rounded = Gemma4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        trees = [tree for name in TREES for tree in trees_of(name)]
        expected = expected_logits(hf, trees)
        theirs = expected_logits(rounded, trees).float() - expected
        ours = logits_on_cuda(on_cuda(hf, torch.bfloat16), trees) - expected
        our_rms, their_rms = (x.square().mean().sqrt().item() for x in (ours, theirs))
        print(f"Gemma 4 like {variant}, bf16 RMS logit error: ours {our_rms:.4f}, transformers {their_rms:.4f}")
        assert our_rms <= BF16_ERROR_RATIO * their_rms

    @pytest.mark.parametrize("variant", ["e2b", "31b"])
    def test_a_directory_is_compiled_captured_and_served(self, variant: str, tmp_path: Path) -> None:
        size = write_tokenizer(tmp_path, closed_thought=variant == "31b")
        tiny_gemma4(variant, vocab_size=size, vocab_size_per_layer_input=size).save_pretrained(tmp_path)
        questions = {"damaged": Noul("Is it?"), "team": Choice("Which team?", {"shipping": None, "billing": None})}
        requests = [DecisionRequest(f"Box {i} was crushed. " * (1 + 9 * i), questions) for i in range(4)]
        answers = []
        for device in ("cuda", "cpu"):
            with Engine.from_pretrained(tmp_path, EngineConfig(device=device, dtype="float32")) as engine:
                decisions = engine.decide(requests)
                answers.append([list(d[name].probabilities.values()) for d in decisions for name in questions])
        for got, want in zip(*answers, strict=True):
            assert got == pytest.approx(want, abs=PROBABILITY_FP32)


def on_cuda(hf: Any, dtype: torch.dtype) -> Gemma4ForDecision:
    model = Gemma4ForDecision.from_config(hf.config, dtype=dtype, device="cuda")
    model.load_state_dict(hf.state_dict())
    model.check_kernels()
    return model.eval()


class TestCheckpoints:
    def test_the_parameters_are_those_of_transformers(self, models: Any) -> None:
        hf, model = models
        ours, theirs = model.state_dict(), hf.state_dict()
        assert {name: tensor.shape for name, tensor in ours.items()} == {k: v.shape for k, v in theirs.items()}

    def test_what_transformers_saves_is_loaded(self, models: Any, tmp_path: Path) -> None:
        hf, model = models
        hf.save_pretrained(tmp_path)
        loaded = AutoModelForDecision.from_pretrained(tmp_path)
        assert isinstance(loaded, Gemma4ForDecision)
        assert loaded.config == model.config
        assert loaded.final_logit_softcapping == 3.0
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())

    def test_transformers_loads_what_is_saved(self, models: Any, tmp_path: Path) -> None:
        hf, model = models
        model.save_pretrained(tmp_path)
        loaded = Gemma4ForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(value, hf.state_dict()[name]) for name, value in loaded.state_dict().items())
        prompt = list(range(20))
        assert torch.equal(isolated_logits(loaded, prompt), isolated_logits(hf, prompt))
        assert Gemma4ForDecision.from_pretrained(tmp_path).config == model.config

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_text_of_a_multimodal_checkpoint(self, variant: str, tmp_path: Path) -> None:
        """Towers are skipped, and so are keys and values that published files hold for layers without them."""
        hf = tiny_multimodal(variant)
        hf.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        skipped = {"e2b": "vision_tower", "e4b": "audio_tower", "12b": "vision_embedder", "31b": "vision_tower"}
        assert any(skipped[variant] in key for key in tensors)
        shared = hf.config.text_config.num_kv_shared_layers
        for i in range(len(hf.config.text_config.layer_types))[-shared:] if shared else ():
            for name in ("k_proj", "v_proj", "k_norm"):
                tensors[f"model.language_model.layers.{i}.self_attn.{name}.weight"] = torch.zeros(3)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForDecision.from_pretrained(tmp_path)
        assert isinstance(model, Gemma4ForDecision)
        generator = torch.Generator().manual_seed(1)  # of tokens that are no images
        trees = [random_tree(shape, 90, generator) for shape in TREES["path_around_the_window"]]
        meta = ForkMetadata.pack(trees)
        with torch.no_grad():
            assert_close(readout_logits(model, meta), expected_logits(hf, trees))

    @pytest.mark.parametrize("name", ["e2b", "e4b", "12b", "31b"])
    def test_true_shapes_fit_published_files(self, name: str) -> None:
        config = load_config(CONFIGS / f"gemma-4-{name}.json", dtype="bfloat16")
        files = {key: tuple(x.shape) for key, (_, x) in stored_tensors(meta_model(config), torch.bfloat16).items()}
        model = Gemma4ForDecision.on_meta(config)
        matched = model.match({key: StoredTensor(Path(), key, shape, "BF16") for key, shape in files.items()})
        text = {key for key in files if key.startswith("model.language_model.")}
        assert {tensor.key for tensor in matched.values()} == text
        first = {"e2b": 14, "e4b": 23, "12b": 47, "31b": 59}
        assert model.model.last_writer == first[name]

    def test_the_mixture_of_experts_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((CONFIGS / "gemma-4-26b-a4b.json").read_text())
        with pytest.raises(CheckpointError, match=r"enable_moe_block \(26B-A4B"):
            AutoModelForDecision.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value", "named"),
        [
            ("model.layers.1.layer_scalar", None, r"missing: model.layers.1.layer_scalar"),
            ("model.layers.3.self_attn.k_norm.weight", None, r"missing: model.layers.3.self_attn.k_norm.weight"),
            (
                "model.embed_tokens_per_layer.weight",
                torch.zeros(3, 4),
                r"wrong: model.embed_tokens_per_layer.weight is",
            ),
            (
                "model.layers.4.mlp.up_proj.weight",
                torch.zeros(96, 64),
                r"wrong: .*4.mlp.up_proj.* expected \[192, 64\]",
            ),
            ("model.layers.7.self_attn.k_proj.weight", torch.zeros(3), r"unexpected: .*layers.7.self_attn.k_proj"),
            ("model.layers.4.self_attn.v_bias", torch.zeros(3), r"unexpected: .*layers.4.self_attn.v_bias"),
            ("model.vision.weight", torch.zeros(3), r"unexpected: model.vision.weight"),
        ],
    )
    def test_tensors_that_do_not_fit_are_named(
        self, e2b: Any, tmp_path: Path, key: str, value: Any, named: str
    ) -> None:
        hf, _ = e2b
        hf.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors.pop(key, None)
        tensors |= {} if value is None else {key: value}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=named):
            Gemma4ForDecision.from_pretrained(tmp_path)

    def test_both_ways_to_write_the_sizes_of_full_attention(self) -> None:
        """By name, as published, and layer by layer, as transformers does since 5.24."""
        for variant in VARIANTS:
            named = published(variant)
            by_layer = {key: value for key, value in named.items() if "global" not in key}
            sizes = {"head_dim": named["global_head_dim"]}
            if "num_global_key_value_heads" in named:
                sizes["num_key_value_heads"] = named["num_global_key_value_heads"]
            full = [i for i, kind in enumerate(named["layer_types"]) if kind == FULL]
            by_layer["per_layer_config"] = {str(i): sizes for i in full}
            expected = Gemma4Config.from_hf(named)
            assert Gemma4Config.from_hf(by_layer) == expected
            assert Gemma4Config.from_hf(tiny_config(variant)) == expected
            assert Gemma4Config.from_hf(expected.to_hf()) == expected

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"hidden_activation": "silu"}, "hidden_activation"),
            ({"attention_bias": True}, "attention_bias"),
            ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
            ({"enable_moe_block": True}, "enable_moe_block"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
            ({"head_dim": 15}, "head_dim must be even"),
            ({"sliding_window": 0}, "sliding_window"),
            ({"layer_types": ["linear_attention"] * 7}, "layer_types"),
            ({"num_kv_shared_layers": 7}, "num_kv_shared_layers=7 leaves no layer"),
            ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 leaves no layer"),
            ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
            ({"hidden_size_per_layer_input": True}, "hidden_size_per_layer_input"),
            ({"vocab_size_per_layer_input": 96}, "vocab_size_per_layer_input"),
            ({"final_logit_softcapping": "high"}, "final_logit_softcapping"),
            ({"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config"),
            ({"per_layer_config": {i: {"window": 32} for i in (1, 3, 6)}}, "per_layer_config"),
            ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}, "6": {}}}, "per_layer_config"),
            ({"per_layer_config": 3}, "per_layer_config"),
            ({"rope_parameters": {FULL: TINY["rope_parameters"][FULL]}}, SLIDING),
            ({"rope_parameters": {**TINY["rope_parameters"], SLIDING: {"rope_type": "yarn"}}}, "rope_type"),
            ({"rope_parameters": "long"}, "rope_parameters"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_a_config_may_not_say(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(CheckpointError, match=named):
            Gemma4Config.from_hf({**published("e2b"), **changes})

    def test_defaults_are_those_of_transformers(self) -> None:
        said = ("rope_parameters", "layer_types", "global_head_dim", "hidden_size_per_layer_input")
        fields = {key: value for key, value in published("12b").items() if key not in said}
        config = Gemma4Config.from_hf({**fields, "num_hidden_layers": 7})
        assert config.layer_types == (*[SLIDING] * 5, FULL, FULL)
        assert (config.rope_theta, config.global_rope_theta, config.partial_rotary_factor) == (1e4, 1e6, 0.25)
        assert (config.global_head_dim, config.hidden_size_per_layer_input) == (512, 256)
        sliding = Gemma4Config.from_hf({**fields, "num_hidden_layers": 2, "layer_types": [SLIDING] * 2})
        assert sliding.layer_types == tuple(
            tiny_config("12b", num_hidden_layers=2, layer_types=[SLIDING] * 2).layer_types
        )
        unified = Gemma4Config.from_hf({**fields, "model_type": "gemma4_unified_text"})
        assert unified.hidden_size_per_layer_input == 0


@pytest.fixture(scope="module", params=["e2b", "31b"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as transformers and its tokenizer write it; the larger models close an empty thought."""
    path = tmp_path_factory.mktemp(request.param)
    size = write_tokenizer(path, closed_thought=request.param == "31b")
    tiny_gemma4(request.param, vocab_size=size, vocab_size_per_layer_input=size).save_pretrained(path)
    return path


def test_the_engine_serves_a_directory_by_its_name(directory: Path) -> None:
    oracle = Gemma4ForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    questions = {"damaged": Noul("Is it damaged?"), "team": Choice("Which team?", {"shipping": None, "billing": None})}
    with Engine.from_pretrained(directory, EngineConfig(device="cpu")) as engine:
        (decision,) = engine.decide([DecisionRequest("The box was crushed.", questions)])
    for name, question in questions.items():
        expected = isolated_probabilities(oracle, "The box was crushed.", question)
        assert list(decision[name].probabilities.values()) == pytest.approx(expected, abs=PROBABILITY_FP32)


def test_the_answer_is_read_where_the_template_ends(directory: Path) -> None:
    """Behind the closed, empty thought channel where the template of the model has one."""
    tokenizer = PromptTokenizer.from_pretrained(directory)
    shared, (tail,) = tokenizer.encode_chat("", ["Hello."])
    text = tokenizer.decode([*shared, *tail])
    thought = "<|channel>thought\n<channel|>" if "31b" in directory.name else ""
    assert text == f"<bos><|turn>user\nHello.<turn|>\n<|turn>model\n{thought}"
    assert [label.text for label in tokenizer.labels(3)] == ["A", "B", "C"]
