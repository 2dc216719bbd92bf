"""Matrix products without workspaces."""

from __future__ import annotations

import os

import pytest

from flide.runtime.blas import compute_without_workspaces


@pytest.mark.parametrize(("given", "expected"), [(None, ":0:0"), (":4096:8", ":4096:8")])
def test_a_choice_of_the_user_stays(given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")  # what there was comes back in any case
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    compute_without_workspaces()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected
