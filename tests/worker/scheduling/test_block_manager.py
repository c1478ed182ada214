"""Tests which sequences get KV blocks, wait or are refused; shared blocks count once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.block_manager import (
    BlockManager,
    blocks_for_step,
    blocks_to_admit,
    blocks_to_finish,
)
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.sequence import Phase, Sequence


def sequence(prompt: int = 10, ids: int = 0, max_tokens: int = 10) -> Sequence:
    given = list(range(ids))
    return Sequence(
        b"", 1, tuple(range(prompt)), Options(), 0, max_tokens, given, phase=Phase.RUNNING
    )


@dataclass
class Memory:
    """A fake prefix cache that only counts its blocks, and shares none with KV rows.

    `begun_from`: the number of blocks of cached prefixes from which running rows were filled.
    `idle`: the number of blocks of prefixes that are not in use.
    """

    idle: int = 0
    begun_from: int = 0
    restored: int = 0  # restored from the disk, for waiting sequences
    evicted: int = 0

    def blocks_in_use(self) -> int:
        return self.idle + self.begun_from + self.restored

    def blocks_of(self, seq: Sequence) -> int:
        return 0

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        freed = min(blocks, self.idle)
        self.idle -= freed
        if in_use and freed < blocks:
            freed, self.begun_from = freed + self.begun_from, 0
        self.evicted += freed
        return freed

    def unpin(self, seq: Sequence) -> bool:
        self.idle, self.restored, before = self.idle + self.restored, 0, self.restored
        return before > 0


@dataclass
class SharedMemory(Memory):
    """A fake pool whose blocks are shared by rows and prefixes.

    `tables`: the blocks of each row. `cached`: the blocks of prefixes.
    """

    cached: set[int] = field(default_factory=set)
    tables: dict[Sequence, list[int]] = field(default_factory=dict)

    def blocks_in_use(self) -> int:
        return len(self.cached.union(*self.tables.values()))

    def blocks_of(self, seq: Sequence) -> int:
        return len(self.tables.get(seq, ()))


def test_blocks_that_rows_and_prefixes_share_count_once() -> None:
    memory = SharedMemory(cached={0, 1, 2})
    blocks, rows = BlockManager(memory, 100), [sequence() for _ in range(16)]
    for number, row in enumerate(rows):
        blocks.give(row, 5)
        memory.tables[row] = [0, 1, 10 + number]  # two of the prefix and one of its own
    # The last term: blocks that were given to rows, but are not allocated yet.
    assert blocks.available == 100 - 3 - 16 - 16 * (5 - 3)
    for row in rows:
        memory.tables.pop(row)
        blocks.free(row)
    assert blocks.available == 100 - 3


def test_blocks_needed_at_admission_and_after_a_preemption() -> None:
    seq = sequence(300, max_tokens=2000)
    assert (blocks_to_finish(seq), blocks_to_admit(seq, 100)) == (9, 3)
    assert blocks_to_admit(sequence(300, max_tokens=5), 100) == 2
    seq.ids += [1] * 300
    seq.preempt()
    assert (seq.phase, seq.submitted) == (Phase.WAITING, 0)
    assert [blocks_to_admit(seq, capacity) for capacity in (100, 5, 3)] == [9, 5, 4]


def test_a_row_gets_blocks_before_its_step_and_none_beyond_its_end() -> None:
    blocks = BlockManager(Memory(), 9)
    row, last = sequence(KV_BLOCK_TOKENS - 2), sequence(KV_BLOCK_TOKENS - 1, max_tokens=1)
    for seq in (row, last):
        blocks.give(seq, 1)
    assert blocks.lacking([row, last]) == []
    row.ids.append(1)
    assert blocks.lacking([last, row]) == [row] and blocks_for_step(row) == 2
    assert blocks.grow(row, alone=False)
    assert (blocks.given(row), blocks.available) == (2, 9 - 2 - 1)
    assert blocks.lacking([last, row]) == []


def test_cached_prefixes_are_evicted_before_a_sequence_waits() -> None:
    memory = Memory(idle=4, begun_from=2)
    blocks, first, second = BlockManager(memory, 6), sequence(300, max_tokens=900), sequence(300)
    assert blocks.admit(first, alone=True)
    assert (blocks.given(first), memory.evicted, blocks.available) == (3, 3, 0)
    assert not blocks.admit(second, alone=False)  # two are wanted, and one prefix may be evicted
    assert (blocks.given(second), memory.idle, memory.begun_from) == (0, 0, 2)
    first.ids += [1] * 800
    assert not blocks.grow(first, alone=False)
    assert blocks.grow(first, alone=True)  # the row's prefix is evicted, as no other row runs
    assert (blocks.given(first), memory.begun_from) == (5, 0)


def test_what_others_got_from_the_disk_is_evicted_before_a_row_lacks_blocks() -> None:
    memory = Memory(idle=1, restored=5)
    blocks, seq = BlockManager(memory, 6), sequence(300, max_tokens=900)
    assert not blocks.find(2)  # one restored prefix does not evict another
    assert blocks.admit(seq, alone=True)
    assert (blocks.given(seq), memory.evicted, blocks.available) == (3, 3, 0)
    memory.restored, memory.idle, memory.begun_from = 1, 0, 2
    seq.ids += [1] * 500
    assert blocks.grow(seq, alone=True)
    assert (blocks.given(seq), memory.restored, memory.begun_from) == (4, 0, 2)


def test_a_sequence_that_runs_alone_grows_to_its_promise() -> None:
    blocks, seq = BlockManager(Memory(), 4), sequence(300, max_tokens=9000)
    assert blocks.admit(seq, alone=True) and seq.promised == 4
    blocks.capacity = 1
    assert blocks.available == -2
    seq.ids += [1] * (4 * KV_BLOCK_TOKENS - 2 - 300)
    assert not blocks.grow(seq, alone=False)
    assert blocks.grow(seq, alone=True) and blocks.given(seq) == 4
    seq.ids.append(1)
    assert not blocks.grow(seq, alone=True)
    blocks.free(seq)
    seq.preempt()
    assert blocks.available == 1 and not blocks.fits(seq)


def test_a_refusal_has_the_numbers() -> None:
    blocks = BlockManager(Memory(), 3)
    whole, short = sequence(2 * KV_BLOCK_TOKENS + 1, max_tokens=900), sequence(2 * KV_BLOCK_TOKENS)
    assert not blocks.fits(whole) and blocks.fits(short)
    error = blocks.refusal(whole)
    assert str(error) == (
        "513 tokens, 513 of them the prompt's, need 4 blocks of 256 tokens; "
        "this worker's memory has 3"
    )
    assert error.details == {"prompt_tokens": 513, "need_tokens": 1024, "capacity_tokens": 768}


@given(
    st.lists(st.tuples(st.sampled_from(["admit", "grow", "free"]), st.integers(0, 5)), max_size=60),
    st.integers(0, 12),
    st.integers(1, 20),
)
def test_beside_others_nobody_gets_more_than_there_is(
    calls: list[tuple[str, int]], cached: int, capacity: int
) -> None:
    """The rows and the prefix cache together never use more blocks than the capacity."""
    memory = Memory(idle=min(cached, capacity))
    blocks = BlockManager(memory, capacity)
    rows = [sequence(100 * number + 1, max_tokens=3000) for number in range(6)]
    held = dict.fromkeys(rows, 0)
    for call, number in calls:
        row = rows[number]
        before, had = dict(held), memory.blocks_in_use()
        if call == "free":
            blocks.free(row)
            held[row] = 0
        elif call == "admit" and not held[row]:
            if blocks.admit(row, alone=False):
                held[row] = blocks_to_admit(row, capacity)
        elif call == "grow" and held[row]:
            row.ids += [1] * 200
            need = max(blocks_for_step(row), held[row])
            if need > held[row] and blocks.grow(row, alone=False):
                held[row] = need
        assert [blocks.given(seq) for seq in rows] == [*held.values()]
        assert blocks.available == capacity - sum(held.values()) - memory.blocks_in_use() >= 0
        wanted = sum(held.values()) + had - capacity if held != before else had
        assert memory.blocks_in_use() >= min(had, had - max(0, wanted))  # no more than needed


@pytest.mark.parametrize("alone", [False, True])
def test_only_a_sequence_that_runs_alone_gets_blocks_that_are_not_free(alone: bool) -> None:
    blocks, seq = BlockManager(Memory(begun_from=5), 5), sequence(300, max_tokens=900)
    assert blocks.fits(seq) and blocks.admit(seq, alone=alone) == alone
    assert blocks.given(seq) == 3 * alone and blocks.available == -3 * alone
