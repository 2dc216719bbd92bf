"""Write a random checkpoint of a true shape, in transformers' own format.

Names and shapes come from transformers' model class for the config's architecture, built on the meta device. Values are
drawn and written shard by shard, so memory never holds more than one shard. They depend on the tensor's name and the
seed alone: resharding changes nothing.

    python scripts/make_checkpoint.py scripts/configs/qwen3.5-4b.json OUT --layers 8 --text-only
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Published Qwen3.5 files hold these in float32, everything else in bfloat16.
FLOAT32_NAMES = re.compile(r"\.linear_attn\.(A_log|norm\.weight)$")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_*")
MATRIX_STD = 0.02
RESTING_STD = 0.1  # of the noise on norm weights, biases and scalars around transformers' initial value
SPARE_BYTES = 64 << 20


def load_config(path: Path, *, layers: int | None = None, text_only: bool = False, dtype: str) -> dict[str, Any]:
    """config.json as it will be written: cut to its first ``layers`` layers, to its text part, and of a given dtype."""
    config: dict[str, Any] = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if text_only and "text_config" in config:
        tie = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**config["text_config"], **tie}
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"], "(none for the text)")]
    text = config.get("text_config", config)
    if layers is not None:
        if not 0 < layers <= text["num_hidden_layers"]:
            raise ValueError(f"--layers must be from 1 to {text['num_hidden_layers']}, got {layers}")
        text["num_hidden_layers"] = layers
        if text.get("layer_types"):
            text["layer_types"] = text["layer_types"][:layers]
    config["dtype"] = text["dtype"] = dtype
    return config


def meta_model(config: dict[str, Any]) -> PreTrainedModel:
    """transformers' model of a config, on the meta device."""
    name = (config.get("architectures") or ["(none given)"])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(f"transformers {transformers.__version__} has no architecture {name}")
    with torch.device("meta"):
        return model_class(model_class.config_class.from_dict(copy.deepcopy(config)))


def stored_tensors(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, tuple[str, Tensor]]:
    """What the files hold: stored name -> (name in the model, meta tensor of the stored dtype). Ties appear once."""
    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        own.setdefault(id(tensor), (name, tensor))
    # A converted tensor (not only renamed) keeps the model's own name: transformers reads both.
    reverted = revert_weight_conversion(model, dict(own.values()))
    stored_names = {id(tensor): name for name, tensor in reverted.items()}
    stored = {}
    for key, (name, tensor) in own.items():
        kept = torch.float32 if FLOAT32_NAMES.search(name) else dtype
        stored[stored_names.get(key, name)] = (name, tensor.to(kept) if tensor.is_floating_point() else tensor)
    return stored


def draw(model: PreTrainedModel, name: str, like: Tensor, seed: int) -> Tensor:
    """The value of one tensor: matrices normal, everything smaller near where transformers initialises it."""
    torch.manual_seed(seed + zlib.crc32(name.encode()))
    *path, local = name.split(".")
    module = model.get_submodule(".".join(path))
    if like.ndim > 1:
        # Convolutions have few taps: a fixed deviation would all but silence what passes through them.
        conv = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        std = like[0].numel() ** -0.5 if conv else MATRIX_STD
        return torch.empty(like.shape, dtype=like.dtype).normal_(std=std)
    ancestors = (model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1))
    owner = next(ancestor for ancestor in ancestors if isinstance(ancestor, PreTrainedModel))
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        owner._init_weights(module)
        value = getattr(module, local).detach().to(like.dtype, copy=True)
    module.to_empty(device="meta", recurse=False)
    at_rest = value.is_floating_point() and bool((value == value.flatten()[0]).all())
    return value + RESTING_STD * torch.randn(value.shape).to(value.dtype) if at_rest else value


def write_checkpoint(config: dict[str, Any], out: Path, *, seed: int = 0, max_shard_size: int | str = "5GB") -> None:
    """Write config.json and safetensors. Raises OSError before anything is written if the disk has too little space."""
    if out.exists() and any(out.glob("*.safetensors*")):
        raise ValueError(f"{out} already holds weights")
    model = meta_model(config)
    stored = stored_tensors(model, getattr(torch, config["dtype"]))
    size = sum(tensor.nbytes for _, tensor in stored.values())
    disk = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if size + SPARE_BYTES > free:
        raise OSError(f"the checkpoint takes {size / 1e9:.1f} GB, but {disk} has {free / 1e9:.1f} GB left")

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    meta = {key: tensor for key, (_, tensor) in stored.items()}
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    with tqdm(total=size, unit="B", unit_scale=True, desc=out.name) as progress:
        for file, keys in split.filename_to_tensors.items():
            shard = {}
            for key in keys:
                shard[key] = draw(model, *stored[key], seed)
                progress.update(shard[key].nbytes)
            save_file(shard, out / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json, or a directory that holds one")
    parser.add_argument("out", type=Path, help="directory to write, without weights in it")
    parser.add_argument("--layers", type=int, help="keep only this many layers")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--text-only", action="store_true", help="leave vision and audio out")
    parser.add_argument("--tokenizer", type=Path, help="directory to copy tokenizer files from")
    args = parser.parse_args(arguments)
    try:
        config = load_config(args.config, layers=args.layers, text_only=args.text_only, dtype=args.dtype)
        write_checkpoint(config, args.out, seed=args.seed, max_shard_size=args.max_shard_size)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    for pattern in TOKENIZER_FILES if args.tokenizer else ():
        for file in args.tokenizer.glob(pattern):
            shutil.copy(file, args.out)


if __name__ == "__main__":
    main()
