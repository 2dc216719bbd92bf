"""What a row is reckoned to take is what it takes, or more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flide.runtime import memory

# In a process of its own, whose largest size is that of the round.
MEASURE = """
import torch
from flide import embedded_model_directory
from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata, TokenTree
from flide.runtime.memory import row_bytes

model = Qwen35ForDecision.from_pretrained(embedded_model_directory())
tree = {tree}
meta = ForkMetadata.pack([tree])
def size():  # the largest so far; not getrusage, which counts what the process was before it ran this
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = size()
with torch.inference_mode():
    model(meta.tokens, meta)
print((size() - before) / tree.num_tokens / row_bytes(model))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    ["TokenTree([1] * 29999, (TokenTree([1]),))", "TokenTree([1] * 15000, (TokenTree([1] * 100),) * 150)"],
    ids=["one question", "many questions"],
)
def test_a_row_takes_no_more_than_reckoned(tree: str) -> None:
    command = [sys.executable, "-c", MEASURE.replace("{tree}", tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert 0.4 < float(done.stdout) < 1.0


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    whole = memory.host_memory()  # there is no such file
    for text, expected in ((f"{whole // 2}\n", whole // 2), ("max\n", whole), (f"{10 * whole}\n", whole)):
        limit.write_text(text)
        assert memory.host_memory() == expected
