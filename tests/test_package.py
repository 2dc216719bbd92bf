"""The package as an importer and a packager see it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import flide
import flide.evaluation
from flide.evaluation.report import answer_rows
from flide.evaluation.rows import read_rows
from flide.runtime.engine import embedded_model_directory
from flide.runtime.tokenizer import PromptTokenizer

ROOT = Path(__file__).parents[1]
# ``flide-torch`` is ours; the bare name on the index is another project.
INSTALL_BARE_NAME = re.compile(r"(pip|uv|poetry|conda)\s+(install|add)\s+(-\S+\s+)*['\"]?flide(?!-torch)\b")


def test_all_names_exist_and_are_sorted() -> None:
    assert flide.__all__ == sorted(flide.__all__, key=lambda name: (not name[0].isupper(), name))
    for name in flide.__all__:
        assert getattr(flide, name) is not None


@pytest.mark.parametrize(
    "module",
    ["flide.evaluation", "flide.heads", "flide.models", "flide.layers", "flide.ops", "flide.runtime", "flide.train"],
)
def test_submodules_say_what_is_public(module: str) -> None:
    imported = __import__(module, fromlist=["__all__"])
    assert all(hasattr(imported, name) for name in imported.__all__)


def test_import_needs_neither_server_nor_trainer_nor_triton() -> None:
    code = """
import sys
blocked = ("triton", "fastapi", "uvicorn", "starlette", "accelerate", "matplotlib", "flide.serve", "flide.train")
sys.modules.update(dict.fromkeys(blocked))  # None: importing it raises, looking for it finds nothing
import flide
with flide.Engine.default(flide.EngineConfig(device="cpu")) as engine:
    request = flide.DecisionRequest("s", {"q": flide.Noul("?")})
    assert 0 <= engine.decide([request])[0]["q"].value <= 1
assert all(sys.modules[name] is None for name in blocked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_import_is_light_and_silent() -> None:
    code = "import sys, flide; assert 'transformers' not in sys.modules, 'transformers is imported with flide'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from flide.cli import main
try:
    main(["--help"])
except SystemExit as stop:
    assert not stop.code
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "decide" in done.stdout


def test_unknown_names_are_attribute_errors_and_known_ones_are_listed() -> None:
    for module in (flide, flide.evaluation):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = module.nothing
    assert set(flide.__all__) <= set(dir(flide))


def test_the_logger_is_quiet_by_default() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("flide").handlers)


def test_the_package_is_typed_and_named() -> None:
    assert (ROOT / "flide" / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "flide-torch"
    assert set(project["optional-dependencies"]) >= {"serve", "train", "eval", "bench", "test"}


def test_the_embedded_model_is_small_whole_and_described() -> None:
    shipped = embedded_model_directory()
    names = {"MODEL_CARD.md", "calibration.json", "chat_template.jinja", "config.json"}
    names |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in shipped.iterdir()} == names
    assert sum(file.stat().st_size for file in shipped.iterdir()) <= 16 << 20
    tensors = load_file(shipped / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) <= 8_000_000
    assert {tensor.dtype for tensor in tensors.values()} <= {torch.bfloat16, torch.float32}
    assert PromptTokenizer.from_pretrained(shipped).num_labels() == 255


def test_the_embedded_model_answers_texts_written_by_hand() -> None:
    """What its card says of them."""
    rows, errors = read_rows(ROOT / "examples" / "demo_cases.jsonl")
    assert not errors
    with flide.Engine.default(flide.EngineConfig(device="cpu")) as engine:
        answers = answer_rows(engine, rows)
    right = sum(np.argmax(answer.probabilities) == np.argmax(answer.target) for answer in answers)
    card = (embedded_model_directory() / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"it answers {right} right" in card
    assert right >= 0.85 * len(answers)


def test_nothing_tells_people_to_install_the_other_project() -> None:
    texts = [
        p for p in ROOT.rglob("*") if p.suffix in {".md", ".py", ".toml", ".yml", ".sh"} and ".venv" not in p.parts
    ]
    assert len(texts) > 20
    guilty = [str(p) for p in texts if INSTALL_BARE_NAME.search(p.read_text(encoding="utf-8"))]
    assert guilty == []
