"""What docs/add-an-architecture.md shows is what happens: its parts are the example, and its blocks run in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from examples.custom_architecture import olmo_hybrid
from flide.models.auto import ENTRY_POINTS, family_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-an-architecture.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)( [\w.]+)?\n(.*?)```", PAGE, re.DOTALL)
PARTS = [code for _, file, code in BLOCKS if file == " olmo_hybrid.py"]


def test_the_page_builds_the_example() -> None:
    example = Path(olmo_hybrid.__file__).read_text(encoding="utf-8")
    assert "\n\n".join(PARTS) == example
    assert {language for language, *_ in BLOCKS} == {"python", "bash", "toml"}


def test_the_example_is_right_and_answers(tmp_path: Path) -> None:
    """One shell for all blocks that are no parts of the file."""
    (tmp_path / "olmo_hybrid.py").write_text("\n\n".join(PARTS), encoding="utf-8")
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    for name, command in (("python", ""), ("flide", " -m flide")):
        (bin_directory / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n', encoding="utf-8")
        (bin_directory / name).chmod(0o755)
    script = "set -e\n"
    for language, file, code in BLOCKS:
        if language != "toml" and not file:
            script += code if language == "bash" else f"python - <<'END'\n{code}END\n"
    path = f"{bin_directory}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    parity, answer = done.stdout.splitlines()
    assert parity.startswith("OlmoHybridForDecision: ")
    assert 0 < json.loads(answer)["answers"]["damaged"]["noul"] < 1


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)):
        assert (ROOT / "docs" / link).exists(), link


def test_entry_points_are_the_names_that_are_registered() -> None:
    (project,) = [tomllib.loads(code)["project"] for language, _, code in BLOCKS if language == "toml"]
    for name, target in project["entry-points"][ENTRY_POINTS].items():
        assert target == f"olmo_hybrid:{family_of({'model_type': name}).__name__}"
