"""One model directory and the tokenizers in it, for all tests that only read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_tokenizer import write_model_directory


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tok(directory: Path) -> PromptTokenizer:
    return PromptTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def hf(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
