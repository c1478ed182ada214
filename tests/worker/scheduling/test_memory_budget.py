"""The number of blocks that fit into the memory beside all other needs of an engine."""

from __future__ import annotations

import pytest
from msgspec.structs import fields, replace

from mlxpool.worker.scheduling.memory_budget import MemoryBudget

NAMES = [field.name for field in fields(MemoryBudget)]
NOTHING = MemoryBudget(**dict.fromkeys(NAMES, 0))
BUDGET = replace(NOTHING, limit=1000, weights=300, rows=2, row=50, block=80, head_block=20)


def test_what_is_left_is_divided_into_blocks() -> None:
    """Each block of tokens also needs a block of the prediction head (`head_block`)."""
    assert BUDGET.free_blocks == 6
    assert replace(BUDGET, head_block=0).free_blocks == 7
    assert replace(BUDGET, limit=300).free_blocks == 0


@pytest.mark.parametrize(
    "name", ["weights", "step", "buffers", "process", "draft_model", "spare", "disk", "images"]
)
def test_each_purpose_takes_its_bytes(name: str) -> None:
    more = replace(BUDGET, **{name: getattr(BUDGET, name) + 200})
    assert more.free_blocks == BUDGET.free_blocks - 2


@pytest.mark.parametrize(("reserved", "blocks"), [(0, 6), (1, 5), (240, 3), (400, 2), (10_000, 2)])
def test_a_whole_context_fits_whatever_is_reserved(reserved: int, blocks: int) -> None:
    assert replace(BUDGET, reserved=reserved).blocks_for(2 * 256) == blocks


def test_the_error_names_every_purpose_that_takes_something() -> None:
    numbers = {name: 10**6 + place for place, name in enumerate(NAMES)}
    full = MemoryBudget(**numbers)
    message = full.too_few(1)
    for name in ("limit", "weights", "step", "buffers", "process", "rows", "images", "draft_model"):
        assert str(numbers[name]) in message
    assert str(full.spare + full.rows * full.row) in message
    assert "leaves 1 blocks" in message and "at least 2 are needed" in message
    assert "images" not in BUDGET.too_few(1) and "draft" not in BUDGET.too_few(1)
