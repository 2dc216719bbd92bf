"""What docs/finetune.md shows is what happens: its blocks run in order, as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow  # .ci/run has it beside the fast tests
def test_the_page_leads_from_tickets_to_answers(tmp_path: Path) -> None:
    """One shell for all blocks, so that a variable set in one is there in the next."""
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    for name, command in (
        ("python", f'exec "{sys.executable}" "$@"'),
        ("flide", f'exec "{sys.executable}" -m flide "$@"'),
    ):
        (bin_directory / name).write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        (bin_directory / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(ROOT / "examples" / "tickets.csv", work)
    script = "set -e\n"
    for language, code in BLOCKS:
        script += code if language == "bash" else f"python - <<'END'\n{code}END\n"
    path = f"{bin_directory}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (work / "tickets-model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "head.json", "calibration.json"} <= written
    assert any((work / "report").glob("*.png"))
    assert (work / "tickets-plain" / "model.safetensors").exists()
    steps = [json.loads(line) for line in (work / "tickets-model" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation" in step for step in steps)
