"""OLMo Hybrid: three Gated DeltaNet layers, then one attention layer, which in the released model knows no positions.

A family in one file outside of Flide: once it is imported (``flide decide --import FILE``), such checkpoints load.
docs/add-an-architecture.md builds it step by step. Parameter names are those of transformers.
Shapes: T stream rows, Q query rows, D hidden size, N heads, H head dim.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import Tensor, nn

from flide.layers import DeltaNetNames, ForkAttention, ForkGatedDeltaNet, GatedMLP, RMSNorm, RotaryEmbedding
from flide.layers.attention import select_rows
from flide.layers.residual import add_residual
from flide.models import ConfigReader, ForDecision, config_fields, register
from flide.ops import with_schedule
from flide.runtime import ForkMetadata

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig:
    """Numbers of the model under transformers' names; without a rope_theta, attention knows no positions."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True
    rope_theta: float | None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        fields = config_fields(config)
        read = ConfigReader(fields, "OLMo Hybrid config")
        read.only("hidden_act", "silu")
        read.only("attention_bias", False)
        read.divides("num_attention_heads", "hidden_size")
        read.divides("num_key_value_heads", "num_attention_heads")
        read.divides("linear_num_key_heads", "linear_num_value_heads")
        rope = fields.get("rope_parameters") or {}
        ConfigReader(rope, "OLMo Hybrid config: rope_parameters").only("rope_type", "default")
        theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
        theta = None if theta is None else read.number("rope_theta", theta, fields=rope)
        return read.fill(cls, layer_types=read.layer_types((FULL, LINEAR)), rope_theta=theta)

    def to_hf(self) -> dict[str, Any]:
        fields = asdict(self)
        rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
        names = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "pad_token_id": None}
        return {**names, "num_hidden_layers": len(self.layer_types), "rope_parameters": rope, **fields}


class AllHeadsNorm(RMSNorm):
    """Differences from RMSNorm: all heads of a row are normed as one."""

    def forward(self, x_TNH: Tensor) -> Tensor:
        return super().forward(x_TNH.flatten(1)).view_as(x_TNH)


class OlmoHybridAttention(ForkAttention):
    """Differences from ForkAttention: queries and keys pass a norm over all heads, before rotation if there is one."""

    def __init__(self, config: OlmoHybridConfig) -> None:
        head_dim = config.hidden_size // config.num_attention_heads
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim)
        self.q_norm = AllHeadsNorm(config.num_attention_heads * head_dim, config.rms_norm_eps)
        self.k_norm = AllHeadsNorm(config.num_key_value_heads * head_dim, config.rms_norm_eps)


class OlmoHybridDeltaNet(ForkGatedDeltaNet):
    """Differences from ForkGatedDeltaNet: names, q, k and v projected apart, an epsilon of its own, a doubled beta."""

    names = DeltaNetNames(("q_proj", "k_proj", "v_proj"), "g_proj", "b_proj", "a_proj", norm="o_norm", out="o_proj")

    def __init__(self, config: OlmoHybridConfig) -> None:
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        dims = config.linear_key_head_dim, config.linear_value_head_dim
        scale, width = 2.0 if config.linear_allow_neg_eigval else 1.0, config.linear_conv_kernel_dim
        super().__init__(config.hidden_size, *heads, *dims, conv_width=width, eps=1e-5, beta_scale=scale)


class OlmoHybridLayer(nn.Module):
    """A residual block: attention layers norm what mixer and MLP give, the others what they take."""

    def __init__(self, config: OlmoHybridConfig, layer_type: str) -> None:
        super().__init__()
        self.is_full, norm = layer_type == FULL, (config.hidden_size, config.rms_norm_eps)
        if self.is_full:
            self.self_attn, self.post_feedforward_layernorm = OlmoHybridAttention(config), RMSNorm(*norm)
        else:
            self.linear_attn, self.input_layernorm = OlmoHybridDeltaNet(config), RMSNorm(*norm)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(*norm)

    def forward(self, x_TD: Tensor, rotary: Any, meta: ForkMetadata, query_rows: Tensor | None = None) -> Tensor:
        x_QD = select_rows(x_TD, query_rows)
        if self.is_full:
            mixed_QD = self.self_attn(x_TD, rotary, meta, query_rows)
            x_QD = add_residual(x_QD, self.post_attention_layernorm(mixed_QD))
            return add_residual(x_QD, self.post_feedforward_layernorm(self.mlp(x_QD)))
        x_QD = add_residual(x_QD, self.linear_attn(self.input_layernorm(x_TD), None, meta, query_rows))
        return add_residual(x_QD, self.mlp(self.post_attention_layernorm(x_QD)))


class OlmoHybridModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: OlmoHybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OlmoHybridLayer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        head_dim = config.hidden_size // config.num_attention_heads
        self.heads = {"group": config.num_attention_heads // config.num_key_value_heads, "head_dim": head_dim}
        self.rotary = None if config.rope_theta is None else RotaryEmbedding(head_dim, config.rope_theta)

    def forward(self, tokens_T: Tensor, meta: ForkMetadata, *, selective_readout: bool = True) -> Tensor:
        meta = with_schedule(meta, conv_width=self.config.linear_conv_kernel_dim, **self.heads)
        rotary = None if self.rotary is None else self.rotary(meta.positions)
        x_TD = self.embed_tokens(tokens_T)
        for layer in self.layers[:-1]:
            x_TD = layer(x_TD, rotary, meta)
        if selective_readout:
            return self.norm(self.layers[-1](x_TD, rotary, meta, meta.readout_rows))
        return self.norm(select_rows(self.layers[-1](x_TD, rotary, meta), meta.readout_rows))


@register("OlmoHybridForCausalLM", "olmo_hybrid")
class OlmoHybridForDecision(ForDecision):
    """OLMo Hybrid of every size."""

    config_class, model_class = OlmoHybridConfig, OlmoHybridModel
    # Files, those that transformers writes included, have other names for norms and hold convolutions in parts.
    renames = (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))
    joined = (("conv1d", ("q_conv1d", "k_conv1d", "v_conv1d")),)
