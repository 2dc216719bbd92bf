"""Qwen3.5 (and 3.6, 3.8: the same model type): three Gated DeltaNet layers, then one gated full-attention layer.

Reads top to bottom: config, attention, layer, model. Parameter names are the checkpoint's own.
Shapes: T stream rows, Q query rows, N readout rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import Tensor, nn

from flide.errors import CheckpointError
from flide.layers import ForkGatedDeltaNet, GatedForkAttention, GatedMLP, RMSNorm, RotaryEmbedding, RotaryTables
from flide.layers.attention import select_rows
from flide.layers.residual import add_residual
from flide.models.auto import register
from flide.models.config import ConfigReader
from flide.models.decision import ForDecision, config_fields
from flide.ops.fork_schedule import with_schedule
from flide.runtime.metadata import ForkMetadata

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen35Config:
    """Numbers of a dense Qwen3.5 text model, under transformers' names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, int, int] | None
    rms_norm_eps: float
    tie_word_embeddings: bool = False
    max_position_embeddings: int

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        fields = config_fields(config)
        read = ConfigReader(fields, "Qwen3.5 config")
        read.only("hidden_act", "silu")
        read.only("attention_bias", False)
        read.only("attn_output_gate", True)
        read.only("rope_scaling", None)  # the old name of rope_parameters; transformers lets it win
        read.divides("num_key_value_heads", "num_attention_heads")
        read.divides("linear_num_key_heads", "linear_num_value_heads")
        num_layers, period = read.size("num_hidden_layers"), 4
        if fields.get("layer_types") is None:
            period = read.size("full_attention_interval", period)
        layer_types = [LINEAR if (i + 1) % period else FULL for i in range(num_layers)]
        rope = read.section("rope_parameters")
        for key in ("rope_type", "type"):
            ConfigReader(rope, "Qwen3.5 config: rope_parameters").only(key, "default")
        # Some files say it beside the rope parameters; transformers' own default is 0.25.
        partial = read.number("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25), fields=rope)
        rotary_dim = int(read.size("head_dim") * partial)
        section = rope.get("mrope_section")
        if section is not None and not (
            isinstance(section, list | tuple)
            and len(section) == 3
            and all(isinstance(n, int) and n >= 0 for n in section)
            and sum(section) <= rotary_dim // 2
        ):
            raise CheckpointError("Qwen3.5 config: mrope_section must be three counts within the rotary frequencies")
        if not 0 < rotary_dim <= read.size("head_dim") or rotary_dim % 2:
            raise CheckpointError(f"Qwen3.5 config: {rotary_dim} rotary dims of head_dim {read.size('head_dim')}")
        return read.fill(
            cls,
            layer_types=read.layer_types((FULL, LINEAR), layer_types),
            rope_theta=read.number("rope_theta", fields=rope),
            partial_rotary_factor=partial,
            mrope_section=None if section is None else (section[0], section[1], section[2]),
        )

    def to_hf(self) -> dict[str, Any]:
        fields = asdict(self)
        rope = {"rope_type": "default", "mrope_interleaved": True}
        rope |= {name: fields.pop(name) for name in ("rope_theta", "partial_rotary_factor", "mrope_section")}
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "num_hidden_layers": len(self.layer_types),
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_parameters": {name: value for name, value in rope.items() if value is not None},
            **fields,
        }


class Qwen35Attention(GatedForkAttention):
    """Differences from GatedForkAttention:

    * queries and keys pass a zero-centred RMSNorm per head before rotation.
    """

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, offset=1.0)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, offset=1.0)


class Qwen35Layer(nn.Module):
    """Pre-norm residual block: mixer, then MLP."""

    def __init__(self, config: Qwen35Config, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        if layer_type == FULL:
            self.self_attn = Qwen35Attention(config)
        else:
            self.linear_attn = ForkGatedDeltaNet(
                config.hidden_size,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
                conv_width=config.linear_conv_kernel_dim,
                eps=config.rms_norm_eps,
            )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)

    def forward(
        self,
        hidden_states_TD: Tensor,
        rotary: RotaryTables,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """``[T, D]`` -> ``[T, D]``, or ``[Q, D]`` of the query rows only."""
        mixer = self.self_attn if self.layer_type == FULL else self.linear_attn
        mixed_QD = mixer(self.input_layernorm(hidden_states_TD), rotary, meta, query_rows)
        hidden_states_QD = add_residual(select_rows(hidden_states_TD, query_rows), mixed_QD)
        return add_residual(hidden_states_QD, self.mlp(self.post_attention_layernorm(hidden_states_QD)))


class Qwen35Model(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        self.conv_width = config.linear_conv_kernel_dim
        self.group, self.head_dim = config.num_attention_heads // config.num_key_value_heads, config.head_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen35Layer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.rotary = RotaryEmbedding(
            int(config.head_dim * config.partial_rotary_factor), config.rope_theta, sections=config.mrope_section
        )

    def forward(self, tokens_T: Tensor, meta: ForkMetadata, *, selective_readout: bool = True) -> Tensor:
        """Final hidden states ``[N, D]``; the last layer computes nothing but what its readout rows need."""
        meta = with_schedule(meta, conv_width=self.conv_width, group=self.group, head_dim=self.head_dim)
        rotary = self.rotary(meta.positions)
        hidden_states = self.embed_tokens(tokens_T)
        for layer in self.layers[:-1]:
            hidden_states = layer(hidden_states, rotary, meta)
        if selective_readout:
            hidden_states = self.layers[-1](hidden_states, rotary, meta, query_rows=meta.readout_rows)
        else:
            hidden_states = select_rows(self.layers[-1](hidden_states, rotary, meta), meta.readout_rows)
        normed_ND: Tensor = self.norm(hidden_states)
        return normed_ND


@register("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text")
class Qwen35ForDecision(ForDecision):
    """Dense Qwen3.5, 3.6 and 3.8 of every size, text part only."""

    config_class = Qwen35Config
    model_class = Qwen35Model
    config: Qwen35Config
    model: Qwen35Model
    renames = ((r"^model\.language_model\.", "model."),)
    ignored = (r"mtp\.", r"model\.visual\.", r"score\.")


__all__ = ["Qwen35Config", "Qwen35ForDecision"]
