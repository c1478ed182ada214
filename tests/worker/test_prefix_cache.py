"""The single-entry prefix cache: what a prompt finds, what a sequence leaves. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.prefix_tree import PrefixCache


@dataclass
class FakeRow:
    """Holds the tokens that a real row would hold keys and values of."""

    held: list[int] = field(default_factory=list)

    @property
    def offset(self) -> int:
        return len(self.held)

    @property
    def nbytes(self) -> int:
        return 10 * len(self.held)

    def trim(self, to: int) -> None:
        del self.held[to:]


def cache(mode: str = "single") -> PrefixCache[FakeRow]:
    return PrefixCache(FakeRow, mode)


def serve(
    prefixes: PrefixCache[FakeRow], prompt: list[int], generated: tuple[int, ...] = ()
) -> int:
    """A whole request: the last generated token is never computed. Returns what was cached."""
    row, cached = prefixes.begin(prompt)
    assert row.held == prompt[:cached]
    row.held += [*prompt[cached:], *generated[:-1]]
    prefixes.close(row, [*prompt, *generated])
    return cached


A, B, C = [*range(1, 9)], [1, 2, 3, 4, 5, 10, 11, 12], [*range(1, 9), 40, 41]


def test_branch_creation_and_reuse() -> None:
    prefixes = cache()
    assert serve(prefixes, A, (20, 21)) == 0
    assert prefixes.nbytes == 90  # 1..8 and 20: the last token was never computed
    assert serve(prefixes, B) == 5
    assert serve(prefixes, C) == 5


def test_exact_match_leaves_the_last_token() -> None:
    prefixes = cache()
    prompt = [1, 2, 3, 4, 5]
    assert [serve(prefixes, prompt), serve(prefixes, prompt)] == [0, 4]
    assert serve(prefixes, [7]) == 0
    assert serve(prefixes, [7]) == 0


def test_conversation_resumption() -> None:
    prefixes = cache()
    serve(prefixes, A, (20, 21, 22))
    assert serve(prefixes, [*A, 20, 21, 22, 30, 31]) == len(A) + 2


def test_prompt_inside_what_is_held() -> None:
    prefixes = cache()
    serve(prefixes, A)
    assert serve(prefixes, A[:3]) == 2


def test_cancelled_prefill_keeps_its_part() -> None:
    prefixes = cache()
    prompt = [*range(47)]
    for finished, found in ((18, 0), (36, 18), (47, 36)):
        row, cached = prefixes.begin(prompt)
        assert cached == found
        row.held += prompt[cached:finished]
        prefixes.close(row, prompt)


def test_cancel_before_any_prefill_leaves_nothing() -> None:
    prefixes = cache()
    row, _ = prefixes.begin(A)
    prefixes.close(row, A)
    assert (prefixes.nbytes, serve(prefixes, A)) == (0, 0)


def test_a_token_in_flight_is_forgotten() -> None:
    prefixes = cache()
    row, _ = prefixes.begin(A)
    row.held += [*A, 20, 99]  # 99 was drawn ahead and never given to anyone
    prefixes.close(row, [*A, 20])
    assert serve(prefixes, [*A, 20, 99, 1]) == 9


def test_a_row_is_never_shared() -> None:
    prefixes = cache()
    serve(prefixes, A)
    first, _ = prefixes.begin(A)
    second, cached = prefixes.begin(A)
    assert (first is second, cached) == (False, 0)


def test_the_last_closed_replaces_the_entry() -> None:
    prefixes = cache()
    one, _ = prefixes.begin(A)
    two, _ = prefixes.begin(B)
    one.held += A
    two.held += B
    prefixes.close(one, A)
    prefixes.close(two, B)
    assert serve(prefixes, A) == 5


def test_off_keeps_nothing() -> None:
    prefixes = cache("off")
    assert [serve(prefixes, A), serve(prefixes, A), prefixes.nbytes] == [0, 0, 0]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'forest'.*single, off"):
        cache("forest")


def test_counters_and_clear() -> None:
    prefixes = cache()
    serve(prefixes, A)
    serve(prefixes, C)
    assert (prefixes.hits, prefixes.misses, prefixes.tokens) == (1, 1, 8)
    assert prefixes.clear() == 100
    assert (prefixes.nbytes, serve(prefixes, A)) == (0, 0)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(prompts, prompts, st.integers(0, 8)), max_size=8))
def test_what_is_found_is_always_a_prefix(
    requests: list[tuple[list[int], list[int], int]],
) -> None:
    prefixes = cache()
    last: list[int] = []
    for prompt, generated, cancelled_at in requests:
        row, cached = prefixes.begin(prompt)
        common = 0
        while common < min(len(last), len(prompt)) and last[common] == prompt[common]:
            common += 1
        assert cached == min(common, len(prompt) - 1)
        assert row.held == prompt[:cached]
        tokens = [*prompt, *generated]
        row.held += tokens[cached : max(cached, cancelled_at)]
        last = list(row.held)
        prefixes.close(row, tokens)
