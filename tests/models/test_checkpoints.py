"""Checkpoints travel between transformers and Flide in both directions with the same names, values and logits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from flide.errors import CheckpointError
from flide.layers import RMSNorm
from flide.models import AutoModelForDecision, ForDecision, Qwen35Config, Qwen35ForDecision, auto, decision, register
from flide.models.config import ConfigReader
from flide.models.decision import config_fields
from flide.models.weights import INDEX_NAME, SINGLE_NAME, StoredTensor, list_tensors
from flide.runtime import ForkMetadata, TokenTree
from scripts import make_checkpoint
from tests.oracle import TINY, isolated_logits, random_tokens, save_transformers, tiny_config, tiny_transformers_model
from tests.tolerance import LOGITS_FP32

CONFIGS = Path(__file__).parents[2] / "scripts" / "configs"
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": TINY["hidden_size"],
    "num_position_embeddings": 16,
}
FLOAT32_NAMES = re.compile(r"linear_attn\.(A_log|norm\.weight)$")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [random_tokens(length, TINY["vocab_size"], generator) for length in (1, 9, 70)]


def text_model(*, tied: bool) -> Any:
    return tiny_transformers_model(tie_word_embeddings=tied)


def multimodal_model(*, tied: bool) -> Any:
    """A tiny image-text model whose text part is the tiny text model."""
    text = text_model(tied=tied)
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=dict(VISION), tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


MODELS = {"text": text_model, "multimodal": multimodal_model}
SHARDING = pytest.mark.parametrize("max_shard_size", ["5GB", "200KB"], ids=["single", "sharded"])
TYING = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def mtp_tensors(hidden: int, text: Qwen35Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the multi-token prediction layer that published files hold and transformers' classes leave out."""
    heads, kv_heads, head_dim = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    layer = {
        "self_attn.q_proj.weight": (2 * heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (text.intermediate_size, hidden),
        "mlp.up_proj.weight": (text.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, text.intermediate_size),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
    }


def add_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a checkpoint, in a shard of their own where there are shards."""
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        save_file(load_file(directory / SINGLE_NAME) | tensors, directory / SINGLE_NAME)
        return
    save_file(tensors, directory / "extra.safetensors")
    index = json.loads(index_path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "extra.safetensors")
    index_path.write_text(json.dumps(index))


def logits_of(model: Any, prompts: list[list[int]]) -> Tensor:
    """``[prompts, vocab]`` logits after each prompt, each one a request of its own."""
    meta = ForkMetadata.pack([TokenTree(prompt) for prompt in prompts])
    with torch.no_grad():
        return (model(meta.tokens, meta) @ model.lm_head.weight.T).float()


def assert_same_logits(model: Any, hf: Any, prompts: list[list[int]]) -> None:
    expected = torch.stack([isolated_logits(hf, prompt) for prompt in prompts])
    scale = expected.std().item()
    assert 0.3 < scale < 3
    assert (logits_of(model, prompts) - expected).abs().max().item() <= LOGITS_FP32 * scale


class TestFromTransformers:
    @SHARDING
    @TYING
    @pytest.mark.parametrize("kind", MODELS)
    def test_saved_models_load_with_the_same_logits(
        self, kind: str, tied: bool, max_shard_size: str, tmp_path: Path, prompts: list[list[int]]
    ) -> None:
        hf = MODELS[kind](tied=tied)
        save_transformers(hf, tmp_path, max_shard_size=max_shard_size)
        mtp = mtp_tensors(TINY["hidden_size"], Qwen35Config.from_hf(hf.config))
        add_tensors(tmp_path, {name: torch.zeros(shape) for name, shape in mtp.items()})
        stored = list_tensors(tmp_path)
        assert (tmp_path / INDEX_NAME).exists() == (max_shard_size != "5GB")
        assert ("lm_head.weight" in stored) != tied
        assert any(key.startswith("model.visual.") for key in stored) == (kind == "multimodal")
        assert any(key.startswith("model.language_model.") for key in stored) == (kind == "multimodal")

        model = AutoModelForDecision.from_pretrained(tmp_path)
        assert isinstance(model, Qwen35ForDecision)
        assert not model.training
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_same_logits(model, hf, prompts)

    def test_bfloat16_files_load_as_their_float32_values(self, tmp_path: Path, prompts: list[list[int]]) -> None:
        save_transformers(tiny_transformers_model(dtype=torch.bfloat16), tmp_path)
        model = AutoModelForDecision.from_pretrained(tmp_path, dtype=torch.float32)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        # Loaded anew: casting a transformers model rounds its rotary frequencies, too.
        assert_same_logits(model, Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval(), prompts)

    def test_the_default_dtype_on_the_cpu_is_float32(self, tmp_path: Path) -> None:
        save_transformers(tiny_transformers_model(dtype=torch.bfloat16), tmp_path)
        model = AutoModelForDecision.from_pretrained(tmp_path)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_names_equal_those_of_the_text_model(self) -> None:
        hf = tiny_transformers_model()
        model = Qwen35ForDecision.on_meta(hf.config)
        assert set(model.state_dict()) == set(hf.state_dict())
        assert {n for n, _ in model.named_parameters()} == {n for n, _ in hf.named_parameters()}
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert linear == {name for name, module in hf.named_modules() if isinstance(module, nn.Linear)}

    @pytest.mark.parametrize("text", [True, False, None], ids=["text_tied", "text_untied", "text_silent"])
    @pytest.mark.parametrize("top", [True, False], ids=["top_tied", "top_untied"])
    def test_the_top_level_decides_about_the_tie(self, top: bool, text: bool | None) -> None:
        text_config = {**TINY, "rms_norm_eps": 1e-6}
        del text_config["tie_word_embeddings"]
        if text is not None:
            text_config["tie_word_embeddings"] = text
        config = {"text_config": text_config, "vision_config": VISION, "tie_word_embeddings": top}
        with torch.device("meta"):
            hf = Qwen3_5ForConditionalGeneration(Qwen3_5Config.from_dict(json.loads(json.dumps(config))))
        assert (hf.lm_head.weight is hf.model.language_model.embed_tokens.weight) == top
        assert Qwen35Config.from_hf(config).tie_word_embeddings == top
        assert Qwen35Config.from_hf(hf.config).tie_word_embeddings == top

    @pytest.mark.parametrize("tied", [True, False, None], ids=["tied", "untied", "silent"])
    def test_without_a_top_level_tie_the_text_part_decides(self, tied: bool | None) -> None:
        text = {**TINY, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
        if tied is None:
            del text["tie_word_embeddings"]
        assert Qwen35Config.from_hf({"text_config": text}).tie_word_embeddings == bool(tied)
        assert Qwen35Config.from_hf(text).tie_word_embeddings == bool(tied)

    @pytest.mark.parametrize(
        "changes",
        [
            {"layer_types": None},
            {"layer_types": None, "full_attention_interval": 2},
            {"layer_types": None, "full_attention_interval": 3, "num_hidden_layers": 7},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "partial_rotary_factor": 0.5},
        ],
        ids=["layers_by_default", "interval_2", "interval_3", "rotary_by_default", "rotary_at_text_level"],
    )
    def test_defaults_are_those_of_transformers(self, changes: dict[str, Any]) -> None:
        raw = {**TINY, "rms_norm_eps": 1e-6, **changes}
        theirs = Qwen35Config.from_hf(tiny_config(**json.loads(json.dumps(changes))))
        assert Qwen35Config.from_hf(raw) == theirs


class TestToTransformers:
    @SHARDING
    @TYING
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_saved_models_load_in_transformers_with_the_same_logits(
        self, dtype: torch.dtype, tied: bool, max_shard_size: str, tmp_path: Path, prompts: list[list[int]]
    ) -> None:
        source = text_model(tied=tied)
        model = Qwen35ForDecision.from_config(source.config, dtype=dtype)
        model.load_state_dict(source.state_dict())
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        assert (tmp_path / INDEX_NAME).exists() == (max_shard_size != "5GB")

        hf, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, output_loading_info=True
        )
        assert isinstance(hf, Qwen3_5ForCausalLM)
        assert {name: list(found) for name, found in info.items() if found} == {}
        assert (hf.lm_head.weight is hf.model.embed_tokens.weight) == tied
        assert hf.config.dtype in (torch.float32, "float32")
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert_same_logits(Qwen35ForDecision.from_pretrained(tmp_path, dtype=torch.float32), hf.eval(), prompts)
        for name, tensor in model.state_dict().items():
            assert torch.equal(hf.state_dict()[name], tensor.float()), name

    def test_no_shard_is_larger_than_asked(self, tmp_path: Path) -> None:
        model = Qwen35ForDecision.from_config(tiny_config())
        model.save_pretrained(tmp_path, max_shard_size=200_000)
        shards = [load_file(file) for file in sorted(tmp_path.glob("model-0000?-of-0000?.safetensors"))]
        sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
        assert len(sizes) > 3
        assert max(sizes) <= 200_000
        total = json.loads((tmp_path / INDEX_NAME).read_text())["metadata"]["total_size"]
        assert total == sum(sizes) == sum(parameter.nbytes for parameter in model.parameters())

    def test_an_earlier_save_leaves_nothing_behind(self, tmp_path: Path, prompts: list[list[int]]) -> None:
        first, second = (tiny_transformers_model(seed=seed) for seed in (1, 2))
        for hf, size in ((first, "200KB"), (second, "5GB"), (first, "100KB"), (second, "200KB")):
            model = Qwen35ForDecision.from_config(hf.config)
            model.load_state_dict(hf.state_dict())
            model.save_pretrained(tmp_path, max_shard_size=size)
            (tmp_path / "tokenizer.json").touch()
            assert_same_logits(AutoModelForDecision.from_pretrained(tmp_path), hf, prompts)
            files = {file.name for file in tmp_path.glob("*.safetensors")}
            assert files == {stored.file.name for stored in list_tensors(tmp_path).values()}
        assert (tmp_path / "tokenizer.json").exists()

    def test_a_model_can_be_saved_over_the_files_it_came_from(self, tmp_path: Path) -> None:
        Qwen35ForDecision.from_config(tiny_config()).save_pretrained(tmp_path)
        model = AutoModelForDecision.from_pretrained(tmp_path)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path)
        again = AutoModelForDecision.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())

    @TYING
    def test_configs_survive_the_round_trip(self, tied: bool) -> None:
        config = Qwen35Config.from_hf(tiny_config(tie_word_embeddings=tied, num_hidden_layers=6))
        as_json = json.loads(json.dumps(config.to_hf()))
        assert Qwen35Config.from_hf(as_json) == config
        assert Qwen35Config.from_hf(transformers.Qwen3_5TextConfig(**as_json)) == config


class TestFloat32Parameters:
    @pytest.fixture
    def published(self, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
        """A bfloat16 checkpoint whose decay rates and output norms are float32, as Qwen3.5 was published."""
        torch.manual_seed(5)
        model = Qwen35ForDecision.from_config(tiny_config(), dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if FLOAT32_NAMES.search(name):
                parameter.data.copy_(torch.rand_like(parameter) + 1 / 3)
        model.save_pretrained(tmp_path)
        return tmp_path, load_file(tmp_path / SINGLE_NAME)

    @staticmethod
    def assert_kept(model: nn.Module, stored: dict[str, Tensor], dtype: torch.dtype) -> None:
        kept = {name for name in stored if FLOAT32_NAMES.search(name)}
        assert len(kept) == 6
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if name in kept else dtype), name
            assert torch.equal(parameter, stored[name].to(parameter.dtype)), name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
    def test_float32_files_keep_every_bit(self, dtype: torch.dtype, published: tuple[Path, dict[str, Tensor]]) -> None:
        directory, stored = published
        exact = [tensor for name, tensor in stored.items() if FLOAT32_NAMES.search(name)]
        assert all(tensor.dtype == torch.float32 for tensor in exact)
        assert any((tensor != tensor.bfloat16().float()).any() for tensor in exact)
        self.assert_kept(AutoModelForDecision.from_pretrained(directory, dtype=dtype), stored, dtype)

    def test_bfloat16_files_are_widened(self, published: tuple[Path, dict[str, Tensor]]) -> None:
        directory, stored = published
        narrow = {name: tensor.bfloat16() for name, tensor in stored.items()}
        save_file(narrow, directory / SINGLE_NAME)
        model = AutoModelForDecision.from_pretrained(directory, dtype=torch.bfloat16)
        self.assert_kept(model, narrow, torch.bfloat16)

    @pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16()], ids=["to", "bfloat16"])
    def test_casting_the_model_leaves_them(self, cast: Any, published: tuple[Path, dict[str, Tensor]]) -> None:
        directory, stored = published
        self.assert_kept(cast(AutoModelForDecision.from_pretrained(directory)), stored, torch.bfloat16)

    def test_saving_keeps_every_bit(self, published: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
        directory, stored = published
        AutoModelForDecision.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(tmp_path / "again")
        again = load_file(tmp_path / "again" / SINGLE_NAME)
        assert list(again) == list(stored)
        for name, tensor in stored.items():
            assert again[name].dtype == tensor.dtype
            assert torch.equal(again[name], tensor)


# Published: parameters of the language model (as far as seen), of the whole file.
TRUE_SHAPES = {
    "qwen3.5-0.8b": (None, 873_438_784),
    "qwen3.5-2b": (1_881_825_088, 2_274_069_824),
    "qwen3.5-4b": (4_205_751_296, 4_659_865_088),
    "qwen3.5-9b": (None, 9_653_104_368),
    "qwen3.5-27b": (None, 27_781_427_952),
    "qwen3.8-27b": (None, 27_781_427_952),
}


class TestTrueShapes:
    def test_every_config_is_tested(self) -> None:
        assert {path.stem for path in CONFIGS.glob("qwen*.json")} == set(TRUE_SHAPES)

    @pytest.mark.parametrize("name", TRUE_SHAPES)
    def test_every_published_tensor_has_its_place(self, name: str) -> None:
        raw = json.loads((CONFIGS / f"{name}.json").read_text())
        hf_class = getattr(transformers, raw["architectures"][0])
        with torch.device("meta"):
            hf = hf_class(hf_class.config_class.from_dict(json.loads(json.dumps(raw))))
        shapes = {key: tuple(parameter.shape) for key, parameter in hf.named_parameters()}  # ties once
        assert [key for key, _ in hf.named_buffers() if key in hf.state_dict()] == []
        model = Qwen35ForDecision.on_meta(raw)
        shapes |= mtp_tensors(raw["text_config"]["hidden_size"], model.config)
        language, total = TRUE_SHAPES[name]
        assert sum(torch.Size(shape).numel() for shape in shapes.values()) == total

        stored = {key: StoredTensor(Path("x"), key, shape, "BF16") for key, shape in shapes.items()}
        matched = model.match(stored)
        assert set(matched) == set(model.checkpoint_tensors())
        left_out = set(stored) - {tensor.key for tensor in matched.values()}
        assert all(key.startswith(("mtp.", "model.visual.")) for key in left_out)
        assert all(parameter.is_meta for parameter in model.parameters())
        if language is not None:
            assert sum(parameter.numel() for parameter in model.parameters()) == language

    @pytest.mark.parametrize("name", TRUE_SHAPES)
    def test_our_config_is_transformers_config(self, name: str) -> None:
        raw = json.loads((CONFIGS / f"{name}.json").read_text())
        config = Qwen35Config.from_hf(raw)
        assert Qwen35Config.from_hf(Qwen3_5Config.from_dict(json.loads(json.dumps(raw)))) == config
        assert config.layer_types[-1] == "full_attention"
        assert config.tie_word_embeddings == (name in ("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b"))


class TestLoading:
    @pytest.fixture
    def scratch(self, tmp_path: Path) -> Iterator[Path]:
        """A directory for large files: pytest would keep those of three sessions."""
        yield tmp_path
        shutil.rmtree(tmp_path)

    def test_parameters_are_filled_in_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Qwen35ForDecision.from_config(tiny_config()).save_pretrained(tmp_path, max_shard_size="200KB")
        before: dict[str, tuple[int, int]] = {}
        stream = decision.stream_weights

        def recorded(targets: dict[str, Tensor], sources: dict[str, StoredTensor], **options: Any) -> None:
            before.update({name: (id(tensor), tensor.data_ptr()) for name, tensor in targets.items()})
            stream(targets, sources, **options)

        monkeypatch.setattr(decision, "stream_weights", recorded)
        model = AutoModelForDecision.from_pretrained(tmp_path)
        after = model.state_dict(keep_vars=True)
        assert before == {name: (id(tensor), tensor.data_ptr()) for name, tensor in after.items()}

    def test_two_models_of_one_checkpoint_share_no_memory(self, tmp_path: Path) -> None:
        Qwen35ForDecision.from_config(tiny_config()).save_pretrained(tmp_path)
        first, second = (AutoModelForDecision.from_pretrained(tmp_path) for _ in range(2))
        content = (tmp_path / SINGLE_NAME).read_bytes()
        for parameter in first.parameters():
            parameter.data.zero_()
        assert all(parameter.any() for name, parameter in second.named_parameters() if "proj" in name)
        assert (tmp_path / SINGLE_NAME).read_bytes() == content

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
    @pytest.mark.parametrize("max_shard_size", ["5GB", "100MB"], ids=["single", "sharded"])
    def test_loading_holds_no_second_copy_of_the_model(self, max_shard_size: str, scratch: Path) -> None:
        sizes = {"vocab_size": 20_000, "hidden_size": 768, "intermediate_size": 2048}
        model = Qwen35ForDecision.from_config(tiny_config(**sizes, num_hidden_layers=6))
        size = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(scratch, max_shard_size=max_shard_size)
        Qwen35ForDecision.from_config(tiny_config()).save_pretrained(scratch / "tiny")
        # VmHWM, not ru_maxrss: the latter starts at the parent's size.
        code = """
import sys
from flide.models import AutoModelForDecision

def peak() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

AutoModelForDecision.from_pretrained(sys.argv[2])
before = peak()
model = AutoModelForDecision.from_pretrained(sys.argv[1])
print(peak() - before)
"""
        done = subprocess.run(
            [sys.executable, "-c", code, scratch, scratch / "tiny"], capture_output=True, text=True, check=True
        )
        peak = int(done.stdout)
        assert 180e6 < size < 260e6
        assert size * 0.9 < peak < size * 1.65


class TestFromConfig:
    @TYING
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_every_parameter_is_initialised(
        self, dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
    ) -> None:
        empty = torch.empty

        def poisoned(*arguments: Any, **options: Any) -> Tensor:
            tensor = empty(*arguments, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

        monkeypatch.setattr(torch, "empty", poisoned)
        model = Qwen35ForDecision.from_config(tiny_config(tie_word_embeddings=tied), dtype=dtype)
        monkeypatch.undo()
        for name, tensor in model.state_dict().items():
            assert tensor.isfinite().all(), name
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        logits = logits_of(model, prompts)
        assert logits.isfinite().all()
        assert logits.std() > 0

    def test_config_objects_dicts_and_our_own_give_the_same_model(self) -> None:
        hf = tiny_config()
        models = []
        for config in (hf, hf.to_dict(), Qwen35Config.from_hf(hf), Qwen3_5Config(text_config=hf.to_dict())):
            torch.manual_seed(0)
            models.append(Qwen35ForDecision.from_config(config).state_dict())
        for other in models[1:]:
            assert list(other) == list(models[0])
            assert all(torch.equal(other[name], tensor) for name, tensor in models[0].items())

    def test_a_random_model_round_trips(self, tmp_path: Path, prompts: list[list[int]]) -> None:
        model = Qwen35ForDecision.from_config(tiny_config(tie_word_embeddings=True))
        model.save_pretrained(tmp_path)
        loaded = Qwen35ForDecision.from_pretrained(str(tmp_path))
        assert loaded.config == model.config
        assert torch.equal(logits_of(loaded, prompts), logits_of(model, prompts))


@dataclass(frozen=True, kw_only=True)
class BagConfig:
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int = 64
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        read = ConfigReader(config_fields(config), "Bag config")
        return cls(vocab_size=read.size("vocab_size"), hidden_size=read.size("hidden_size"))

    def to_hf(self) -> dict[str, Any]:
        return {"architectures": ["BagForDecision"], "model_type": "bag", **asdict(self)}


class BagForDecision(ForDecision):
    """The smallest family: an embedding, a norm and a head."""

    config_class = BagConfig
    renames = ((r"^old\.", ""),)
    ignored = (r"extra\.",)

    def __init__(self, config: BagConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, 1e-6)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_T: Tensor, meta: ForkMetadata) -> Tensor:
        return self.norm(self.embed_tokens(tokens_T.index_select(0, meta.readout_rows)))


class TestRegistry:
    @pytest.fixture(autouse=True)
    def own_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auto, "_FAMILIES", dict(auto._FAMILIES))

    def test_an_outside_family_loads_and_saves(self, tmp_path: Path) -> None:
        assert register("BagForDecision", "bag")(BagForDecision) is BagForDecision
        model = BagForDecision.from_config({"vocab_size": 11, "hidden_size": 8})
        model.save_pretrained(tmp_path)
        assert set(list_tensors(tmp_path)) == {"embed_tokens.weight", "norm.weight"}
        stored = load_file(tmp_path / SINGLE_NAME)
        renamed = {f"old.{name}": tensor for name, tensor in stored.items()} | {"extra.thing": torch.zeros(1)}
        save_file(renamed, tmp_path / SINGLE_NAME)
        loaded = AutoModelForDecision.from_pretrained(tmp_path)
        assert isinstance(loaded, BagForDecision)
        assert torch.equal(logits_of(loaded, [[1, 2], [3]]), logits_of(model, [[1, 2], [3]]))

    def test_a_name_has_one_class(self) -> None:
        with pytest.raises(ValueError, match=r"qwen3_5 is already registered by flide\.models\.qwen3_5\.Qwen35ForDec"):
            register("bag", "qwen3_5")(BagForDecision)
        with pytest.raises(CheckpointError, match="bag"):  # none of the names was taken
            auto.family_of({"model_type": "bag"})

    def test_an_installed_package_is_found_by_its_entry_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points = [
            EntryPoint("bag", f"{__name__}:BagForDecision", "flide.models"),
            EntryPoint("gone", "no_such_module:Gone", "flide.models"),
            EntryPoint("lost", f"{__name__}:Lost", "flide.models"),
            EntryPoint("else", f"{__name__}:BagConfig", "flide.models"),
        ]
        asked: list[str] = []
        monkeypatch.setattr(auto, "entry_points", lambda *, group: (asked.append(group), points)[1])
        assert auto.family_of({"model_type": "qwen3_5"}) is Qwen35ForDecision
        assert not asked
        assert auto.family_of({"architectures": ["Unknown"], "model_type": "bag"}) is BagForDecision
        assert asked == ["flide.models"]
        for name, problem in (("gone", "no_such_module"), ("lost", "Lost"), ("else", "is no ForDecision")):
            with pytest.raises(CheckpointError, match=f"entry point {name} = .*{problem}"):
                auto.family_of({"model_type": name})
        with pytest.raises(CheckpointError, match=r"architecture other; supported: .*bag"):
            auto.family_of({"model_type": "other"})

    def test_registering_again_is_harmless(self) -> None:
        for _ in range(2):
            register("BagForDecision", "bag")(BagForDecision)
        assert auto.family_of({"model_type": "bag"}) is BagForDecision

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"architectures": ["Qwen3_5ForCausalLM"], "model_type": "bag"}, Qwen35ForDecision),
            ({"architectures": ["BagForDecision"], "model_type": "qwen3_5"}, BagForDecision),
            ({"architectures": ["Unknown", "BagForDecision"], "model_type": "qwen3_5"}, BagForDecision),
            ({"architectures": ["Unknown"], "model_type": "qwen3_5"}, Qwen35ForDecision),
            ({"architectures": None, "model_type": "qwen3_5_text"}, Qwen35ForDecision),
            ({"architectures": [], "model_type": "bag"}, BagForDecision),
            ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, Qwen35ForDecision),
            ({"architectures": "Qwen3_5ForCausalLM", "model_type": "bag"}, BagForDecision),
        ],
        ids=lambda value: "" if isinstance(value, type) else json.dumps(value)[:60],
    )
    def test_architectures_come_before_the_model_type(self, config: dict[str, Any], expected: type) -> None:
        register("BagForDecision", "bag")(BagForDecision)
        assert auto.family_of(config) is expected


class TestMakeCheckpoint:
    """Random checkpoints of any shape, in transformers' own format."""

    @pytest.fixture(params=["multimodal", "text"])
    def config(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        model = MODELS[request.param](tied=request.param == "multimodal")
        model.config.save_pretrained(tmp_path / "config")
        path = tmp_path / "config" / "config.json"
        raw = {**json.loads(path.read_text()), "architectures": [type(model).__name__]}
        path.write_text(json.dumps(raw))
        return tmp_path / "config"

    @staticmethod
    def make(*arguments: Any) -> None:
        make_checkpoint.main([str(argument) for argument in arguments])

    def test_both_libraries_load_it_with_the_same_logits(
        self, config: Path, tmp_path: Path, prompts: list[list[int]]
    ) -> None:
        out = tmp_path / "out"
        self.make(config, out, "--max-shard-size", "100KB")
        hf_class = getattr(transformers, json.loads((out / "config.json").read_text())["architectures"][0])
        hf, info = hf_class.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert {name: list(found) for name, found in info.items() if found} == {}
        model = AutoModelForDecision.from_pretrained(out)
        expected = torch.stack([isolated_logits(hf.eval(), prompt) for prompt in prompts])
        assert 0.05 < expected.std().item() < 5
        assert (logits_of(model, prompts) - expected).abs().max() <= LOGITS_FP32

    def test_types_are_those_of_published_files(self, config: Path, tmp_path: Path) -> None:
        self.make(config, tmp_path / "out")
        for name, stored in list_tensors(tmp_path / "out").items():
            assert stored.dtype == ("F32" if FLOAT32_NAMES.search(name) else "BF16"), name

    def test_values_are_sane(self, config: Path, tmp_path: Path) -> None:
        self.make(config, tmp_path / "out")
        for name, tensor in load_file(tmp_path / "out" / SINGLE_NAME).items():
            value = tensor.float()
            assert value.isfinite().all(), name
            assert value.unique().numel() > 1, name
            if name.endswith("A_log"):
                assert value.max() <= torch.tensor(16.0).log()
            elif name.endswith("norm.weight") and "visual" not in name:
                rest = 1.0 if FLOAT32_NAMES.search(name) else 0.0
                assert (value - rest).abs().max() < 0.6, name
            elif name.endswith("proj.weight") and "patch" not in name:
                assert 0.015 < value.std() < 0.025, name

    def test_values_depend_on_the_seed_and_not_on_sharding(self, config: Path, tmp_path: Path) -> None:
        self.make(config, tmp_path / "a")
        self.make(config, tmp_path / "b", "--max-shard-size", "100KB")
        self.make(config, tmp_path / "c", "--seed", 1)
        one = load_file(tmp_path / "a" / SINGLE_NAME)
        shards = [load_file(file) for file in (tmp_path / "b").glob("*.safetensors")]
        assert len(shards) > 1
        assert {name: tensor.tolist() for shard in shards for name, tensor in shard.items()} == {
            name: tensor.tolist() for name, tensor in one.items()
        }
        other = load_file(tmp_path / "c" / SINGLE_NAME)
        assert all(not torch.equal(other[name], tensor) for name, tensor in one.items())

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_fewer_layers_and_text_only(self, config: Path, dtype: str, tmp_path: Path) -> None:
        out = tmp_path / "out"
        self.make(config / "config.json", out, "--layers", 3, "--text-only", "--dtype", dtype)
        raw = json.loads((out / "config.json").read_text())
        assert raw["architectures"] == ["Qwen3_5ForCausalLM"]
        assert (raw["num_hidden_layers"], len(raw["layer_types"]), raw["dtype"]) == (3, 3, dtype)
        assert {name.split(".")[0] for name in list_tensors(out)} <= {"model", "lm_head"}
        _, info = Qwen3_5ForCausalLM.from_pretrained(out, output_loading_info=True)
        assert {name: list(found) for name, found in info.items() if found} == {}
        assert len(AutoModelForDecision.from_pretrained(out).config.layer_types) == 3

    def test_fewer_layers_of_a_nested_config(self, tmp_path: Path) -> None:
        config = make_checkpoint.load_config(CONFIGS / "qwen3.5-0.8b.json", layers=5, dtype="bfloat16")
        assert config["text_config"]["num_hidden_layers"] == 5
        assert config["text_config"]["layer_types"] == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
        assert "num_hidden_layers" not in config

    def test_tokenizer_files_are_copied(self, config: Path, tmp_path: Path) -> None:
        source = tmp_path / "tokenizer"
        source.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors", "notes.md"):
            (source / name).write_text(name)
        self.make(config, tmp_path / "out", "--tokenizer", source)
        copied = {file.name for file in (tmp_path / "out").iterdir()} - {"config.json", SINGLE_NAME}
        assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}

    def test_a_full_disk_is_found_before_anything_is_written(
        self, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(SystemExit) as info:
            self.make(config, tmp_path / "deep" / "out")
        assert info.value.code == 1
        assert "GB left" in capsys.readouterr().err
        assert not (tmp_path / "deep").exists()

    @pytest.mark.parametrize(
        ("changes", "arguments", "message"),
        [
            ({}, ["--layers", 5], "--layers must be from 1 to 4"),
            ({}, ["--layers", 0], "--layers must be from 1 to 4"),
            ({"architectures": ["NoSuchModel"]}, [], "no architecture NoSuchModel"),
            ({"architectures": []}, [], "no architecture"),
        ],
        ids=["more_layers", "no_layers", "unknown", "none"],
    )
    def test_mistakes_are_said(
        self,
        config: Path,
        changes: dict[str, Any],
        arguments: list[Any],
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = config / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        with pytest.raises(SystemExit):
            self.make(config, tmp_path / "out", *arguments)
        assert message in capsys.readouterr().err

    def test_weights_are_never_overwritten(
        self, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.make(config, tmp_path / "out")
        with pytest.raises(SystemExit):
            self.make(config, tmp_path / "out")
        assert "already holds weights" in capsys.readouterr().err

    def test_other_families_keep_their_stored_names(self, tmp_path: Path) -> None:
        """Renamed on load (vision part of the unified Gemma 4), with buffers that are stored (layer scalars)."""
        hf = transformers.Gemma4UnifiedForConditionalGeneration
        text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        text |= {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 300}
        text |= {"layer_types": ["sliding_attention", "full_attention"]}
        vision = {"mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64}
        config = hf.config_class(text_config=text, vision_config=vision)
        raw = {**config.to_dict(), "architectures": [hf.__name__]}
        (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
        self.make(tmp_path, tmp_path / "out")
        stored = list_tensors(tmp_path / "out")
        assert "model.language_model.layers.0.layer_scalar" in stored
        assert any(name.startswith("model.vision_embedder.") for name in stored)
        model, info = hf.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert {name: list(found) for name, found in info.items() if found} == {}
        with safe_open(tmp_path / "out" / SINGLE_NAME, framework="pt") as file:
            scalar = file.get_tensor("model.language_model.layers.1.layer_scalar")
        assert torch.equal(model.model.language_model.layers[1].layer_scalar, scalar)
