"""Ops at the GPU boundary. Each has a torch-only schema with its fake, and a reference that is oracle and CPU path."""

from flide.ops.fork_attention import fork_attention, fork_attention_paged
from flide.ops.fork_gated_delta import fork_gated_delta, fork_gated_delta_cached
from flide.ops.fork_schedule import with_schedule

__all__ = [
    "fork_attention",
    "fork_attention_paged",
    "fork_gated_delta",
    "fork_gated_delta_cached",
    "with_schedule",
]
