"""Adapters travel between PEFT and Flide in both directions with the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flide.errors import CheckpointError
from flide.heads import ScalarHead, save_head
from flide.heads.files import HEAD_FILE
from flide.layers.lora import LoRALinear, add_lora
from flide.models import AutoModelForDecision, Qwen35ForDecision
from flide.models.adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter, save_adapter
from flide.models.directory import ModelDirectory, lasting_name
from flide.models.summary import summarize
from flide.runtime import ForkMetadata, TokenTree
from tests.models.test_checkpoints import multimodal_model
from tests.oracle import TINY, isolated_logits, random_tokens, save_transformers, tiny_transformers_model
from tests.tiny_tokenizer import write_tokenizer
from tests.tolerance import LOGITS_FP32

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_transformers(tiny_transformers_model(), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [random_tokens(length, TINY["vocab_size"], generator) for length in (1, 9, 70)]


def randomise(model: nn.Module) -> None:
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3 * parameter.shape[1] ** -0.5)


def written_by_peft(base: Path, out: Path, *, inner: bool = False, **options: Any) -> Any:
    """A PEFT adapter of the whole model, or of the model without its head as Open-Jev has it; returns the whole one."""
    hf = tiny_transformers_model()
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": None if inner else "CAUSAL_LM"} | options
    )
    peft = get_peft_model(hf.model if inner else hf, config)
    randomise(peft)
    peft.save_pretrained(out)
    settings = json.loads((out / CONFIG_FILE).read_text())
    (out / CONFIG_FILE).write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    return hf.eval() if inner else peft.eval()


def logits_of(model: Any, prompts: list[list[int]]) -> Tensor:
    meta = ForkMetadata.pack([TokenTree(prompt) for prompt in prompts])
    with torch.no_grad():
        return (model(meta.tokens, meta) @ model.lm_head.weight.T).float()


def assert_same(model: Any, hf: Any, prompts: list[list[int]]) -> None:
    expected = torch.stack([isolated_logits(hf, prompt) for prompt in prompts])
    assert (logits_of(model, prompts) - expected).abs().max().item() <= LOGITS_FP32 * expected.std().item()


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "inner": {"inner": True},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.3.self_attn.q_proj": 3, "o_proj": 16}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_peft_writes_is_folded_at_load(
    base: Path, tmp_path: Path, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    peft = written_by_peft(base, tmp_path, **options)
    model = AutoModelForDecision.from_pretrained(tmp_path)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    assert_same(model, peft, prompts)
    plain = Qwen35ForDecision.from_pretrained(base)
    assert (logits_of(plain, prompts) - logits_of(model, prompts)).abs().max() > 0.05  # the adapter does something


def test_an_adapter_of_the_image_text_model_is_folded_into_its_text_part(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    whole = multimodal_model(tied=False)
    base = save_transformers(whole, tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q_proj|out_proj)")
    peft = get_peft_model(whole, config)
    randomise(peft)
    peft.save_pretrained(tmp_path / "out")
    settings = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
    settings["base_model_name_or_path"] = str(base)
    (tmp_path / "out" / CONFIG_FILE).write_text(json.dumps(settings))
    assert_same(AutoModelForDecision.from_pretrained(tmp_path / "out"), peft.eval(), prompts)
    # What is trained on such a base has the names of its text model, which transformers loads as a causal LM.
    model = AutoModelForDecision.from_pretrained(base)
    add_lora(model, rank=4, scale=2.0, generator=torch.Generator().manual_seed(0))
    randomise(model)
    (tmp_path / "ours").mkdir()
    save_adapter(model, tmp_path / "ours", base_model=str(base))
    text = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    assert_same(model, PeftModel.from_pretrained(text, tmp_path / "ours").eval(), prompts)


def adapted(base: Path) -> Qwen35ForDecision:
    model = Qwen35ForDecision.from_pretrained(base)
    add_lora(model, rank=4, scale=2.0, generator=torch.Generator().manual_seed(0))
    randomise(model)
    return model


def test_what_is_saved_here_peft_loads(base: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    model = adapted(base)
    save_adapter(model, tmp_path, base_model=str(base))
    peft = PeftModel.from_pretrained(tiny_transformers_model(), tmp_path).eval()
    assert_same(model, peft, prompts)
    assert_same(AutoModelForDecision.from_pretrained(tmp_path), peft, prompts)
    assert_same(AutoModelForDecision.from_pretrained(base), tiny_transformers_model(), prompts)


def test_an_adapter_is_added_in_float32_and_cast_once(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    save_adapter(model, tmp_path, base_model=str(base))
    folded = Qwen35ForDecision.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    exact = layer.weight + layer.scale * (layer.lora_B.weight @ layer.lora_A.weight)
    assert torch.equal(folded.model.layers[0].mlp.up_proj.weight, exact.to(torch.bfloat16))
    assert torch.equal(folded.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))


def test_adapters_are_no_part_of_a_saved_checkpoint(base: Path, tmp_path: Path) -> None:
    adapted(base).save_pretrained(tmp_path)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(base / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora is not supported"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "bias": ({"bias": "all"}, "bias is not supported"),
    "type": ({"peft_type": "IA3"}, "'IA3' is not supported"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha should be a number"),
    "large": ({"lora_alpha": 10**400}, "lora_alpha should be a number"),
    "pattern": ({"alpha_pattern": {"q_proj(": 8}}, "alpha_pattern has a bad pattern"),
    "init": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' is not supported: it changes the base"),
    "revision": ({"revision": 5}, "revision should be a name"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_adapters_that_compute_something_else_are_refused_by_name(
    base: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    save_adapter(adapted(base), tmp_path, base_model=str(base))
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, **fields}))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForDecision.from_pretrained(tmp_path)


def test_files_that_cannot_be_written_are_os_errors(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="none"):
        save_adapter(adapted(base), tmp_path / "none", base_model=str(base))
    with pytest.raises(OSError, match="none"):
        save_head(ScalarHead(8), tmp_path / "none")

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("flide.models.weights.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        adapted(base).save_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["shape", "name", "half", "other", "rank", "empty"])
def test_factors_that_do_not_fit_are_refused(base: Path, tmp_path: Path, damage: str) -> None:
    model = adapted(base)
    save_adapter(model, tmp_path, base_model=str(base))
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    key = next(iter(tensors))
    tensor = tensors.pop(key)
    changed: dict[str, dict[str, Tensor]] = {
        "shape": {key: tensor[:, 1:].contiguous()},
        "name": {key.replace("layers.", "layers.9"): tensor},
        "half": {},
        "rank": {key: tensor[:0], key.replace("lora_A", "lora_B"): tensors[key.replace("lora_A", "lora_B")][:, :0]},
        "other": {key: tensor, "base_model.model.lm_head.weight": tensor.clone()},
    }
    save_file(tensors | changed[damage] if damage != "empty" else {}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=WEIGHTS_FILE):
        read_adapter(tmp_path, model.checkpoint_tensors())


# Directories that build upon another


def test_a_directory_says_what_it_builds_upon(base: Path, tmp_path: Path) -> None:
    whole = ModelDirectory.open(base)
    assert (whole.base, whole.is_whole, whole.tokenizer) == (base, True, base)
    only_head = tmp_path / "head"
    only_head.mkdir()
    save_head(ScalarHead(TINY["hidden_size"]), only_head, base_model=str(base))
    found = ModelDirectory.open(only_head)
    assert (found.base, found.is_whole, found.has_head, found.has_adapter) == (base, False, True, False)
    assert found.tokenizer == base
    assert isinstance(AutoModelForDecision.from_pretrained(only_head).head, ScalarHead)
    both = Path(shutil.copytree(base, tmp_path / "both"))
    save_adapter(adapted(base), both, base_model="")
    assert not ModelDirectory.open(both).is_whole  # an adapter in its base's own directory
    assert ModelDirectory.open(both).base == both


def test_a_base_that_is_gone_or_was_never_named_is_told(base: Path, tmp_path: Path) -> None:
    save_adapter(adapted(base), tmp_path, base_model=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="belongs to cannot be had: .*gone"):
        AutoModelForDecision.from_pretrained(tmp_path)
    save_adapter(adapted(base), tmp_path, base_model="")
    with pytest.raises(CheckpointError, match="does not say which model it belongs to"):
        AutoModelForDecision.from_pretrained(tmp_path)
    save_head(ScalarHead(TINY["hidden_size"]), tmp_path, base_model=str(base))  # as Open-Jev: named elsewhere
    assert AutoModelForDecision.from_pretrained(tmp_path).head is not None
    (tmp_path / HEAD_FILE).write_text('{"format_version": 9}')
    with pytest.raises(CheckpointError, match="format_version 9"):
        AutoModelForDecision.from_pretrained(tmp_path)


def test_a_base_with_an_adapter_of_its_own_is_refused(base: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(base, tmp_path / "both"))
    save_adapter(adapted(base), both, base_model="")
    (tmp_path / "out").mkdir()
    save_adapter(adapted(base), tmp_path / "out", base_model=str(both))
    with pytest.raises(CheckpointError, match="both, which has an adapter: merge that first"):
        AutoModelForDecision.from_pretrained(tmp_path / "out")


def test_info_tells_of_adapter_and_head(base: Path, tmp_path: Path) -> None:
    save_adapter(adapted(base), tmp_path, base_model=str(base))
    save_head(ScalarHead(TINY["hidden_size"]), tmp_path)
    write_tokenizer(tmp_path, vocab_size=1280)
    summary = summarize(tmp_path)
    assert (summary["base_model"], summary["head"]) == (str(base), "scalar, 1 column")
    assert summary["adapter"].startswith("LoRA of ")


def test_names_that_last(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    assert lasting_name(base.name) == str(base)
    assert lasting_name("Qwen/Qwen3.5-0.8B") == "Qwen/Qwen3.5-0.8B"
