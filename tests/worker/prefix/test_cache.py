"""Hits, insertions and evictions of the prefix cache in its modes tree, single and off. No MLX."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.prefix import cache as prefix_cache
from mlxpool.worker.prefix import tree as prefix_tree
from mlxpool.worker.prefix import tree_cache
from mlxpool.worker.prefix.cache import PrefixCache, SingleCache
from mlxpool.worker.prefix.modes import MODES, make_prefix_cache
from mlxpool.worker.prefix.tree import common_prefix
from mlxpool.worker.prefix.tree_cache import TreeCache
from support.prefix_stores import (
    CELL,
    STATE,
    ListRow,
    ListStore,
    check_shape,
    edges,
    serve,
    unique_tokens,
)

Tree = TreeCache[ListRow, list[int], list[int]]
ROOMY = 10**9

A, B, C = [*range(1, 9)], [1, 2, 3, 4, 5, 10, 11, 12], [*range(1, 9), 40, 41]


def tree(budget: int = ROOMY, *, stateful: bool = False, window: int = 0) -> Tree:
    return TreeCache(ListStore(stateful, window), budget)


def single(budget: int = ROOMY, *, stateful: bool = False) -> SingleCache[ListRow]:
    return SingleCache(ListStore(stateful), budget)


@pytest.fixture(params=[tree, single])
def cache(request: pytest.FixtureRequest) -> PrefixCache[ListRow]:
    new_cache: PrefixCache[ListRow] = request.param()
    return new_cache


def begun(cache: PrefixCache[ListRow], prompt: list[int]) -> ListRow:
    """Returns a KV row that has computed all but the last token of its prompt."""
    row, cached = cache.begin(prompt)
    row.feed(prompt[cached:-1])
    return row


# ---- every mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_modes_by_name(mode: str) -> None:
    kind = {"tree": TreeCache, "single": SingleCache, "off": PrefixCache}[mode]
    assert type(make_prefix_cache(mode, ListStore(), 5)) is kind


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'forest'.*tree, single, off"):
        make_prefix_cache("forest", ListStore(), 5)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        tree(-1)


def test_off_keeps_nothing() -> None:
    cache = make_prefix_cache("off", ListStore(), ROOMY)
    assert [serve(cache, A), serve(cache, A), cache.nbytes] == [0, 0, 0]
    assert (cache.hits, cache.misses, cache.shrink(9), cache.clear()) == (0, 2, 0, 0)


def test_an_exact_match_reuses_all_but_the_last_token(cache: PrefixCache[ListRow]) -> None:
    """The last token is never cached.

    Covers the case ExactMatchSeed of the reference test suite.
    """
    prompt = [1, 2, 3, 4, 5]
    assert [serve(cache, prompt, (6,)), serve(cache, prompt, (6,))] == [0, 4]
    assert [serve(cache, [7], (8,)), serve(cache, [7], (8,))] == [0, 0]


def test_the_next_turn_reuses_the_conversation(cache: PrefixCache[ListRow]) -> None:
    serve(cache, A, (20, 21, 22))
    assert serve(cache, [*A, 20, 21, 22, 30, 31]) == len(A) + 2


def test_a_prompt_that_is_a_kept_prefix_is_reused(cache: PrefixCache[ListRow]) -> None:
    serve(cache, A)
    assert serve(cache, A[:3]) == 2


def test_a_cancelled_prefill_keeps_what_was_computed(cache: PrefixCache[ListRow]) -> None:
    prompt = [*range(47)]
    assert [serve(cache, prompt, stop_at=at) for at in (18, 36, 46)] == [0, 18, 36]


def test_cancel_before_any_prefill_leaves_nothing(cache: PrefixCache[ListRow]) -> None:
    row, _ = cache.begin(A)
    cache.close(row, A)
    assert (cache.nbytes, serve(cache, A)) == (0, 0)


def test_a_token_in_flight_is_dropped(cache: PrefixCache[ListRow]) -> None:
    row, _ = cache.begin(A)
    row.feed([*A, 20, 99])  # 99 was sampled ahead and never sent
    cache.close(row, [*A, 20])
    assert cache.nbytes == 9 * CELL
    assert serve(cache, [*A, 20, 99, 1]) == 9


def test_counters_and_clear(cache: PrefixCache[ListRow]) -> None:
    serve(cache, A, (9,))
    serve(cache, C, (9,))
    assert (cache.hits, cache.misses, cache.tokens) == (1, 1, 8)
    assert cache.clear() == 10 * CELL
    assert (cache.nbytes, serve(cache, A)) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_released_once(mode: str) -> None:
    store = ListStore()
    cache = make_prefix_cache(mode, store, ROOMY)
    for prompt in (A, B, [77, 78], C):
        serve(cache, prompt)
    row = begun(cache, B)
    cache.clear()
    cache.close(row, B)
    cache.clear()
    assert store.rows == 0


# ---- single: the exact rules of one entry --------------------------------------------------------


def test_single_reuses_the_last_sequence_only() -> None:
    cache = single()
    assert serve(cache, A, (20, 21)) == 0
    assert cache.nbytes == 9 * CELL  # 1..8 and 20: the last token was never computed
    assert serve(cache, B, (9,)) == 5
    assert serve(cache, C) == 5


def test_single_gives_its_entry_to_one_row() -> None:
    cache = single()
    serve(cache, A)
    first, _ = cache.begin(A)
    second, cached = cache.begin(A)
    assert (first is second, cached) == (False, 0)


def test_single_keeps_what_closed_last() -> None:
    cache = single()
    first, second = begun(cache, A), begun(cache, B)
    cache.close(first, A)
    cache.close(second, B)
    assert serve(cache, A) == 5


def test_single_drops_a_row_above_the_budget() -> None:
    cache = single(7 * CELL)
    serve(cache, A, (9,))
    assert cache.nbytes == 0
    serve(cache, A[:7])
    assert cache.nbytes == 7 * CELL
    cache.budget = 6 * CELL
    assert cache.nbytes == 0


def test_single_cannot_rewind_a_recurrent_row() -> None:
    cache = single(stateful=True)
    serve(cache, A, (9,))
    assert serve(cache, [*A, 9, 9]) == 8  # continues at the end of the row
    assert serve(cache, B) == 0  # starts from 0


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(prompts, prompts, st.integers(0, 8)), max_size=8))
def test_single_reuses_exactly_the_common_prefix(
    requests: list[tuple[list[int], list[int], int]],
) -> None:
    cache = single()
    last: list[int] = []
    for prompt, generated, cancelled_at in requests:
        row, cached = cache.begin(prompt)
        common = 0
        while common < min(len(last), len(prompt)) and last[common] == prompt[common]:
            common += 1
        assert cached == min(common, len(prompt) - 1)
        tokens = [*prompt, *generated]
        row.feed(tokens[cached : max(cached, cancelled_at)])
        last = tokens[: row.offset]
        cache.close(row, tokens)


# ---- tree ----------------------------------------------------------------------------------------


def test_branches_are_created_and_reused() -> None:
    cache = tree()
    assert serve(cache, A, (20, 21)) == 0
    assert cache.nbytes == 9 * CELL
    assert serve(cache, B, (9,)) == 5  # a partial match of an edge
    assert serve(cache, C, (9,)) == 8
    assert set(edges(cache)) == {(1, 2, 3, 4, 5), (*B,), (*A,), (*A, 20), (*C,)}
    assert cache.nbytes == unique_tokens(cache) * CELL == (5 + 3 + 3 + 1 + 2) * CELL


def test_a_switch_of_branches_restores_the_cells() -> None:
    cache = tree()
    for _ in range(2):
        serve(cache, A, (20,))
        serve(cache, B, (20,))
    row, cached = cache.begin([*A, 1])
    assert (cached, len(row.cells)) == (8, 8)  # `serve` compares the cells of the others


def test_two_rows_from_one_path_at_once() -> None:
    cache = tree()
    serve(cache, A, (20,))
    first, second = cache.begin([*A, 30, 31]), cache.begin([*A, 30, 32])
    assert first[0] is not second[0] and first[1] == second[1] == 8
    first[0].feed((30, 31))
    second[0].feed((30, 32))
    cache.close(first[0], [*A, 30, 31])
    cache.close(second[0], [*A, 30, 32])
    assert unique_tokens(cache) == 11
    check_shape(cache)


def test_the_same_prompt_twice_at_once_is_kept_once() -> None:
    cache = tree()
    first, second = begun(cache, A), begun(cache, A)
    cache.close(first, A)
    before = cache.nbytes
    cache.close(second, A)
    assert cache.nbytes == before == 7 * CELL


def test_lru_only_updates_used_nodes() -> None:
    """A use of one branch does not count as a use of the other branch.

    Covers the case LRUOnlyUpdatesUsedNodes of the reference test suite.
    """
    cache = tree()
    serve(cache, A, (9,))
    serve(cache, B, (9,))
    serve(cache, [*A, 50], (9,))
    used = {path: node.last_used for path, node in edges(cache).items()}
    assert used[(*A, 50)] > used[(*B,)]
    cache.shrink(1)
    assert set(edges(cache)) == {(*A, 50)}


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = tree()
    for first in (1, 2, 3):
        serve(cache, [first, 0, 0, 0], (9,))
    serve(cache, [1, 0, 0, 0], (9,))
    assert cache.shrink(1) == 4 * CELL
    assert set(edges(cache)) == {(1, 0, 0, 0), (3, 0, 0, 0)}
    assert cache.shrink(4 * CELL + 1) == 8 * CELL
    assert cache.shrink(1) == 0
    assert cache.evictions == 3


def test_a_path_in_use_is_not_evicted() -> None:
    cache = tree()
    serve(cache, A, (9,))
    serve(cache, B, (9,))
    row, cached = cache.begin(C)
    assert (cached, cache.shrink(ROOMY)) == (8, 3 * CELL)
    assert set(edges(cache)) == {(*A,)}
    cache.close(row, C)
    assert cache.shrink(ROOMY) == 8 * CELL


def test_eviction_keeps_the_prefix_of_running_rows() -> None:
    """The system prompt that five chats share is not evicted.

    Covers the case EvictionPreservesActive of the reference test suite.
    """
    system = [7, 7, 7, 7, 7]
    cache = tree(20 * CELL)
    row = None
    for chat in range(5):
        row = begun(cache, [*system, *range(100 * (chat + 1), 100 * (chat + 1) + 7)])
        if chat < 4:
            cache.close(row, [*system, *range(100 * (chat + 1), 100 * (chat + 1) + 7)])
        assert cache.nbytes <= cache.budget
    assert row is not None and row.offset == 11
    assert cache.shrink(ROOMY) > 0
    assert serve(cache, [*system, 1]) == 5


def test_the_budget_is_kept_and_used() -> None:
    cache = tree(10 * CELL)
    serve(cache, [*range(30)], (9,))
    assert (cache.nbytes, serve(cache, [*range(30)])) == (10 * CELL, 10)
    serve(cache, [50, 51, 52], (9,))
    assert cache.nbytes <= 10 * CELL
    assert serve(cache, [50, 51, 52]) == 2


def test_a_budget_of_0_keeps_nothing() -> None:
    cache = tree(0)
    assert [serve(cache, A), serve(cache, A), cache.nbytes] == [0, 0, 0]


def test_a_smaller_budget_applies_at_once() -> None:
    cache = tree()
    serve(cache, A, (9,))
    cache.budget = 8 * CELL - 1
    assert cache.nbytes == 0


def test_the_end_of_a_long_edge_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MAX_PIECE", 4)
    monkeypatch.setattr(prefix_tree, "MAX_COPIED_JOIN", 2)
    cache = tree()
    serve(cache, [*range(12)], (9,))
    assert cache.shrink(1) == 4 * CELL
    assert serve(cache, [*range(12)], (9,)) == 8


def test_close_of_a_row_that_was_not_begun_is_ignored() -> None:
    cache = tree()
    row = begun(cache, A)
    cache.close(row, A)
    cache.close(row, A)
    assert cache.nbytes == 7 * CELL


def test_clear_keeps_running_rows_valid() -> None:
    cache = tree()
    serve(cache, A, (9,))
    row, cached = cache.begin(C)
    assert (cached, cache.clear(), cache.nbytes) == (8, 8 * CELL, 0)
    row.feed(C[cached:])
    cache.close(row, C)
    assert (cache.nbytes, serve(cache, C)) == (10 * CELL, 9)
    check_shape(cache)


def test_keep_stores_a_prompt_that_is_still_prefilled() -> None:
    cache = tree()
    row = begun(cache, A)
    cache.keep(row, A)
    assert serve(cache, C) == 7
    row.feed(A[-1:])
    cache.close(row, A)
    check_shape(cache)


# ---- tree: layers that keep whole states ---------------------------------------------------------


def test_recurrent_exact_match_continues_from_the_branch_point() -> None:
    """A recurrent model computes an equal prompt twice; the third uses the branch point's snapshot.

    Covers the case ExactMatchSeed of the reference test suite.
    """
    cache = tree(stateful=True)
    prompt = [1, 2, 3, 4, 5]
    cached_tokens = [serve(cache, prompt, (6,)) for _ in range(3)]
    assert cached_tokens == [0, 0, 4]


def test_recurrent_branch_gets_a_restore_point() -> None:
    cache = tree(stateful=True)
    serve(cache, A, (20,))
    assert [serve(cache, B, (9,)), serve(cache, [*B[:5], 60], (9,))] == [0, 5]


def test_recurrent_next_turn_reuses_the_conversation() -> None:
    cache = tree(stateful=True)
    serve(cache, A, (20, 21, 22))
    assert serve(cache, [*A, 20, 21, 22, 30, 31]) == len(A) + 2
    assert (
        sum(node.state is not None for node in cache.tree.walk()) == 1
    )  # the older state was evicted


def test_a_requested_restore_point_is_not_merged() -> None:
    """A node at a requested restore point is not merged with its only child.

    Covers UserSnapshotPreserves and UserSnapshotResistsAutoMerge of the reference test suite.
    """
    cache = tree(stateful=True)
    serve(cache, A, (20,), restore_at=4)
    assert set(edges(cache)) == {(1, 2, 3, 4), (*A,)}
    serve(cache, [1, 2, 3, 4, 70, 71], (9,))
    assert serve(cache, [1, 2, 3, 4, 80], (9,)) == 4


def test_a_restore_point_beyond_the_prefill_is_ignored() -> None:
    cache = tree(stateful=True)
    for hint in (8, 9, 100):
        serve(cache, A, (20,), restore_at=hint)
    assert set(edges(cache)) == {(*A[:7],), (*A,)}  # 7: where the second prompt branched off
    serve(cache, [*range(50, 60)], (9,), restore_at=3)
    assert tuple(range(50, 53)) in edges(cache)


def test_restore_points_of_a_cancelled_prefill_are_kept() -> None:
    cache = tree(stateful=True)
    serve(cache, A, restore_at=3, stop_at=6)
    assert set(edges(cache)) == {(1, 2, 3), (*A[:6],)}
    assert serve(cache, [1, 2, 3, 90, 91]) == 3
    check_shape(cache, stateful=True)


def test_a_long_prompt_has_restore_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_cache, "RESTORE_POINT_INTERVAL", 8)
    cache = tree(stateful=True)
    prompt = [*range(30)]
    serve(cache, prompt, (9,))
    assert serve(cache, [*prompt[:20], 77, 78]) == 16


def test_restore_points_are_reported_until_the_row_is_past_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restore point is reported until the row is past it.

    Covers the case 'Captures persist over two writes' of the reference test suite.
    """
    monkeypatch.setattr(tree_cache, "RESTORE_POINT_INTERVAL", 3)
    cache = tree(stateful=True)
    row, _ = cache.begin([*range(9)], 5)
    assert cache.next_restore_point(row) == 3
    row.feed(range(2))
    cache.keep(row, [*range(9)])
    assert cache.next_restore_point(row) == 3
    row.feed(range(2, 5))  # past restore point 3, whose state is gone, to restore point 5
    cache.keep(row, [*range(9)])
    assert (cache.next_restore_point(row), set(edges(cache))) == (6, {(*range(5),)})
    row.feed(range(5, 8))
    cache.keep(row, [*range(9)])
    assert cache.next_restore_point(row) is None
    assert [node.end for node in cache.tree.walk() if node.restore_point] == [5]
    cache.close(row, [*range(9)])


def test_a_state_with_more_tokens_than_recorded_is_not_kept() -> None:
    cache = tree(stateful=True)
    row, _ = cache.begin(A)
    row.feed([*A, 20, 99])  # 99 is in the state, but not in the tokens
    cache.close(row, [*A, 20])
    assert cache.nbytes == 0


def test_a_window_that_dropped_nothing_can_be_cut_anywhere() -> None:
    cache = tree(stateful=True, window=100)
    serve(cache, A, (20,))
    assert [serve(cache, B, (9,)), serve(cache, A[:3], (9,))] == [5, 2]


def test_snapshots_count_in_bytes_and_are_evicted() -> None:
    cache = tree(8 * CELL + 2 * STATE, stateful=True)
    serve(cache, A, (20,), restore_at=4)
    assert cache.nbytes == 8 * CELL + 2 * STATE
    assert cache.shrink(1) == STATE  # the restore point, which is older
    assert set(edges(cache)) == {(*A,)}
    assert serve(cache, [*A, 1]) == 8


def test_a_snapshot_that_does_not_fit_leaves_nothing() -> None:
    cache = tree(8 * CELL + STATE - 1, stateful=True)
    serve(cache, A, (20,))
    assert cache.nbytes == 0


def test_a_memory_error_in_begin_leaks_nothing() -> None:
    store = ListStore()
    cache: Tree = TreeCache(store, ROOMY)
    serve(cache, A)
    store.broken = True
    with pytest.raises(MemoryError):
        cache.begin(C)
    store.broken = False
    assert (store.rows, cache.shrink(ROOMY), cache.nbytes) == (0, 8 * CELL, 0)


def test_a_memory_error_in_close_leaks_nothing() -> None:
    store = ListStore(stateful=True)
    cache: Tree = TreeCache(store, ROOMY)
    row = begun(cache, A)
    store.broken = True
    with pytest.raises(MemoryError):
        cache.close(row, A)
    store.broken = False
    assert (cache.nbytes, store.rows, cache.tree.root.readers) == (0, 0, 0)
    assert serve(cache, A) == 0


# ---- scenarios -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("style", ["keep", "drop", "away"])
def test_ten_turns_of_a_conversation(
    style: str, stateful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten turns of a conversation keep or drop answers, or branch off and return.

    Covers the case ScenarioConversationTurns of the reference test suite.
    """
    monkeypatch.setattr(tree_cache, "RESTORE_POINT_INTERVAL", 8)
    cache, history, other = tree(stateful=stateful), [*range(50)], [*range(500, 530)]
    before: list[int] = []
    for turn in range(10):
        answer = [1000 + 10 * turn + index for index in range(6)]
        matched = common_prefix(before, history)
        cached = serve(cache, history, answer, restore_at=len(history) - 4)
        bound = 8 + 4 + len(answer) if stateful else 0
        assert cached >= min(matched, len(history) - 1) - bound
        before = [*history, *answer[:-1]]
        if style == "away":
            serve(cache, other, answer)
        history = [*history, *(() if style == "drop" else answer), *range(200 + turn, 205 + turn)]
        check_shape(cache, stateful=stateful)


@pytest.mark.parametrize("stateful", [False, True])
def test_repeatedly_cancelled_prefills(stateful: bool) -> None:
    """A prefill of 47 tokens is cancelled after 18 and 36 tokens, then completed.

    Covers the case ScenarioCancelledPrefills of the reference test suite.
    """
    cache, prompt = tree(stateful=stateful), [*range(47)]
    serve(cache, prompt, stop_at=18)
    assert serve(cache, [*prompt[:18], 900, 901], (9,)) == 18
    assert serve(cache, prompt, stop_at=36) == 18
    assert serve(cache, prompt, (9,)) == 36


@pytest.mark.parametrize("stateful", [False, True])
def test_cancelled_prefills_that_diverge(stateful: bool) -> None:
    """Different prefills are cancelled before and after restore points; the last one is completed.

    Covers the case ScenarioDivergentCancels of the reference test suite.
    """
    cache, prompt = tree(stateful=stateful), [*range(40)]
    serve(cache, prompt, restore_at=20, stop_at=10)
    serve(cache, [*prompt[:15], 700, 701], restore_at=16, stop_at=15)
    serve(cache, [*prompt[:25], *range(800, 810)], restore_at=20, stop_at=30)
    assert serve(cache, prompt, (9,)) >= 20
    assert serve(cache, prompt, (9,)) >= 36 if not stateful else 20
    check_shape(cache, stateful=stateful)


# ---- reasons -------------------------------------------------------------------------------------


def test_the_reason_of_a_hit_or_miss(cache: PrefixCache[ListRow]) -> None:
    cache.close(begun(cache, A), A)
    assert cache.reason == prefix_cache.EMPTY
    row = begun(cache, B)
    assert cache.reason == prefix_cache.PART
    cache.close(row, B)
    cache.close(begun(cache, [*B[:-1]]), B[:-1])
    assert cache.reason == prefix_cache.WHOLE
    begun(cache, [99, 98])
    assert cache.reason == prefix_cache.DIFFERENT


def test_the_reason_of_a_prompt_of_one_token_and_of_no_cache() -> None:
    cache = tree()
    cache.close(begun(cache, A), A)
    cache.begin([1])
    assert cache.reason == prefix_cache.ONE_TOKEN
    off = PrefixCache(ListStore(), ROOMY)
    off.begin(A)
    assert off.reason == prefix_cache.OFF


def test_the_reason_where_no_state_is_kept_at_the_place() -> None:
    cache = tree(stateful=True)
    cache.close(begun(cache, A), A)
    begun(cache, B)
    assert cache.reason == prefix_cache.NO_STATE
    begun(cache, [*A, 50])
    assert cache.reason in (prefix_cache.PART, prefix_cache.WHOLE)
