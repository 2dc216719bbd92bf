"""Gemma 4 (E2B, E4B, 12B, 31B): sliding-window attention layers, and after every few of them one of full attention.

Reads top to bottom: config, attention, MLP, layer, model. Parameter names are the checkpoint's own.
Shapes: T stream rows, Q query rows, N readout rows, D hidden size, L layers, E size of a per-layer embedding.

In E2B and E4B the last layers have no keys and values of their own: they read those of the last layer of their type
that *writes* any. Behind the last writer nothing but the readout rows is ever read, so nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from flide.errors import CheckpointError
from flide.layers import (
    ForkAttention,
    ForkAttentionReader,
    GatedMLP,
    KeyValue,
    RMSNorm,
    RotaryEmbedding,
    RotaryTables,
    ScaledEmbedding,
)
from flide.layers.attention import select_rows
from flide.layers.residual import add_residual
from flide.models.auto import register
from flide.models.config import ConfigReader
from flide.models.decision import ForDecision, config_fields
from flide.ops.fork_schedule import with_schedule
from flide.runtime.metadata import ForkMetadata

FULL, SLIDING = "full_attention", "sliding_attention"
PERIOD = 6  # layers from one of full attention to the next, where a config does not say
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """Numbers of a dense Gemma 4 text model, under transformers' names. ``global`` is said of full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int = 262144
    rope_theta: float
    global_rope_theta: float
    partial_rotary_factor: float
    final_logit_softcapping: float | None
    rms_norm_eps: float
    tie_word_embeddings: bool = True
    max_position_embeddings: int

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        fields = _with_global_sizes(config_fields(config))
        read = ConfigReader(fields, "Gemma 4 config")
        if fields.get("enable_moe_block"):
            raise CheckpointError("Gemma 4 config: enable_moe_block (26B-A4B, a mixture of experts) is not supported")
        read.only("hidden_activation", "gelu_pytorch_tanh")
        read.only("attention_bias", False)
        if fields.get("use_bidirectional_attention") != "vision":  # which is causal for text
            read.only("use_bidirectional_attention", None)
        read.divides("num_key_value_heads", "num_attention_heads")
        read.divides("num_global_key_value_heads", "num_attention_heads")
        for key in ("head_dim", "global_head_dim"):
            if read.size(key) % 2:
                raise CheckpointError(f"Gemma 4 config: {key} must be even")
        default = [SLIDING if (i + 1) % PERIOD else FULL for i in range(read.size("num_hidden_layers"))]
        # transformers makes the last layer one of full attention, whatever the config says.
        layer_types = (*read.layer_types((SLIDING, FULL), default)[:-1], FULL)
        num_shared = read.count("num_kv_shared_layers", 0)
        if num_shared >= len(layer_types) or set(layer_types) != set(layer_types[: len(layer_types) - num_shared]):
            raise CheckpointError(f"Gemma 4 config: num_kv_shared_layers={num_shared} leaves no layer to read from")
        is_unified = str(fields.get("model_type")).startswith("gemma4_unified")
        per_layer = read.count("hidden_size_per_layer_input", 0 if is_unified else 256)
        if per_layer and read.size("vocab_size_per_layer_input", 262144) < read.size("vocab_size"):
            raise CheckpointError("Gemma 4 config: vocab_size_per_layer_input must not be less than vocab_size")
        ropes = ConfigReader(read.section("rope_parameters"), "Gemma 4 config: rope_parameters")
        sliding, full = (_rope(ropes, kind) for kind in (SLIDING, FULL))
        partial = full.number("partial_rotary_factor", 1.0)
        if partial > 1:
            raise CheckpointError("Gemma 4 config: partial_rotary_factor must be at most 1")
        softcap = fields.get("final_logit_softcapping")
        return read.fill(
            cls,
            layer_types=layer_types,
            num_kv_shared_layers=num_shared,
            hidden_size_per_layer_input=per_layer,
            rope_theta=sliding.number("rope_theta"),
            global_rope_theta=full.number("rope_theta"),
            partial_rotary_factor=partial,
            final_logit_softcapping=None if softcap is None else read.number("final_logit_softcapping"),
        )

    def to_hf(self) -> dict[str, Any]:
        fields = asdict(self)
        partial, theta = fields.pop("partial_rotary_factor"), fields.pop("global_rope_theta")
        rope = {
            SLIDING: {**ROPE[SLIDING], "rope_theta": fields.pop("rope_theta")},
            FULL: {**ROPE[FULL], "rope_theta": theta, "partial_rotary_factor": partial},
        }
        return {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "num_hidden_layers": len(self.layer_types),
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "enable_moe_block": False,
            "rope_parameters": rope,
            **fields,
        }


def _with_global_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with RoPE parameters, and with the sizes of full attention under the names of published files.

    Files of newer versions of transformers have these sizes as exceptions of single layers instead:
    ``{"5": {"head_dim": 512, "num_key_value_heads": 1}, ...}``.
    """
    found = {**fields, "rope_parameters": fields.get("rope_parameters") or ROPE}
    heads, layers = fields.get("num_key_value_heads"), fields.get("per_layer_config")
    if layers is None:
        # The other number of heads belongs to projections that give keys and values.
        given = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
        return {"global_head_dim": 512, **found, "num_global_key_value_heads": heads if given is None else given}
    types = fields.get("layer_types")
    full = {str(i) for i, kind in enumerate(types) if kind == FULL} if isinstance(types, list | tuple) else set()
    sizes: list[Any] = list(layers.values()) if isinstance(layers, Mapping) and set(map(str, layers)) == full else []
    known = {"head_dim", "num_key_value_heads"}
    if not sizes or not all(isinstance(size, Mapping) and size == sizes[0] and set(size) <= known for size in sizes):
        raise CheckpointError(
            "Gemma 4 config: per_layer_config must give the layers of full attention, and no others, one head_dim and"
            " num_key_value_heads"
        )
    found["global_head_dim"] = sizes[0].get("head_dim", fields.get("head_dim"))
    return {**found, "num_global_key_value_heads": sizes[0].get("num_key_value_heads", heads)}


def _rope(ropes: ConfigReader, kind: str) -> ConfigReader:
    rope = ConfigReader(ropes.section(kind), f"{ropes.name}: {kind}")
    rope.only("rope_type", ROPE[kind]["rope_type"])
    rope.only("factor", 1.0)
    return rope


class Gemma4Attention(ForkAttention):
    """Differences from ForkAttention:

    * queries, keys and values pass an RMSNorm per head (keys and queries before rotation, values without a weight);
    * scores are not scaled;
    * it hands on its keys and values.
    """

    def __init__(self, config: Gemma4Config, layer_type: str) -> None:
        is_full = layer_type == FULL
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_global_key_value_heads if is_full else config.num_key_value_heads,
            config.global_head_dim if is_full else config.head_dim,
            scale=1.0,
            window=0 if is_full else config.sliding_window,
            value_proj=not (is_full and config.attention_k_eq_v),
        )
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.v_norm = RMSNorm(self.head_dim, config.rms_norm_eps, elementwise_affine=False)

    def mix(
        self, hidden_states_TD: Tensor, rotary: RotaryTables, meta: ForkMetadata, query_rows: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        """What ``forward`` gives, and the keys and values for layers that read them."""
        query, key_TMH, value_TMH = self.project(hidden_states_TD, query_rows)
        query_QNH = rearrange(query, "q (n h) -> q n h", h=self.head_dim)
        key_value = self.key_value(key_TMH, value_TMH, rotary)
        return self.o_proj(self.attend_to(query_QNH, key_value, rotary, meta, query_rows).flatten(1)), key_value


class Gemma4AttentionReader(ForkAttentionReader):
    """Differences from ForkAttentionReader: queries pass an RMSNorm per head before rotation, scores are not scaled."""

    def __init__(self, config: Gemma4Config, layer_type: str) -> None:
        is_full = layer_type == FULL
        head_dim, window = (config.global_head_dim, 0) if is_full else (config.head_dim, config.sliding_window)
        super().__init__(config.hidden_size, config.num_attention_heads, head_dim, scale=1.0, window=window)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)


class Gemma4MLP(GatedMLP):
    """Differences from GatedMLP: the activation is GELU, approximated by tanh."""

    def activate(self, gate_TI: Tensor) -> Tensor:
        return F.gelu(gate_TI, approximate="tanh")


class Gemma4Layer(nn.Module):
    """Residual block: attention, MLP and per-layer input (where there is one), each between norms; then a scale.

    Args:
        config: of the model.
        index: of the layer. The last ``num_kv_shared_layers`` read keys and values of layers before them.
    """

    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__()
        self.is_reader = index >= len(config.layer_types) - config.num_kv_shared_layers
        attention = Gemma4AttentionReader if self.is_reader else Gemma4Attention
        self.self_attn = attention(config, config.layer_types[index])
        is_wide = self.is_reader and config.use_double_wide_mlp
        self.mlp = Gemma4MLP(config.hidden_size, config.intermediate_size * (2 if is_wide else 1))
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        if config.hidden_size_per_layer_input:
            self.per_layer_input_gate = nn.Linear(size, config.hidden_size_per_layer_input, bias=False)
            self.per_layer_projection = nn.Linear(config.hidden_size_per_layer_input, size, bias=False)
            self.post_per_layer_input_norm = RMSNorm(size, eps)
        self.layer_scalar = nn.Parameter(torch.empty(1))

    def forward(
        self,
        hidden_states: Tensor,
        per_layer_QE: Tensor | None,
        rotary: RotaryTables,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
        key_value: KeyValue | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """The hidden states ``[Q, D]`` of all stream rows, or of ``query_rows`` only, and the keys and values used.

        Args:
            hidden_states: ``[T, D]``; of a reader those of the query rows, ``[Q, D]``.
            per_layer_QE: embeddings of this layer, if the model has any.
            rotary: tables of the rows of ``hidden_states``.
            query_rows: ``[Q]`` int32.
            key_value: what a reader reads.
        """
        normed = self.input_layernorm(hidden_states)
        if isinstance(self.self_attn, Gemma4Attention):
            mixed_QD, key_value = self.self_attn.mix(normed, rotary, meta, query_rows)
            x_QD = select_rows(hidden_states, query_rows)
        else:
            assert key_value is not None
            mixed_QD, x_QD = self.self_attn(normed, rotary, key_value, meta, query_rows), hidden_states
        x_QD = add_residual(x_QD, self.post_attention_layernorm(mixed_QD))
        x_QD = add_residual(x_QD, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_QD))))
        if per_layer_QE is not None:
            gated_QE = F.gelu(self.per_layer_input_gate(x_QD), approximate="tanh") * per_layer_QE
            x_QD = add_residual(x_QD, self.post_per_layer_input_norm(self.per_layer_projection(gated_QE)))
        return x_QD * self.layer_scalar, key_value

    def reset_parameters(self) -> None:
        nn.init.ones_(self.layer_scalar)


class Gemma4Model(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        size, num_layers = config.hidden_size, len(config.layer_types)
        self.layer_types = config.layer_types
        self.last_writer = num_layers - config.num_kv_shared_layers - 1
        heads = config.num_attention_heads
        self.heads = {
            SLIDING: {"group": heads // config.num_key_value_heads, "head_dim": config.head_dim},
            FULL: {"group": heads // config.num_global_key_value_heads, "head_dim": config.global_head_dim},
        }
        self.embed_tokens = ScaledEmbedding(config.vocab_size, size, size**0.5)
        self.layers = nn.ModuleList(Gemma4Layer(config, index) for index in range(num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.global_rotary = RotaryEmbedding(
            config.global_head_dim,
            config.global_rope_theta,
            num_frequencies=int(config.partial_rotary_factor * config.global_head_dim // 2),
        )
        self.per_layer_size = config.hidden_size_per_layer_input
        if self.per_layer_size:
            # The table (4.7 GB of E2B) lies with the other weights. Rows of it are needed once a stream: it could stay
            # in host memory, if they were gathered before a graph is replayed.
            width = num_layers * self.per_layer_size
            self.embed_tokens_per_layer = ScaledEmbedding(
                config.vocab_size_per_layer_input, width, self.per_layer_size**0.5
            )
            self.per_layer_model_projection = nn.Linear(size, width, bias=False)
            self.per_layer_projection_norm = RMSNorm(self.per_layer_size, config.rms_norm_eps)

    def forward(self, tokens_T: Tensor, meta: ForkMetadata, *, selective_readout: bool = True) -> Tensor:
        """Final hidden states ``[N, D]``; from the last layer that writes keys and values on, nothing is computed but
        what the readout rows need."""
        metas = {kind: with_schedule(meta, **heads) for kind, heads in self.heads.items()}
        rotary = {SLIDING: self.rotary(meta.positions), FULL: self.global_rotary(meta.positions)}
        rows = meta.readout_rows if selective_readout else None
        x = self.embed_tokens(tokens_T)
        per_layer = self.per_layer_inputs(tokens_T, x, rows)
        written: dict[str, KeyValue] = {}
        layers = list(zip(self.layer_types, self.layers, strict=True))
        for (kind, layer), per_layer_TE in zip(layers[: self.last_writer], per_layer, strict=False):
            x, written[kind] = layer(x, per_layer_TE, rotary[kind], metas[kind])

        kind, layer = layers[self.last_writer]
        x, written[kind] = layer(x, per_layer[self.last_writer], rotary[kind], metas[kind], rows)
        rotary = {kind: tables.select(rows) for kind, tables in rotary.items()}
        left = self.last_writer + 1
        for (kind, layer), per_layer_QE in zip(layers[left:], per_layer[left:], strict=True):
            x, _ = layer(x, per_layer_QE, rotary[kind], metas[kind], rows, written[kind])
        normed_ND: Tensor = self.norm(x if selective_readout else select_rows(x, meta.readout_rows))
        return normed_ND

    def per_layer_inputs(self, tokens_T: Tensor, x_TD: Tensor, rows: Tensor | None) -> Sequence[Tensor | None]:
        """Of every layer, an embedding of the token and a projection of what the first layer is given: ``[T, E]`` of
        layers before the last writer, then ``[Q, E]`` of ``rows``."""
        if not self.per_layer_size:
            return [None] * len(self.layers)
        early, late = slice(self.last_writer), slice(self.last_writer, None)
        selected = select_rows(tokens_T, rows), select_rows(x_TD, rows)
        return [*self._per_layer_inputs(tokens_T, x_TD, early), *self._per_layer_inputs(*selected, late)]

    def _per_layer_inputs(self, tokens_T: Tensor, x_TD: Tensor, layers: slice) -> Sequence[Tensor]:
        """``[T, E]`` of some layers."""
        columns = slice(*(None if i is None else i * self.per_layer_size for i in (layers.start, layers.stop)))
        projection = self.per_layer_model_projection
        if type(projection) is nn.Linear:
            projected = F.linear(x_TD, projection.weight[columns])
        else:  # an adapter has no weight of its own
            projected = projection(x_TD)[:, columns]
        embedded: Tensor = self.embed_tokens_per_layer(tokens_T)[:, columns]
        shape = x_TD.shape[0], -1, self.per_layer_size
        projected_TLE = (projected * x_TD.shape[-1] ** -0.5).reshape(shape)
        inputs_TLE: Tensor = (self.per_layer_projection_norm(projected_TLE) + embedded.reshape(shape)) * 2**-0.5
        return inputs_TLE.unbind(1)


@register(
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
)
class Gemma4ForDecision(ForDecision):
    """Dense Gemma 4 of every size, text part only."""

    config_class = Gemma4Config
    model_class = Gemma4Model
    config: Gemma4Config
    model: Gemma4Model
    renames = ((r"^model\.language_model\.", "model."),)
    ignored = (r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\.",)

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.final_logit_softcapping = config.final_logit_softcapping

    def unused_keys(self) -> tuple[str, ...]:
        """Published files hold keys and values for layers that read those of others."""
        readers = "|".join(str(index) for index, layer in enumerate(self.model.layers) if layer.is_reader)
        return (rf"model\.(language_model\.)?layers\.({readers})\.self_attn\.[kv]_(proj|norm)\.",) if readers else ()


__all__ = ["Gemma4Config", "Gemma4ForDecision"]
