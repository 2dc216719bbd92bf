"""Launch tables: every device has one, and the schedule is cut for it."""

from __future__ import annotations

import logging

import pytest
import torch

from flide.ops.fork_schedule import schedule_inputs
from flide.ops.launch import SM_80, SM_86, SM_90, TABLES, LaunchTable, launch_table, table_of
from flide.runtime import ForkMetadata, TokenTree
from flide.runtime.metadata import PAGE_SIZE


def test_each_capability_has_its_table() -> None:
    assert table_of((9, 0), "H200") is SM_90
    assert table_of((8, 0), "A100") is SM_80
    assert launch_table(torch.device("cpu")) is SM_90


def test_an_unknown_gpu_takes_the_smallest_table_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flide.ops"):
        for _ in range(2):
            assert table_of((99, 1), "Some GPU") is SM_86
    (record,) = caplog.records
    assert "Some GPU (sm_991)" in record.getMessage()
    assert "sm_86" in record.getMessage()


@pytest.mark.parametrize("table", TABLES.values(), ids=map(str, TABLES))
def test_blocks_divide_pages_and_tiles_are_full(table: LaunchTable) -> None:
    for attention in (table.attention_of(256), table.attention_of(512)):
        assert PAGE_SIZE % attention.key_block == 0
        for group, padded in [(1, 1), (2, 2), (4, 4), (6, 8), (8, 8), (16, 16)]:
            assert attention.query_block(group) * padded == attention.tile_rows
        assert attention.query_block(2 * attention.tile_rows) == 1


@pytest.mark.parametrize(("group", "head_dim", "conv_width"), [(1, 256, 4), (6, 256, 4), (6, 512, 1)])
@pytest.mark.parametrize("table", [SM_86, SM_90], ids=["sm_86", "sm_90"])
def test_the_schedule_and_its_fake_agree(
    monkeypatch: pytest.MonkeyPatch, table: LaunchTable, group: int, head_dim: int, conv_width: int
) -> None:
    monkeypatch.setattr("flide.ops.fork_schedule.launch_table", lambda device: table)
    meta = ForkMetadata.pack([TokenTree(tuple(range(300)), (TokenTree((1,) * 70), TokenTree((2,))))])
    inputs = schedule_inputs(meta)
    torch.library.opcheck(torch.ops.flide.fork_schedule, (*inputs, conv_width, group, head_dim))
    tiles = torch.ops.flide.fork_schedule(*inputs, conv_width, group, head_dim)[7]
    assert tiles[1] == table.attention_of(head_dim).query_block(group)
