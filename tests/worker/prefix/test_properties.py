"""Random calls of a prefix tree: its tokens equal a fresh prefill, and it keeps each token once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlxpool.worker.prefix import tree as prefix_tree
from mlxpool.worker.prefix import tree_cache
from mlxpool.worker.prefix.tree_cache import TreeCache
from support.prefix_stores import (
    CELL,
    STATE,
    ListStore,
    PagedMemory,
    cells_of,
    check_shape,
    edges,
    unique_tokens,
)

ROOMY = 10**9
BLOCK = 4
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class Lists:
    """A ListStore for the prefix tree: KV rows have copies of the cached tokens."""

    exact = True  # whether a token's bytes are exactly its own

    def __init__(self, stateful: bool = False, window: int = 0) -> None:
        self.store: Any = ListStore(stateful, window)

    def feed(self, row: Any, tokens: list[int]) -> None:
        row.feed(tokens)

    def read(self, row: Any) -> list[int]:
        return list(row.cells)

    def left(self) -> int:
        """The number of rows that were not released."""
        return int(self.store.rows)


class Blocks:
    """A PagedMemory for the prefix tree: KV rows share blocks with the tree."""

    exact = False

    def __init__(self) -> None:
        self.memory = PagedMemory(blocks=400, size=BLOCK)
        self.store: Any = self.memory.store

    def feed(self, row: Any, tokens: list[int]) -> None:
        before = self.memory.copies
        self.memory.feed(row, tokens)
        assert self.memory.copies <= before + 1, "more than the partly filled block was copied"

    def read(self, row: Any) -> list[int]:
        return self.memory.read(row)

    def left(self) -> int:
        """The number of blocks that have references."""
        return 400 - self.memory.pool.free


class Running:
    def __init__(self, row: Any, tokens: list[int], cached: int) -> None:
        self.row, self.tokens, self.cached = row, tokens, cached


class Calls(RuleBasedStateMachine):
    """Makes random calls of a prefix tree.

    With `roomy` nothing is evicted, so each hit can be predicted.
    """

    make: Callable[[], Any] = Lists
    roomy = False

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make()
        self.cache: TreeCache[Any, Any, Any] = TreeCache(self.world.store, ROOMY)
        self.running: list[Running] = []
        self.kept: set[tuple[int, ...]] = set()  # every prefix that was kept

    @property
    def stateful(self) -> bool:
        return bool(self.world.store.stateful)

    @initialize(cells=st.integers(0, 60))
    def bound(self, cells: int) -> None:
        if not self.roomy:
            self.cache.budget = cells * CELL

    @precondition(lambda self: len(self.running) < 4)
    @rule(prompt=TOKENS, hint=st.integers(0, 14))
    def begin(self, prompt: list[int], hint: int) -> None:
        row, cached = self.cache.begin(prompt, hint)
        assert cached < len(prompt) and row.offset == cached
        assert self.world.read(row) == cells_of(prompt)[:cached]
        if self.roomy and not self.stateful:
            assert cached == max(
                (at for at in range(len(prompt)) if tuple(prompt[:at]) in self.kept), default=0
            )
        self.running.append(Running(row, list(prompt), cached))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), more=TOKENS, count=st.integers(1, 14))
    def advance(self, which: int, more: list[int], count: int) -> None:
        run = self.running[which % len(self.running)]
        if run.row.offset >= len(run.tokens) - 1:
            run.tokens += more
        for token in run.tokens[run.row.offset :][:count]:
            self.world.feed(run.row, [token])
            if run.row.offset == self.cache.next_restore_point(run.row):
                self.keep(self.running.index(run))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def keep(self, which: int) -> None:
        run = self.running[which % len(self.running)]
        self.cache.keep(run.row, run.tokens)
        self.remember(run.tokens[: run.row.offset])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), forget=st.integers(0, 1))
    def close(self, which: int, forget: int) -> None:
        run = self.running.pop(which % len(self.running))
        tokens = run.tokens[: max(run.row.offset - forget, run.cached)]
        assert self.world.read(run.row)[: len(tokens)] == cells_of(tokens)
        whole = len(tokens) == run.row.offset
        self.cache.close(run.row, tokens)
        if whole or not self.stateful:
            self.remember(tokens)

    @precondition(lambda self: not self.roomy)
    @rule(needed=st.integers(0, 100))
    def shrink(self, needed: int) -> None:
        before = self.cache.nbytes
        freed = self.cache.shrink(needed)
        assert freed == before - self.cache.nbytes
        assert freed >= needed or self.cache.tree.eviction_candidate() is None

    @precondition(lambda self: not self.roomy)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.nbytes == unique_tokens(self.cache) == 0
        for run in self.running:
            run.cached = 0

    def remember(self, tokens: list[int]) -> None:
        self.kept |= {tuple(tokens[:at]) for at in range(1, len(tokens) + 1)}

    @invariant()
    def shape(self) -> None:
        check_shape(self.cache, stateful=self.stateful)

    @invariant()
    def bytes_of_unique_tokens(self) -> None:
        states = sum(node.state is not None for node in self.cache.tree.walk())
        unique = unique_tokens(self.cache)
        if self.world.exact:
            assert self.cache.nbytes == unique * CELL + states * STATE
        else:
            partly = 2 * BLOCK * CELL * len(edges(self.cache))
            assert unique * CELL <= self.cache.nbytes <= unique * CELL + partly
        if self.roomy and not self.stateful:
            assert unique == len(self.kept)

    @invariant()
    def budget(self) -> None:
        assert self.cache.nbytes <= self.cache.budget

    @invariant()
    def paths_in_use_stay(self) -> None:
        for run in self.running:
            match = self.cache.tree.match(tuple(run.tokens), run.cached)
            assert match.tokens == run.cached

    def teardown(self) -> None:
        for run in self.running:
            self.cache.close(run.row, run.tokens)
        everywhere = (self.cache.tree.root, *self.cache.tree.walk())
        assert all(node.readers == 0 for node in everywhere)
        check_shape(self.cache, stateful=self.stateful)
        self.cache.clear()
        assert (self.cache.nbytes, self.world.left()) == (0, 0)


WORLDS: dict[str, Callable[[], Any]] = {
    "full": Lists,
    "recurrent": lambda: Lists(stateful=True),
    "window": lambda: Lists(stateful=True, window=6),
    "blocks": Blocks,
}


@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "tight"])
@pytest.mark.parametrize("world", WORLDS)
def test_calls_in_any_order_keep_the_invariants(
    world: str, roomy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "MAX_PIECE", 8)  # two blocks
    monkeypatch.setattr(tree_cache, "RESTORE_POINT_INTERVAL", 6)
    monkeypatch.setattr(prefix_tree, "MAX_COPIED_JOIN", 3)
    make, wanted = WORLDS[world], roomy

    class Case(Calls):
        roomy = wanted

        def __init__(self) -> None:
            self.make = make
            super().__init__()

    run_state_machine_as_test(
        Case, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
