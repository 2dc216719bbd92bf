"""The example family: every branch gets what its isolated prompt gets in transformers, and all else works with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, OlmoHybridForCausalLM
from transformers import OlmoHybridConfig as OlmoHybridTransformersConfig

from examples.custom_architecture import olmo_hybrid
from examples.custom_architecture.olmo_hybrid import OlmoHybridConfig, OlmoHybridForDecision
from flide import AutoModelForDecision, CheckpointError, Choice, DecisionRequest, Engine, EngineConfig, Noul
from flide.runtime import ForkMetadata, StreamCapacity
from flide.runtime.metadata import fresh_caches
from flide.runtime.rounds import RoundRunner
from flide.runtime.tree import prompts_of
from flide.train import TrainConfig, train
from flide.train.trainee import checkpoint_layers
from tests.examples.olmo import TINY, tiny_olmo
from tests.models.test_compile import CAPACITY, OTHER_CAPACITY, Counting, needs_compiler, pack
from tests.models.test_cuda import logits_of as logits_on_cuda
from tests.models.test_interpreter import needs_interpreter, run_kernels
from tests.models.test_qwen3_5 import TREES, VOCAB, readout_logits
from tests.oracle import isolated_logits, random_tree
from tests.runtime.test_engine import isolated_probabilities
from tests.tiny_tokenizer import write_tokenizer
from tests.tolerance import BF16_ERROR_RATIO, GRADIENT_FP32, LOGITS_FP32, PROBABILITY_FP32
from tests.train.data import TEAMS, rows, write

ROTATED = {"rope_theta": 10000.0, "rope_type": "default"}
SMALL = {"linear_key_head_dim": 12, "linear_value_head_dim": 24}
KINDS: dict[str, dict[str, Any]] = {
    "as_released": {},  # keys of 96, values of 192, doubled beta, no positions
    "single_beta_grouped_values": {**SMALL, "linear_allow_neg_eigval": False, "linear_num_value_heads": 4},
    "rotated_grouped_queries_tied": {
        **SMALL,
        "rope_parameters": ROTATED,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


def copy_weights(hf: Any) -> OlmoHybridForDecision:
    model = OlmoHybridForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    return model.eval()


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def models(request: pytest.FixtureRequest) -> tuple[Any, OlmoHybridForDecision]:
    hf = tiny_olmo(**request.param)
    return hf, copy_weights(hf)


@pytest.fixture(scope="module")
def small() -> tuple[Any, OlmoHybridForDecision]:
    hf = tiny_olmo(**SMALL)
    return hf, copy_weights(hf)


def expected_logits(hf: Any, trees: list[Any]) -> torch.Tensor:
    return torch.stack([isolated_logits(hf, prompt) for tree in trees for prompt in prompts_of(tree)])


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert 0.3 < expected.std() < 3
    assert (logits[: len(expected)] - expected).abs().max() <= LOGITS_FP32 * expected.std()


@pytest.mark.parametrize("name", TREES)
def test_branch_matches_isolated_prompt(models: Any, name: str) -> None:
    hf, model = models
    generator = torch.Generator().manual_seed(1)
    trees = [random_tree(shape, VOCAB, generator) for shape in TREES[name]]
    c = ForkMetadata.pack(trees).capacity
    capacity = StreamCapacity(c.tokens + 37, c.segments + 9, c.readouts + 5, depth=c.depth)
    assert_close(readout_logits(model, ForkMetadata.pack(trees, capacity=capacity)), expected_logits(hf, trees))


def test_merged_projections_and_the_ablation_move_no_answer(small: Any) -> None:
    hf, _ = small
    model = copy_weights(hf)
    model.merge_projections()
    assert model.model.layers[0].linear_attn.merged is not None
    trees, meta = pack("deep", None)
    expected = expected_logits(hf, trees)
    assert_close(readout_logits(model, meta), expected)
    with torch.no_grad():
        assert_close(model(meta.tokens, meta, selective_readout=False) @ model.lm_head.weight.T, expected)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in hf.state_dict().items())


def test_a_delta_layer_may_be_the_last(small: Any) -> None:
    types = ["full_attention", "linear_attention"]
    hf = tiny_olmo(**SMALL, num_hidden_layers=2, layer_types=types)
    model = copy_weights(hf)
    trees, meta = pack("three", None)
    for merge in (False, True):
        if merge:
            model.merge_projections()
        assert_close(readout_logits(model, meta), expected_logits(hf, trees))


def test_one_graph_serves_all_capacities(small: Any) -> None:
    hf, model = small
    torch._dynamo.reset()
    compiled = Counting(model, dynamic=True)
    for name, capacity in (("three", CAPACITY), ("many", OTHER_CAPACITY), ("deep", CAPACITY)):
        trees, meta = pack(name, capacity)
        assert_close(compiled(meta) @ model.lm_head.weight.T, expected_logits(hf, trees))
    assert compiled.graphs == 1


@needs_compiler
@pytest.mark.slow
def test_inductor_matches_isolated_prompts(small: Any) -> None:
    hf, model = small
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    trees, meta = pack("three", CAPACITY)
    with torch.no_grad():
        assert_close(compiled(meta.tokens, meta) @ model.lm_head.weight.T, expected_logits(hf, trees))


class TestCheckpoints:
    def test_the_parameters_are_those_of_transformers(self, models: Any) -> None:
        hf, model = models
        ours, theirs = model.state_dict(), hf.state_dict()
        assert {name: tensor.shape for name, tensor in ours.items()} == {k: v.shape for k, v in theirs.items()}

    def test_what_transformers_saves_is_loaded(self, models: Any, tmp_path: Path) -> None:
        """It stores convolutions in three parts of one size, whatever the sizes of q, k and v."""
        hf, model = models
        hf.save_pretrained(tmp_path)
        assert any("q_conv1d" in name for name in load_file(tmp_path / "model.safetensors"))
        loaded = AutoModelForDecision.from_pretrained(tmp_path)
        assert isinstance(loaded, OlmoHybridForDecision)
        assert loaded.config == model.config
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())

    def test_a_published_file_is_loaded(self, small: Any, tmp_path: Path) -> None:
        """Parts of the convolution's own sizes, in any of several files."""
        hf, model = small
        hf.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        mixer = model.model.layers[0].linear_attn
        sizes = [mixer.key_size, mixer.key_size, mixer.value_size]
        for i, layer in enumerate(model.model.layers):
            if not layer.is_full:
                parts = layer.linear_attn.conv1d.weight.detach().split(sizes)
                for letter, part in zip("qkv", parts, strict=True):
                    tensors[f"model.layers.{i}.linear_attn.{letter}_conv1d.weight"] = part.contiguous()
        (tmp_path / "model.safetensors").unlink()
        weight_map = {}
        for number in range(3):
            file = f"model-{number + 1:05d}-of-00003.safetensors"
            chosen = {key: tensors[key] for key in sorted(tensors)[number::3]}
            save_file(chosen, tmp_path / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(chosen, file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        loaded = OlmoHybridForDecision.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())

    def test_transformers_loads_what_is_saved(self, models: Any, tmp_path: Path) -> None:
        hf, model = models
        model.save_pretrained(tmp_path)
        loaded = OlmoHybridForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(value, hf.state_dict()[name]) for name, value in loaded.state_dict().items())
        prompt = list(range(20))
        assert torch.equal(isolated_logits(loaded, prompt), isolated_logits(hf, prompt))

    @pytest.mark.parametrize(
        ("lost", "named"),
        [({"k_conv1d"}, "unexpected: .*q_conv1d"), ({"q_conv1d", "k_conv1d", "v_conv1d"}, "missing: .*conv1d")],
        ids=["one_part", "all_parts"],
    )
    def test_parts_that_are_missing_are_named(self, small: Any, tmp_path: Path, lost: set[str], named: str) -> None:
        hf, _ = small
        hf.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        kept = {key: value for key, value in tensors.items() if not any(name in key for name in lost)}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=named):
            OlmoHybridForDecision.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"attention_bias": True}, "attention_bias"),
            ({"num_attention_heads": 3}, "hidden_size"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
            ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
            ({"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval"),
            ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
            ({"layer_types": None}, "layer_types"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
            ({"rope_parameters": {"rope_theta": "long"}}, "rope_theta"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_a_config_may_not_say(self, small: Any, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(CheckpointError, match=named):
            OlmoHybridConfig.from_hf({**small[0].config.to_dict(), **changes})

    def test_positions_are_there_unless_the_config_has_none(self, small: Any) -> None:
        """A missing theta is transformers' default; null is none."""
        fields = small[0].config.to_dict()
        for rope, theta in (({}, 10000.0), (None, 10000.0), ({"rope_theta": None}, None), (ROTATED, 10000.0)):
            assert OlmoHybridConfig.from_hf({**fields, "rope_parameters": rope}).rope_theta == theta


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as transformers and its tokenizer write it."""
    path = tmp_path_factory.mktemp("olmo")
    tiny_olmo(**SMALL, vocab_size=1280).save_pretrained(path)
    write_tokenizer(path, vocab_size=1280)
    return path


def test_the_engine_serves_a_directory_by_its_name(directory: Path) -> None:
    oracle = OlmoHybridForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    questions = {"damaged": Noul("Is it damaged?"), "team": Choice("Which team?", {"shipping": None, "billing": None})}
    with Engine.from_pretrained(directory, EngineConfig(device="cpu")) as engine:
        (decision,) = engine.decide([DecisionRequest("The box was crushed.", questions)])
    for name, question in questions.items():
        expected = isolated_probabilities(oracle, "The box was crushed.", question)
        assert list(decision[name].probabilities.values()) == pytest.approx(expected, abs=PROBABILITY_FP32)


def test_gradients_are_those_of_isolated_prompts(small: Any) -> None:
    """Of every parameter: trunks collect them from all their branches, layers are recomputed."""
    hf = tiny_olmo(**SMALL)
    model = copy_weights(hf)
    checkpoint_layers(model)
    trees, meta = pack("three", None)
    prompts = [prompt for tree in trees for prompt in prompts_of(tree)]
    targets = torch.arange(len(prompts))
    nn.functional.cross_entropy(model(meta.tokens, meta) @ model.lm_head.weight.T, targets).backward()
    logits = torch.stack([hf(torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in prompts])
    nn.functional.cross_entropy(logits, targets).backward()
    expected = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name, parameter in model.named_parameters():
        largest = expected[name].abs().max().clamp(min=1)
        assert (parameter.grad - expected[name]).abs().max() <= GRADIENT_FP32 * largest, name


def test_fine_tuning_adapts_it_like_any_other(directory: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows(4))
    train(directory, data, tmp_path / "tuned", TrainConfig(lr=1e-2, device="cpu", epochs=2))
    adapter = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.linear_attn.g_proj.lora_B.weight" in adapter
    assert all(value.any() for value in adapter.values())
    request = DecisionRequest("parcel broken please", {"team": Choice("Which team?", list(TEAMS))})
    answers = []
    for path in (directory, tmp_path / "tuned"):
        with Engine.from_pretrained(path, EngineConfig(device="cpu")) as engine:
            answers.append(list(engine.decide([request])[0]["team"].probabilities.values()))
    assert answers[0] != pytest.approx(answers[1], abs=1e-3)


class TestKernels:
    @needs_interpreter
    @torch.no_grad()
    def test_kernels_and_references_give_the_same_logits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At a head's true sizes of 96 x 192, merged as on CUDA, in Triton's interpreter."""
        model = copy_weights(tiny_olmo(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]))
        model.check_kernels()
        trees = [random_tree(shape, VOCAB, torch.Generator().manual_seed(0)) for shape in [(70, [3, 66]), (5, [1])]]
        plain = ForkMetadata.pack(trees)
        expected = readout_logits(model, plain)
        caches = fresh_caches(trees)
        needed = ForkMetadata.pack(trees, caches=caches).capacity
        capacity = StreamCapacity(needed.tokens + 13, needed.segments + 3, needed.readouts + 2, needed.pages + 1)
        model.merge_projections()
        model.allocate_pools(pages=capacity.pages, parents=len(trees))
        run_kernels(monkeypatch, olmo_hybrid)
        meta = ForkMetadata.pack(trees, capacity=capacity, caches=caches)
        assert_close(readout_logits(model, meta), expected)

    @pytest.mark.parametrize(
        ("sizes", "named"),
        [
            ({}, None),  # 96 x 192
            (SMALL, r"heads of 12 x 24; supported: keys of 16, 32, .*, 128 and values of 16, .*, 256"),
            ({"linear_key_head_dim": 144}, r"heads of 144 x 192; supported: keys"),
            ({"hidden_size": 96}, r"head_dim 24; supported: \(16, 32, 64, 128, 256, 512\)"),
            ({"hidden_size": 512}, 'head_dim 128 in float32, only up to 64: use dtype="bfloat16", or device="cpu"'),
        ],
        ids=["as_released", "small", "wide_keys", "attention", "float32"],
    )
    def test_sizes_that_they_lack_are_refused_at_load(self, sizes: dict[str, Any], named: str | None) -> None:
        model = OlmoHybridForDecision.on_meta(OlmoHybridTransformersConfig(**{**TINY, **sizes}))
        if named is None:
            model.check_kernels()
            return

        class OnCuda(SimpleNamespace):
            head, final_logit_softcapping, check_kernels = None, None, model.check_kernels
            lm_head = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))

            def label_rows(self, ids: list[int]) -> torch.Tensor:
                return torch.zeros(len(ids), 8)

        with pytest.raises(CheckpointError, match=f"OlmoHybridForDecision cannot run on CUDA: .*{named}"):
            RoundRunner(OnCuda(), [1], config=EngineConfig(), max_prompt_tokens=9, model_name="m")


@pytest.mark.gpu
class TestCuda:
    """In bfloat16 at the released head sizes, 96 x 192; in float32, whose kernels have room for less, at 32 x 48."""

    FLOAT32 = {"linear_key_head_dim": 32, "linear_value_head_dim": 48}

    @pytest.mark.parametrize("name", TREES)
    def test_float32_matches_isolated_prompts(self, name: str) -> None:
        hf = tiny_olmo(**self.FLOAT32)
        model = OlmoHybridForDecision.from_config(hf.config, dtype=torch.float32, device="cuda")
        model.load_state_dict(hf.state_dict())
        trees = [random_tree(shape, VOCAB, torch.Generator().manual_seed(1)) for shape in TREES[name]]
        assert_close(logits_on_cuda(model.eval(), trees), expected_logits(hf, trees))

    def test_bfloat16_error_is_like_that_of_transformers(self) -> None:
        hf, rounded = tiny_olmo(), tiny_olmo().to(torch.bfloat16)
        model = OlmoHybridForDecision.from_config(hf.config, dtype=torch.bfloat16, device="cuda")
        model.load_state_dict(hf.state_dict())
        generator = torch.Generator().manual_seed(2)
        trees = [random_tree(shape, VOCAB, generator) for shapes in TREES.values() for shape in shapes]
        expected = expected_logits(hf, trees)
        ours = logits_on_cuda(model.eval(), trees) - expected
        theirs = expected_logits(rounded, trees).float() - expected
        our_rms, their_rms = (x.square().mean().sqrt().item() for x in (ours, theirs))
        print(f"OLMo Hybrid, bf16 RMS logit error: ours {our_rms:.4f}, transformers {their_rms:.4f}")
        assert our_rms <= BF16_ERROR_RATIO * their_rms

    @pytest.mark.parametrize(
        ("sizes", "dtype", "tolerance"),
        [(FLOAT32, "float32", PROBABILITY_FP32), ({}, "bfloat16", 0.05)],
        ids=["float32", "as_released"],
    )
    def test_a_directory_is_compiled_captured_and_served(
        self, sizes: dict[str, int], dtype: str, tolerance: float, tmp_path: Path
    ) -> None:
        tiny_olmo(**sizes, vocab_size=1280).save_pretrained(tmp_path)
        write_tokenizer(tmp_path, vocab_size=1280)
        questions = {"damaged": Noul("Is it?"), "team": Choice("Which team?", {"shipping": None, "billing": None})}
        requests = [DecisionRequest(f"Box {i} was crushed. " * (1 + 9 * i), questions) for i in range(4)]
        answers = []
        for device, its in (("cpu", "float32"), ("cuda", dtype)):
            with Engine.from_pretrained(tmp_path, EngineConfig(device=device, dtype=its)) as engine:
                answers.append([list(d[q].probabilities.values()) for d in engine.decide(requests) for q in questions])
        for on_cpu, on_cuda in zip(*answers, strict=True):
            assert on_cuda == pytest.approx(on_cpu, abs=tolerance)


def test_it_is_short_and_edits_nothing() -> None:
    assert len(Path(olmo_hybrid.__file__).read_text(encoding="utf-8").splitlines()) < 150
