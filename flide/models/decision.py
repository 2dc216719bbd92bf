"""What every decision model shares: loading, saving, and reading options out of hidden rows.

Shapes: N readout rows, D hidden size, O options, L label rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor, nn

from flide.errors import CheckpointError
from flide.heads.files import save_head
from flide.heads.head import Head
from flide.heads.kinds import softcapped
from flide.layers.attention import ForkAttention, ForkAttentionReader
from flide.layers.gated_delta import ForkGatedDeltaNet
from flide.layers.mlp import GatedMLP
from flide.layers.norm import KeepFloat32
from flide.models.adapter import folded, put_adapter
from flide.models.directory import ModelDirectory
from flide.models.weights import (
    StoredTensor,
    holds,
    list_tensors,
    match_tensors,
    save_checkpoint,
    stream_weights,
)
from flide.ops.fork_attention import unsupported as attention_unsupported
from flide.ops.fork_gated_delta import unsupported as delta_unsupported
from flide.runtime.metadata import ForkMetadata


class DecisionConfig(Protocol):
    """What a family's frozen config provides."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def tie_word_embeddings(self) -> bool: ...

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """From transformers' config (object or its dict). Raises CheckpointError by the name of a wrong field."""

    def to_hf(self) -> dict[str, Any]:
        """As transformers' config.json of the text model."""


class ForDecision(nn.Module):
    """Base of tree-aware models: ``forward(tokens, meta)`` returns the final hidden states of the readout rows.

    A family sets ``config_class`` and ``model_class``, whose modules have the checkpoint's own parameter names and
    whose ``forward`` is the layer loop, and says which stored keys it renames, joins or leaves out.

    Attributes:
        model_class: made from the config; has ``embed_tokens`` and a ``forward`` with the arguments of ours. None for a
            family that makes its modules, and runs them, itself.
        renames: (pattern, replacement) from stored keys to parameter names.
        ignored: patterns of stored keys of parts the model leaves out (vision tower, multi-token prediction). What a
            config makes useless besides is said by :meth:`unused_keys`.
        joined: (name, parts) of tensors that a checkpoint may store in parts, as ``match_tensors`` takes them.
        lm_head: ``[vocab, D]`` projection whose rows score option labels.
        head: what reads options out of hidden rows; None for the labels' rows of ``lm_head``. See ``flide.heads``.
        pools_owner: what runs the model from the pools it was given; there can be one only.
        final_logit_softcapping: cap c of ``c * tanh(logit / c)``, applied before the option softmax; None for none.
    """

    config_class: ClassVar[type[DecisionConfig]]
    model_class: ClassVar[Callable[..., nn.Module] | None] = None
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    joined: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    config: DecisionConfig
    model: nn.Module
    lm_head: nn.Linear
    head: Head | None
    pools_owner: weakref.ref[object] | None = None
    final_logit_softcapping: float | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head = config, None
        if self.model_class is not None:
            self.model = self.model_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = cast(nn.Embedding, self.model.embed_tokens).weight

    def forward(self, tokens_T: Tensor, meta: ForkMetadata, *, selective_readout: bool = True) -> Tensor:
        """Final hidden states ``[N, D]`` of ``meta.readout_rows``.

        Args:
            tokens_T: ``[T]`` int token ids in stream order.
            meta: the stream's structure, on the same device.
            selective_readout: compute in the last layer only what the readout rows need; False is an ablation.
        """
        return cast(Tensor, self.model(tokens_T, meta, selective_readout=selective_readout))

    @classmethod
    def from_config(cls, config: Any, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Self:
        """A randomly initialised model.

        Args:
            config: the family's config, or transformers' (object or dict).
            dtype: of the weights (float32-only parameters excepted); None for bfloat16 on CUDA, float32 elsewhere.
        """
        model = cls.on_meta(config)
        _materialise(model, default_dtype(device) if dtype is None else dtype, torch.device(device))
        model.reset_parameters()
        return model

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | ModelDirectory,
        *,
        base: str | Path | None = None,
        merge_lora: bool = True,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a checkpoint in transformers' format, in eval mode.

        A directory that fine-tuning wrote, or an Open-Jev package, is loaded with its base: LoRA adapters in PEFT's
        format are folded into the weights (a float32 sum, then cast), the head becomes ``model.head``.

        Args:
            path: model directory, also one that was found already, or a Hub id resolved by ``huggingface_hub``.
            base: directory of the base, in place of the one that an adapter, a head or a package names.
            merge_lora: False keeps adapters beside the weights, in float32, as they were trained: slower, and up to
                rounding the same.
            revision, cache_dir, local_files_only: passed to the Hub.
            dtype: of the weights; None for bfloat16 on CUDA, float32 elsewhere. Parameters that must stay float32 do.

        Raises:
            CheckpointError: bad config, or tensors that do not fit it; nothing is allocated before both were checked.
        """
        found = ModelDirectory.open(
            path, base=base, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        model = cls.on_meta(found.config())
        stored = list_tensors(found.base)
        matched = model.match(stored)
        targets = model.checkpoint_tensors()
        updates = found.read_adapter(targets, renames=cls.renames)
        head = found.load_head(model.lm_head.in_features, device=device)
        _materialise(model, default_dtype(device) if dtype is None else dtype, torch.device(device))
        stream_weights(
            model.checkpoint_tensors(),
            matched,
            change=lambda name, value: folded(value, updates[name]) if merge_lora and name in updates else value,
        )
        if not merge_lora:
            put_adapter(model, updates)
        tied = stored.get("lm_head.weight") if model.config.tie_word_embeddings else None
        if tied is not None and not holds(tied, model.lm_head.weight):
            raise CheckpointError("tie_word_embeddings is true, but lm_head.weight is not the embedding")
        model.head = head
        return model.eval()

    def save_pretrained(self, directory: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write config.json and safetensors that transformers loads with the same logits, and beside them the head, if
        there is one. The tokenizer is not ours."""
        dtype = str(self.lm_head.weight.dtype).removeprefix("torch.")
        config = {**self.config.to_hf(), "dtype": dtype}
        save_checkpoint(self.checkpoint_tensors(), config, Path(directory), max_shard_size=max_shard_size)
        if self.head is not None:
            save_head(self.head, Path(directory))

    def option_probabilities(self, hidden_states_ND: Tensor, option_ids: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Probability of each option label as the next token, among the options given.

        Args:
            hidden_states_ND: ``[N, D]`` output of forward.
            option_ids: ``[N, O]`` token ids, or one list per row; -1 (or a shorter list) for unused places.

        Returns:
            ``[N, O]`` float32; rows sum to 1, unused places are 0.
        """
        if not isinstance(option_ids, Tensor):
            width = max(len(row) for row in option_ids)
            option_ids = torch.tensor([[*row, *[-1] * (width - len(row))] for row in option_ids])
        option_ids = option_ids.to(hidden_states_ND.device)
        rows_NOD = self.lm_head.weight[option_ids.clamp(min=0)]
        logits_NO = torch.einsum("nd,nod->no", hidden_states_ND.float(), rows_NOD.float())
        return self.softcap(logits_NO).masked_fill(option_ids < 0, float("-inf")).softmax(-1)

    def label_rows(self, label_ids: Sequence[int]) -> Tensor:
        """``[L, D]`` float32 rows of ``lm_head``, gathered once so that readout never touches the vocabulary."""
        ids = torch.tensor(label_ids, dtype=torch.long, device=self.lm_head.weight.device)
        return self.lm_head.weight.detach()[ids].float()

    def label_logits(self, hidden_states_ND: Tensor, label_rows_LD: Tensor) -> Tensor:
        """``[N, L]`` float32 logits of every label in every readout row."""
        return self.softcap(hidden_states_ND.float() @ label_rows_LD.T)

    def softcap(self, logits: Tensor) -> Tensor:
        return softcapped(logits, self.final_logit_softcapping)

    def merge_projections(self) -> None:
        """Merge projections of the same input into one matrix product each: inference only, after the weights are final
        and on their device. Names, ``state_dict()`` and saving stay as they are."""
        for module in self.modules():
            if isinstance(module, ForkAttention | ForkGatedDeltaNet | GatedMLP):
                module.merge_projections()

    def allocate_pools(self, *, pages: int, parents: int, slots: int = 1) -> None:
        """Give every mixer its pools. The CUDA kernels need them.

        Args:
            pages: KV pages of each attention layer.
            parents: segments with children that one round may hold: scratch that the recurrent layers share.
            slots: recurrent states of each recurrent layer; slot 0 is the zero state.

        On CUDA a round must keep within these numbers and bring its pages (``TrunkCache``): the kernels do not check
        them.
        """
        scratch: Tensor | None = None
        for module in self.modules():
            if isinstance(module, ForkAttention):
                module.allocate_pools(pages=pages)
            elif isinstance(module, ForkGatedDeltaNet):
                module.allocate_pools(slots=slots, parents=parents, scratch=scratch)
                scratch = module.scratch

    def belong_to(self, owner: object | None) -> None:
        """Be run by ``owner`` alone, who gives the model pools, or, for None, by anyone, without pools. Those of an
        earlier owner are dropped.

        Raises:
            ValueError: it belongs to another one.
        """
        if self.pools_owner is not None and self.pools_owner() is not None:
            raise ValueError("the model belongs to another engine, which reads and writes its pools")
        if self.pools_owner is None and owner is None:
            return
        self.pools_owner = None if owner is None else weakref.ref(owner)
        for module in self.modules():
            for name in ("kv_pool", "state_pool", "conv_pool", "scratch"):
                if isinstance(module, ForkAttention | ForkGatedDeltaNet) and hasattr(module, name):
                    setattr(module, name, None)

    @property
    def kv_bytes_per_token(self) -> int:
        """Device memory of one trunk token's keys and values, in all layers together."""
        layers = [module for module in self.modules() if isinstance(module, ForkAttention)]
        return sum(2 * x.num_kv_heads * x.head_dim * x.k_proj.weight.element_size() for x in layers)

    def check_kernels(self) -> None:
        """See that the CUDA kernels can serve every layer.

        Raises:
            CheckpointError: they cannot, because of the sizes, or of the sizes and the dtype, named.
        """
        dtype = self.lm_head.weight.dtype
        for module in self.modules():
            problem = None
            if isinstance(module, ForkAttention | ForkAttentionReader):
                problem = attention_unsupported(module.head_dim, dtype)
            elif isinstance(module, ForkGatedDeltaNet):
                problem = delta_unsupported(module.key_dim, module.value_dim)
            if problem:
                raise CheckpointError(f"{type(self).__name__} cannot run on CUDA: {problem}")

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the checkpoint's names. The decision head and LoRA adapters are left
        out, and so is a tied ``lm_head``."""
        state = self.state_dict(keep_vars=True)
        tensors = {k: v for k, v in state.items() if not k.startswith("head.") and ".lora_" not in k}
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        return tensors

    def reset_parameters(self) -> None:
        """Initialise in place: each layer its own way, matrices normal with standard deviation 0.02."""
        for module in self.modules():
            if module is self:
                continue
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
                nn.init.normal_(module.weight, std=0.02)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def match(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Pair the model's tensors with a checkpoint's.

        Raises:
            CheckpointError: missing, unexpected or wrongly shaped tensors, named.
        """
        tied = ("lm_head\\.",) if self.config.tie_word_embeddings else ()
        return match_tensors(
            self.checkpoint_tensors(),
            stored,
            renames=self.renames,
            ignored=(*self.ignored, *self.unused_keys(), *tied),
            joined=self.joined,
        )

    def unused_keys(self) -> tuple[str, ...]:
        """Patterns of stored keys that published files hold though a model of this config has no use for them."""
        return ()

    @classmethod
    def on_meta(cls, config: Any) -> Self:
        """The model without storage, for checking shapes before anything is allocated."""
        config = config if isinstance(config, cls.config_class) else cls.config_class.from_hf(config)
        with torch.device("meta"):
            return cls(config)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 on CUDA, float32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def config_fields(config: Any, *, text_key: str = "text_config") -> dict[str, Any]:
    """The text part of a transformers config given as an object or a dict.

    Raises:
        CheckpointError: it is neither.
    """
    fields = config if isinstance(config, dict) else getattr(config, "to_dict", dict)()
    if not isinstance(fields, dict) or not fields:
        raise CheckpointError(f"not a transformers config: {type(config).__name__}")
    text = fields.get(text_key, fields)
    if not isinstance(text, dict):
        raise CheckpointError(f"{text_key} must be an object")
    if fields.get("quantization_config") or text.get("quantization_config"):
        raise CheckpointError("quantized checkpoints are not supported (config.json has a quantization_config)")
    # In multimodal files the top level decides about the tie; the text part's own value can be a mere default.
    tie = {key: fields[key] for key in ("tie_word_embeddings",) if key in fields}
    return {**text, **tie}


def _materialise(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace meta parameters by empty ones (ties stay ties) and move the computed buffers."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        keep = module.float32_names if isinstance(module, KeepFloat32) else ()
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                own = torch.float32 if name in keep else dtype
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=own, device=device))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
