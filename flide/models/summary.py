"""What ``flide info`` prints: a model's family, sizes, labels and memory, read from headers alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from flide.models.auto import family_of
from flide.models.directory import ModelDirectory
from flide.models.weights import list_tensors

_BYTES = {"float32": 4, "bfloat16": 2}


def summarize(path: str | Path, *, base: str | Path | None = None) -> dict[str, Any]:
    """Facts about a model directory or Hub id; no weights are loaded.

    Args:
        path: of the model.
        base: see ``ForDecision.from_pretrained``.

    Raises:
        CheckpointError: it is not a model Flide can load.
    """
    from flide.runtime.tokenizer import PromptTokenizer

    found = ModelDirectory.open(path, base=base)
    raw = found.config()
    family = family_of(raw)
    model = family.on_meta(raw)
    matched = model.match(list_tensors(found.base))
    tokenizer = PromptTokenizer.from_pretrained(found.tokenizer)
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
    if found.base != found.path:
        summary["base_model"] = str(found.base)
    if found.has_adapter:
        updates = found.read_adapter(model.checkpoint_tensors(), renames=family.renames)
        summary["adapter"] = f"LoRA of {len(updates)} matrices"
    if (head := found.load_head(model.lm_head.in_features)) is not None:
        summary["max_prompt_tokens"] = min(summary["max_prompt_tokens"], head.max_prompt_tokens or math.inf)
        summary["head"] = f"{head.kind}, {head.num_columns} column{'s' * (head.num_columns != 1)}"
    for name, size in _BYTES.items():
        summary[f"weights_{name}_mb"] = round(parameters * size / 1e6, 1)
    return summary
