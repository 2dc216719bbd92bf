"""Checkpoints of states, from which later requests resume."""
