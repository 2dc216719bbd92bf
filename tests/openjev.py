"""A tiny Open-Jev package with the published one's files, keys and shapes, and what its answers should be.

The reference shares no code with Flide: prompts are written out here, and transformers and PEFT run every candidate's
alone, unpadded and unmerged.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from tests.oracle import save_transformers, tiny_transformers_model
from tests.tiny_tokenizer import write_tokenizer

VOCAB = 1280
HIDDEN = 64
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj"]
TEMPERATURE = 1.518796342858676
REVISION = "15852e8c16360a2fea060d615a32b45270f8a8fc"


def write_base(directory: Path, **overrides: Any) -> Path:
    """A chat model as transformers writes it, in float32."""
    save_transformers(tiny_transformers_model(vocab_size=VOCAB, **overrides), directory)
    write_tokenizer(directory, vocab_size=VOCAB)
    return directory


def write_package(root: Path, base: Path, *, model_id: str | None = None) -> Path:
    """``package/`` in a directory, for a base from :func:`write_base`; returns it."""
    package = root / "package"
    checkpoint = package / "checkpoint"
    checkpoint.mkdir(parents=True)
    hf = Qwen3_5ForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, lora_dropout=0.0, bias="none")
    hf.model.config._name_or_path = ""  # as published: the adapter does not name its base
    adapted = get_peft_model(hf.model, config)
    torch.manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3 * parameter.shape[1] ** -0.5)
    adapted.save_pretrained(checkpoint / "adapter")
    head = nn.Linear(hf.config.hidden_size, 1)
    head.weight.data.normal_(std=2 * hf.config.hidden_size**-0.5)
    torch.save(head.state_dict(), checkpoint / "head.pt")
    model = {
        "model_id": str(base) if model_id is None else model_id,
        "revision": REVISION,
        "max_length": 4096,
        "lora_rank": 8,
        "method": "independent_candidate_lora_nll_brier",
    }
    write_json(checkpoint / "model.json", model)
    calibration = {"temperature": TEMPERATURE, "split": "calibration", "n": 512, "ids_sha256": "0" * 64}
    write_json(checkpoint / "temperature.json", calibration)
    write_manifest(package)
    return package


def write_manifest(package: Path) -> None:
    """List what is there now."""
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.name != "manifest.json")
    listed = {str(path.relative_to(package)): {"sha256": sha256(path), "bytes": path.stat().st_size} for path in files}
    write_json(package / "manifest.json", {"files": listed, "model": "Open-Jev-tiny", "revision": "main"})


def write_export(directory: Path, package: Path, base: Path, *, sharded: bool = False) -> Path:
    """What vllm-jev makes of a package: merged weights under ``model.``, no ``lm_head``, the score beside them."""
    hf = Qwen3_5ForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    hf.model = PeftModel.from_pretrained(hf.model, package / "checkpoint" / "adapter").merge_and_unload()
    tensors = {name: tensor for name, tensor in hf.state_dict().items() if not name.startswith("lm_head")}
    hf.save_pretrained(directory, state_dict=tensors, max_shard_size="200KB" if sharded else "5GB")
    write_tokenizer(directory, vocab_size=VOCAB)
    from safetensors.torch import load_file, save_file

    for path in directory.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("lm_head")}
        save_file(kept, path)
    state = torch.load(package / "checkpoint" / "head.pt", weights_only=True)
    save_file({f"score.{name}": tensor for name, tensor in state.items()}, directory / "score.safetensors")
    weight_map = {name: path.name for path in sorted(directory.glob("*.safetensors")) for name in load_file(path)}
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    config = json.loads((directory / "config.json").read_text())
    architecture = "VllmJevQwen35ForSequenceClassification"
    write_json(directory / "config.json", {**config, "architectures": [architecture], "num_labels": 1})
    manifest = {
        "format": "vllm-jev-pooling-v1",
        "architecture": architecture,
        "prompt_protocol": "open_jev_choice",
        "calibration_temperature": TEMPERATURE,
        "files": {path.name: sha256(path) for path in directory.iterdir() if path.is_file()},
    }
    write_json(directory / "jev_manifest.json", manifest)
    return directory


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)


def messages(state: Any, question: Mapping[str, Any]) -> list[str]:
    """The user's message of every candidate."""
    asked = question.get("instructions")
    asked = "" if asked is None else shown(asked)
    criteria = question.get("criteria")
    if question["type"] == "noul":
        lines = [asked]
        for side, word in (("true", "Yes"), ("false", "No")):
            if criteria and criteria.get(side) is not None:
                lines.append(f"{word} means: {shown(criteria[side])}")
        lines.append("Is the answer to this question yes? Answer Yes or No.")
        return [f"Context:\n{shown(state)}\n\nQuestion: " + "\n".join(lines)]
    if question["type"] == "choice":
        options = [name if text is None else f"{name}: {shown(text)}" for name, text in criteria.items()]
    else:
        options = [shown(level) for level in criteria]
    return [
        f"Context:\n{shown(state)}\n\nQuestion: {asked}\nProposed answer: {option}\n"
        "Is this proposed answer correct? Answer Yes or No."
        for option in options
    ]


class Reference:
    """A package as its authors run it, in float32."""

    def __init__(self, package: Path, base: Path) -> None:
        checkpoint = package / "checkpoint"
        hf = Qwen3_5ForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
        self.model: Any = PeftModel.from_pretrained(hf.model, checkpoint / "adapter").eval()
        self.head = nn.Linear(hf.config.hidden_size, 1)
        self.head.load_state_dict(torch.load(checkpoint / "head.pt", weights_only=True))
        self.tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)

    def prompt(self, message: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.no_grad()
    def score(self, message: str) -> Tensor:
        hidden = self.model(input_ids=torch.tensor([self.prompt(message)]), use_cache=False).last_hidden_state
        return self.head(hidden[0, -1].float())[0]

    def probabilities(self, state: Any, question: Mapping[str, Any]) -> list[float]:
        """In the order of Flide's answers: options, levels, or [true, false]."""
        scores = [float(self.score(message)) for message in messages(state, question)]
        if question["type"] == "noul":
            scores.append(0.0)
        weights = [math.exp((score - max(scores)) / TEMPERATURE) for score in scores]
        return [weight / sum(weights) for weight in weights]
