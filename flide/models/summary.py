"""What ``flide info`` prints: a model's family, sizes, labels and memory, read from headers alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from flide.models.auto import family_of
from flide.models.config import read_config
from flide.models.weights import list_tensors, resolve_directory

_BYTES = {"float32": 4, "bfloat16": 2}


def summarize(path: str | Path) -> dict[str, Any]:
    """Facts about a model directory or Hub id; no weights are loaded.

    Raises:
        CheckpointError: it is not a model Flide can load.
    """
    from flide.runtime.tokenizer import PromptTokenizer

    directory = resolve_directory(path)
    raw = read_config(directory)
    family = family_of(raw)
    model = family.on_meta(raw)
    matched = model.match(list_tensors(directory))
    tokenizer = PromptTokenizer.from_pretrained(directory)
    config = model.config.to_hf()
    parameters = sum(math.prod(tensor.shape) for tensor in matched.values())
    layer_types = config.get("layer_types", [])
    summary: dict[str, Any] = {
        "model": str(path),
        "family": family.__name__,
        "parameters": parameters,
        "layers": ", ".join(f"{layer_types.count(kind)} {kind}" for kind in dict.fromkeys(layer_types)),
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "tied_head": config["tie_word_embeddings"],
        "max_prompt_tokens": config["max_position_embeddings"],
        "labels": tokenizer.num_labels(),
        "stored_as": ", ".join(sorted({tensor.dtype for tensor in matched.values()})),
    }
    for name, size in _BYTES.items():
        summary[f"weights_{name}_mb"] = round(parameters * size / 1e6, 1)
    return summary
