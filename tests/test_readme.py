"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINKS = re.findall(r"\]\(([^)#]+)\)", "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("*.md")))


@pytest.mark.parametrize("code", PYTHON, ids=[f"example_{i}" for i in range(len(PYTHON))])
def test_python_examples_run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_research_example_is_short() -> None:
    (research,) = [code for code in PYTHON if "ForkMetadata.pack" in code]
    assert len([line for line in research.splitlines() if line.strip()]) <= 15


def test_ci_runs_the_readme_commands() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    command = "python -m pytest -n 2 --dist loadfile"
    assert f"pip install -e '.[test]' && {command}\n" in README
    assert re.search(r"pip install -q -e '\.\[test\]'", ci)
    assert command in ci
    assert "pip install . && flide decide examples/ticket.json" in README


@pytest.mark.parametrize("link", sorted({link for link in LINKS if "://" not in link}))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_map_of_the_code_is_complete() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in (ROOT / "flide").rglob("*.py"):
        relative = path.relative_to(ROOT)
        if path.name in {"__init__.py", "__main__.py", "version.py"} or "ops" in relative.parts:
            continue
        listed = str(relative) in text or (relative.parts[1] == "layers" and path.stem in {"norm", "rotary", "mlp"})
        assert listed, f"{relative} is missing from ARCHITECTURE.md"
