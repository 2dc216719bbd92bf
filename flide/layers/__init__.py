"""Layers of tree-aware models. They take plain numbers, never a config."""

from flide.layers.attention import ForkAttention, ForkAttentionReader, GatedForkAttention, KeyValue
from flide.layers.embedding import ScaledEmbedding
from flide.layers.gated_delta import DeltaNetNames, ForkGatedDeltaNet
from flide.layers.mlp import GatedMLP
from flide.layers.norm import GatedRMSNorm, RMSNorm
from flide.layers.rotary import RotaryEmbedding, RotaryTables, apply_rotary

__all__ = [
    "DeltaNetNames",
    "ForkAttention",
    "ForkAttentionReader",
    "ForkGatedDeltaNet",
    "GatedForkAttention",
    "GatedMLP",
    "GatedRMSNorm",
    "KeyValue",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryTables",
    "ScaledEmbedding",
    "apply_rotary",
]
