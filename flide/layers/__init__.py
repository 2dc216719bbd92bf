"""Layers of tree-aware models. They take plain numbers, never a config."""

from flide.layers.attention import ForkAttention, GatedForkAttention, select_rows
from flide.layers.gated_delta import ForkGatedDeltaNet
from flide.layers.mlp import GatedMLP
from flide.layers.norm import GatedRMSNorm, RMSNorm
from flide.layers.residual import add_residual
from flide.layers.rotary import RotaryEmbedding, RotaryTables, apply_rotary

__all__ = [
    "ForkAttention",
    "ForkGatedDeltaNet",
    "GatedForkAttention",
    "GatedMLP",
    "GatedRMSNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryTables",
    "add_residual",
    "apply_rotary",
    "select_rows",
]
