"""The index of what a worker was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.routing.prefix_index import PrefixIndex, PromptPieces


def pieces(*names: str) -> PromptPieces:
    """A prompt whose pieces have 10 tokens each; a key is all names up to there."""
    keys = tuple("/".join(names[: at + 1]).encode() for at in range(len(names)))
    return PromptPieces(keys, tuple(10 * (at + 1) for at in range(len(names))), 10 * len(names))


def test_a_prompt_is_found_up_to_its_first_unknown_piece() -> None:
    index = PrefixIndex()
    assert index.found(pieces("a")) == 0
    index.add(pieces("a", "b", "c"))
    assert index.tokens == 30
    assert index.found(pieces("a", "b", "x")) == 20
    assert index.found(pieces("b")) == 0
    index.add(pieces("a", "x"))
    assert index.tokens == 40


def test_the_oldest_prompt_is_dropped_from_its_end() -> None:
    index = PrefixIndex()
    index.add(pieces("a", "b", "c"))
    index.add(pieces("a", "d"))
    index.bound(30)
    assert index.found(pieces("a", "b", "c")) == 20
    index.shrink(10)
    assert index.found(pieces("a", "b", "c")) == 10
    assert index.found(pieces("a", "d")) == 20
    index.shrink(1000)
    assert index.tokens == len(index) == 0


CHAINS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=30)


@given(CHAINS, st.lists(st.integers(0, 60), max_size=30))
def test_a_piece_is_never_kept_without_those_before_it(
    chains: list[list[str]], bounds: list[int]
) -> None:
    """`found` searches by halving, which needs that."""
    index = PrefixIndex()
    for number, names in enumerate(chains):
        index.add(pieces(*names))
        if number < len(bounds):
            index.bound(bounds[number])
        for each in chains:
            prompt = pieces(*each)
            known = [key in index._pieces for key in prompt.keys]
            assert known == sorted(known, reverse=True)
            assert index.found(prompt) == 10 * sum(known)
