"""``python -m flide``."""

from flide.cli import run

run()
