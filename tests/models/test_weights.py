"""Directories that cannot be loaded are refused by name, before anything is allocated and without a network."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor

from flide.errors import CheckpointError
from flide.models import AutoModelForDecision, Qwen35ForDecision
from flide.models import weights as weights_module
from flide.models.config import LIMITS, MAX_CONFIG_BYTES, read_config
from flide.models.weights import HUB_FILES, INDEX_NAME, SINGLE_NAME, list_tensors
from tests.oracle import TINY

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
LARGE = 1 << 24  # elements; no tiny model comes near


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved tiny model, in a single file and in shards."""
    torch.manual_seed(0)
    model = Qwen35ForDecision.from_config({**TINY, "rms_norm_eps": 1e-6})
    root = tmp_path_factory.mktemp("pristine")
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "sharded", max_shard_size="200KB")
    return {name: root / name for name in ("single", "sharded")}


@pytest.fixture
def single(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["single"], tmp_path / "model"))


@pytest.fixture
def sharded(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["sharded"], tmp_path / "model"))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Attempts to reach a network; every one of them fails."""
    attempts: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        attempts.append(arguments)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.fixture
def no_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on any large allocation that is not on the meta device."""

    def guard(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            with torch.device("meta"):
                size = original(*arguments, **{**options, "device": "meta"}).numel()
            where = torch.device(options.get("device") or torch.get_default_device())
            assert size < LARGE or where.type == "meta", f"{size} elements were allocated"
            return original(*arguments, **options)

        return allocate

    for name in ("empty", "zeros", "ones"):
        monkeypatch.setattr(torch, name, guard(getattr(torch, name)))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / SINGLE_NAME)
    change(tensors)
    save_file(tensors, directory / SINGLE_NAME)


def edit_weight_map(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def refusal(path: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as info:
        AutoModelForDecision.from_pretrained(path, **options)
    assert len(str(info.value)) < 4000
    return str(info.value)


class TestTensorsThatDoNotFit:
    def test_one_error_names_every_problem_once(self, single: Path) -> None:
        def damage(tensors: dict[str, Tensor]) -> None:
            del tensors["model.layers.0.mlp.up_proj.weight"]
            del tensors["model.layers.3.self_attn.k_norm.weight"]
            tensors["model.layers.9.surprise"] = torch.zeros(2)
            tensors[NORM] = torch.zeros(65)
            tensors["lm_head.weight"] = torch.zeros(97, 64, dtype=torch.int32)

        edit_weights(single, damage)
        text = refusal(single)
        assert "missing: model.layers.0.mlp.up_proj.weight, model.layers.3.self_attn.k_norm.weight;" in text
        assert "unexpected: model.layers.9.surprise;" in text
        assert "model.norm.weight is [65], expected [64]" in text
        assert "lm_head.weight is I32, expected a float type" in text
        assert text.count(NORM) == 1

    def test_a_wrong_shape_under_a_renamed_key_is_not_also_missing(self, single: Path) -> None:
        def damage(tensors: dict[str, Tensor]) -> None:
            del tensors[NORM]
            tensors["model.language_model.norm.weight"] = torch.zeros(3)

        edit_weights(single, damage)
        text = refusal(single)
        assert "model.language_model.norm.weight is [3], expected [64]" in text
        assert "missing" not in text

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.uint8, torch.float8_e4m3fn], ids=str)
    def test_types_that_need_decoding_are_refused(self, single: Path, dtype: torch.dtype) -> None:
        edit_weights(single, lambda tensors: tensors.update({NORM: torch.zeros(64).to(dtype)}))
        assert f"{NORM} is" in refusal(single)

    def test_two_keys_of_one_parameter(self, single: Path) -> None:
        edit_weights(single, lambda t: t.update({"model.language_model.norm.weight": torch.zeros(64)}))
        text = refusal(single)
        assert "are both model.norm.weight" in text
        assert "model.language_model.norm.weight" in text

    def test_long_lists_are_cut(self, single: Path) -> None:
        edit_weights(single, lambda tensors: [tensors.pop(key) for key in list(tensors)[:-1]])
        assert re.search(r"and \d+ more", refusal(single))

    def test_an_untied_model_without_a_head(self, single: Path) -> None:
        edit_weights(single, lambda tensors: tensors.pop("lm_head.weight"))
        assert "missing: lm_head.weight" in refusal(single)

    def test_a_tied_model_with_another_head(self, single: Path) -> None:
        edit_config(single, tie_word_embeddings=True)
        assert "lm_head.weight is not the embedding" in refusal(single)

    def test_a_tied_model_may_store_its_head_again(self, single: Path) -> None:
        edit_config(single, tie_word_embeddings=True)
        edit_weights(single, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
        model = AutoModelForDecision.from_pretrained(single)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_nothing_is_allocated_before_tensors_were_matched(self, single: Path, no_large_tensors: None) -> None:
        sizes = {key: limit for key, limit in LIMITS.items() if key != "num_hidden_layers"}
        edit_config(single, **sizes)
        assert f"[97, 64], expected [{LIMITS['vocab_size']}, {LIMITS['hidden_size']}]" in refusal(single)


class TestSafetensorsDirectories:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
    def test_only_safetensors_are_read(self, single: Path, name: str) -> None:
        (single / SINGLE_NAME).rename(single / name)
        text = refusal(single)
        assert name in text
        assert "only safetensors" in text

    def test_no_weights_at_all(self, single: Path) -> None:
        (single / SINGLE_NAME).unlink()
        assert f"neither {SINGLE_NAME} nor {INDEX_NAME}" in refusal(single)

    @pytest.mark.parametrize(
        "name",
        ["../outside.safetensors", "{parent}/outside.safetensors", "..\\outside.safetensors", "sub/outside.safetensors"]
        + ["..", "", ".safetensors", "model.bin", "outside.safetensors\n", "\0.safetensors", 7, None, ["x"]],
        ids=repr,
    )
    def test_an_index_cannot_leave_the_directory(self, sharded: Path, name: Any) -> None:
        outside = sharded.parent / "outside.safetensors"
        save_file({NORM: torch.zeros(64)}, outside)
        (sharded / "sub").mkdir()
        shutil.copy(outside, sharded / "sub")
        shutil.copy(outside, sharded / "..\\outside.safetensors")
        name = name.format(parent=sharded.parent) if isinstance(name, str) else name
        edit_weight_map(sharded, lambda weight_map: weight_map.update({NORM: name}))
        assert "outside the directory" in refusal(sharded)

    def test_a_tensor_in_another_shard_than_the_index_says(self, sharded: Path) -> None:
        def swap(weight_map: dict[str, str]) -> None:
            weight_map[NORM] = next(file for file in weight_map.values() if file != weight_map[NORM])

        edit_weight_map(sharded, swap)
        assert f"disagree about where {NORM} is" in refusal(sharded)

    def test_a_tensor_the_index_does_not_list(self, sharded: Path) -> None:
        edit_weight_map(sharded, lambda weight_map: weight_map.pop(NORM))
        assert f"disagree about where {NORM} is" in refusal(sharded)

    def test_a_tensor_no_shard_holds(self, sharded: Path) -> None:
        edit_weight_map(sharded, lambda weight_map: weight_map.update({"ghost": weight_map[NORM]}))
        assert "do not hold: ghost" in refusal(sharded)

    def test_a_missing_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("*-of-*.safetensors"))[1]
        shard.unlink()
        assert f"{shard.name} is named by {INDEX_NAME} but is not there" in refusal(sharded)

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", "7", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}', "{}"]
        + ["[" * 100_000, '{"weight_map": ' * 50_000, "\xff"],
        ids=lambda text: repr(text[:20]),
    )
    def test_an_index_that_is_none(self, sharded: Path, text: str) -> None:
        (sharded / INDEX_NAME).write_text(text, encoding="latin-1")
        assert INDEX_NAME in refusal(sharded)

    def test_an_index_too_large_to_read(self, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights_module, "MAX_INDEX_BYTES", 10)
        assert "larger than 10 bytes" in refusal(sharded)

    def test_the_single_file_wins_over_an_index_as_in_transformers(self, single: Path) -> None:
        (single / INDEX_NAME).write_text("not an index")
        assert set(list_tensors(single)) == set(load_file(single / SINGLE_NAME))

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x00" * 4,
            b"\xff" * 400,
            struct.pack("<Q", 2**63) + b"{}",
            struct.pack("<Q", 1 << 40) + b"{}",
            struct.pack("<Q", 99) + b"{}",
            struct.pack("<Q", 2) + b"[]",
            b'{"pickle": 1}',
        ],
        ids=["empty", "short", "ff", "length_2_63", "length_2_40", "length_past_end", "array", "text"],
    )
    def test_garbage_files(self, single: Path, content: bytes) -> None:
        (single / SINGLE_NAME).write_bytes(content)
        assert "not a readable safetensors file" in refusal(single)

    @pytest.mark.parametrize("kept", [0.5, 0.999], ids=["half", "almost_all"])
    def test_truncated_files(self, single: Path, kept: float) -> None:
        content = (single / SINGLE_NAME).read_bytes()
        (single / SINGLE_NAME).write_bytes(content[: int(len(content) * kept)])
        assert "not a readable safetensors file" in refusal(single)

    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": "F32", "shape": [64], "data_offsets": [0, 1 << 60]},
            {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 256]},
            {"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]},
            {"dtype": "F32", "shape": [64], "data_offsets": [256, 0]},
            {"dtype": "Q4", "shape": [64], "data_offsets": [0, 256]},
            {"dtype": "F32", "shape": [65], "data_offsets": [0, 256]},
            {"dtype": "F32"},
        ],
        ids=["past_the_end", "overflow", "negative", "reversed", "unknown_type", "wrong_length", "incomplete"],
    )
    def test_headers_that_lie(self, single: Path, entry: dict[str, Any]) -> None:
        header = json.dumps({NORM: entry}).encode()
        (single / SINGLE_NAME).write_bytes(struct.pack("<Q", len(header)) + header + bytes(256))
        assert "not a readable safetensors file" in refusal(single)

    def test_flipped_header_bytes_load_or_are_refused(self, single: Path) -> None:
        path = single / SINGLE_NAME
        content = path.read_bytes()
        (header_bytes,) = struct.unpack("<Q", content[:8])
        rng = random.Random(0)
        for _ in range(60):
            changed = bytearray(content)
            for _ in range(rng.choice([1, 1, 3])):
                changed[rng.randrange(8 + header_bytes)] = rng.randrange(256)
            path.write_bytes(changed)
            with contextlib.suppress(CheckpointError):
                AutoModelForDecision.from_pretrained(single)


class TestConfigs:
    def test_a_directory_without_a_config(self, single: Path) -> None:
        (single / "config.json").unlink()
        assert "no config.json" in refusal(single)

    @pytest.mark.parametrize(
        "text",
        ["", "{", "nonsense", "[1]", "3", "null", '"text"', "\xff\xfe", "[" * 200_000, '{"a":' * 100_000]
        + ['{"vocab_size": ' + "9" * 5000 + "}"],
        ids=lambda text: repr(text[:16]),
    )
    def test_a_config_that_is_no_object(self, single: Path, text: str) -> None:
        (single / "config.json").write_text(text, encoding="latin-1")
        assert "config.json" in refusal(single)

    def test_a_config_too_large_to_read(self, single: Path) -> None:
        with (single / "config.json").open("ab") as file:
            file.truncate(MAX_CONFIG_BYTES + 1)
        assert "larger than" in refusal(single)

    @pytest.mark.parametrize("key", [key for key in LIMITS if key != "full_attention_interval"])
    @pytest.mark.parametrize(
        "value",
        [None, "64", "", True, False, 0, -1, 64.0, float("nan"), float("inf"), 1e400, 10**4000, [64], {"a": 1}],
        ids=lambda value: repr(value)[:12],
    )
    def test_a_size_is_a_positive_bounded_integer(self, single: Path, key: str, value: Any) -> None:
        edit_config(single, **{key: value})
        text = refusal(single)
        assert key in text
        assert len(text) < 300

    @pytest.mark.parametrize("key", LIMITS)
    def test_absurd_sizes_are_refused_before_allocation(self, key: str, no_large_tensors: None) -> None:
        config = {**TINY, "rms_norm_eps": 1e-6, key: LIMITS[key] + 1}
        with pytest.raises(CheckpointError, match=key):
            Qwen35ForDecision.from_config(config)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"rms_norm_eps": 0}, "rms_norm_eps"),
            ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
            ({"rms_norm_eps": True}, "rms_norm_eps"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
            ({"tie_word_embeddings": None}, "tie_word_embeddings"),
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"attention_bias": True}, "attention_bias"),
            ({"attn_output_gate": False}, "attn_output_gate"),
            ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
            ({"linear_num_key_heads": 3}, "linear_num_key_heads must divide"),
            ({"layer_types": ["full_attention"] * 3}, "layer_types"),
            ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
            ({"layer_types": []}, "layer_types"),
            ({"layer_types": "full"}, "layer_types"),
            ({"layer_types": 4}, "layer_types"),
            ({"layer_types": [["full_attention"]] * 4}, "layer_types"),
            ({"layer_types": {"0": "full_attention"}}, "layer_types"),
            ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
            ({"rope_parameters": None}, "rope_parameters"),
            ({"rope_parameters": [1]}, "rope_parameters"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
            ({"rope_parameters": {"type": "linear", "rope_theta": 1e4}}, "type='linear'"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
            ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_theta"),
            ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "rotary dims"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e29}}, "rotary dims"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "rotary dims"),
            ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [11, 11, 10]}}, "mrope_section"),
            ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, -1, 1]}}, "mrope_section"),
            ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": "abc"}}, "mrope_section"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
            ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quantization_config"),
            ({"text_config": [1]}, "text_config"),
        ],
        ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
    )
    def test_an_unsupported_value_is_named(self, single: Path, changes: dict[str, Any], named: str) -> None:
        edit_config(single, **changes)
        assert named in refusal(single)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}, "qwen3_5_moe"),
            ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM, llama"),
            ({"architectures": None, "model_type": "bert"}, "bert"),
            ({"architectures": "T5Model", "model_type": "t5"}, "t5"),
            ({"architectures": [], "model_type": None}, "none"),
            ({"architectures": [None, 7, ["x"]], "model_type": {}}, "7"),
            ({"architectures": ["x" * 9999] * 999, "model_type": "y"}, "xxx"),
        ],
        ids=["moe", "llama", "type_alone", "not_a_list", "nothing", "not_names", "many"],
    )
    def test_an_unsupported_family_is_named(self, single: Path, changes: dict[str, Any], named: str) -> None:
        edit_config(single, **changes)
        text = refusal(single)
        assert named in text
        assert "supported: " in text
        assert "Qwen3_5ForConditionalGeneration" in text
        assert len(text) < 1000

    @pytest.mark.parametrize("config", [None, 7, "text", [], {}, object()], ids=lambda config: type(config).__name__)
    def test_only_configs_are_configs(self, config: Any) -> None:
        with pytest.raises(CheckpointError):
            Qwen35ForDecision.from_config(config)

    def test_a_config_may_be_any_json_object_to_the_reader(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"a": NaN, "b": [1, {"c": null}]}')
        assert read_config(tmp_path)["b"] == [1, {"c": None}]


class TestPathsAndTheHub:
    @pytest.mark.parametrize(
        "name",
        [
            "/no/such/directory",
            "./no/such",
            "../model",
            "gpt2",
            "a/b/c",
            "org/..",
            "../..",
            "org/na me",
            "org/",
            "/name",
            "~nobody-at-all/model",
            "x" * 5000,
            "org/" + "x" * 5000,
            "org\0/name",
            "org/name\n",
            "https://h.co/a/b",
        ],
        ids=lambda name: repr(name[:20]),
    )
    def test_what_is_neither_a_directory_nor_a_hub_id(
        self, name: str, connections: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert refusal(name)
        assert connections == []

    def test_a_file_is_not_a_model(self, single: Path) -> None:
        assert "is a file" in refusal(single / SINGLE_NAME)

    def test_a_directory_needs_no_network(
        self, single: Path, connections: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights_module, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
        AutoModelForDecision.from_pretrained(single)
        AutoModelForDecision.from_pretrained(str(single), revision="main", local_files_only=False)
        Qwen35ForDecision.from_pretrained(single)
        assert connections == []

    @pytest.mark.parametrize("loader", [AutoModelForDecision, Qwen35ForDecision], ids=["auto", "family"])
    def test_a_hub_id_is_one_snapshot_download(
        self, single: Path, loader: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls: list[Any] = []

        def download(*arguments: Any, **options: Any) -> str:
            calls.append((arguments, options))
            return str(single)

        monkeypatch.setattr(weights_module, "snapshot_download", download)
        monkeypatch.chdir(tmp_path)
        loader.from_pretrained("org/name", revision="v1", cache_dir="/cache", local_files_only=True)
        loader.from_pretrained("org/name")
        assert [arguments for arguments, _ in calls] == [("org/name",)] * 2
        patterns = list(HUB_FILES)
        assert [options for _, options in calls] == [
            {"revision": "v1", "cache_dir": "/cache", "local_files_only": True, "allow_patterns": patterns},
            {"revision": None, "cache_dir": None, "local_files_only": False, "allow_patterns": patterns},
        ]

    def test_only_config_weights_and_tokenizer_are_fetched(self) -> None:
        wanted = ["config.json", "model.safetensors", "model.safetensors-00001-of-00002.safetensors", INDEX_NAME]
        wanted += ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"]
        others = ["README.md", ".gitattributes", "pytorch_model.bin", "model.gguf", "modeling_custom.py", "LICENSE"]
        others += ["training_args.bin", "optimizer.pt", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "a.pkl"]
        assert list(filter_repo_objects(wanted + others, allow_patterns=list(HUB_FILES))) == wanted

    @pytest.mark.parametrize("options", [{}, {"local_files_only": True}], ids=["offline_mode", "local_files_only"])
    def test_an_empty_cache_offline_is_a_clear_error(
        self, options: dict[str, Any], connections: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not options)
        monkeypatch.chdir(tmp_path)
        text = refusal("org/name", cache_dir=tmp_path / "cache", **options)
        assert "no directory org/name" in text
        assert "cached snapshot" in text
        assert connections == []

    def test_no_network_is_a_clear_error(
        self, connections: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        assert "the Hub model org/name cannot be had" in refusal("org/name", cache_dir=tmp_path / "cache")
        assert connections

    @pytest.mark.skipif(sys.platform == "win32", reason="the cache is made of symbolic links")
    def test_a_cached_snapshot_loads_without_a_network(
        self, sharded: Path, connections: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repo = tmp_path / "cache" / "models--org--name"
        snapshot, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
        for folder in (snapshot, blobs, repo / "refs"):
            folder.mkdir(parents=True)
        (repo / "refs" / "main").write_text("a" * 40)
        for number, file in enumerate(sorted(sharded.iterdir())):
            shutil.copy(file, blobs / str(number))
            (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
        monkeypatch.chdir(tmp_path)
        AutoModelForDecision.from_pretrained("org/name", cache_dir=tmp_path / "cache", local_files_only=True)
        assert connections == []
