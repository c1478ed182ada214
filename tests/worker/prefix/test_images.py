"""Tests prompts with images in the prefix cache: an image's inputs stay together.

Images with equal inputs but different contents never match.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxpool.worker.media.spans import MediaSpan, slot_items
from mlxpool.worker.prefix.cache import PrefixCache, SingleCache
from mlxpool.worker.prefix.tree_cache import TreeCache
from support.prefix_stores import ListRow, ListStore, cells_of

IMAGES = (b"a" * 32, b"b" * 32)
SIZE = 6  # inputs of an image
Prompt = tuple[tuple[int, ...], tuple[MediaSpan, ...]]


def prompt_of(*parts: int | bytes, group: bool = True) -> Prompt:
    """Returns a prompt of token ids and images, with the spans of the images.

    With `group` the inputs of an image attend to each other both ways.
    """
    items: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, int):
            items.append(part)
        else:
            spans.append(MediaSpan(len(items), SIZE, part, (1, 2, 3), group))
            items += slot_items(part, SIZE)
    return tuple(items), tuple(spans)


def served(cache: PrefixCache[ListRow], prompt: Prompt, read: int | None = None) -> int:
    """Reads a prompt up to input `read`; returns the number of its inputs in the cache."""
    items, spans = prompt
    row, cached = cache.begin(items, 0, spans)
    assert row.cells == cells_of(items[:cached]), "the row has other keys and values"
    while (stop := cache.next_restore_point(row)) is not None:
        row.feed(items[row.offset : stop])
        cache.keep(row, items)
    row.feed(items[row.offset : len(items) if read is None else max(read, cached)])
    cache.close(row, items)
    return cached


CACHES: dict[str, Callable[[], PrefixCache[ListRow]]] = {
    "tree": lambda: TreeCache(ListStore(False, 0), 10**9),
    "tree with states": lambda: TreeCache(ListStore(True, 0), 10**9),
    "single": lambda: SingleCache(ListStore(False), 10**9),
}


@pytest.mark.parametrize("kind", CACHES)
def test_the_same_image_is_found_and_another_is_not(kind: str) -> None:
    cache: PrefixCache[ListRow] = CACHES[kind]()
    served(cache, prompt_of(1, 2, IMAGES[0], 3, 4))
    longer = prompt_of(1, 2, IMAGES[0], 3, 4, 5, 6)
    assert served(cache, longer) == 2 + SIZE + 2
    assert served(cache, prompt_of(1, 2, IMAGES[1], 3, 4, 5)) <= 2


@pytest.mark.parametrize(("group", "found"), [(True, 1), (False, 4)])
def test_a_row_that_ended_inside_a_group_is_not_taken_there(group: bool, found: int) -> None:
    cache: PrefixCache[ListRow] = CACHES["tree"]()
    prompt = prompt_of(1, IMAGES[0], 2, group=group)
    served(cache, prompt, read=4)
    assert served(cache, prompt) == found


def test_a_restore_point_inside_a_group_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.worker.prefix.tree_cache.RESTORE_POINT_INTERVAL", 5)
    cache: PrefixCache[ListRow] = CACHES["tree with states"]()
    items, spans = prompt_of(1, 2, IMAGES[0], 3, 4, 5, IMAGES[1], 6)
    row, _ = cache.begin(items, 0, spans)
    stops = []
    while (stop := cache.next_restore_point(row)) is not None:
        stops.append(stop)
        row.feed(items[row.offset : stop])
        cache.keep(row, items)
    assert stops == [2, 10, 11]
    cache.close(row, items)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([1, 2, *IMAGES]), min_size=1, max_size=5), st.integers(0, 40)
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from(sorted(CACHES)),
)
def test_a_match_ends_in_no_group(
    prompts: list[tuple[list[int | bytes], int]], group: bool, kind: str
) -> None:
    cache: PrefixCache[ListRow] = CACHES[kind]()
    for parts, read in prompts:
        items, spans = prompt_of(*parts, 3, group=group)
        cut = next(
            (replace(span) for span in spans if span.start < read < span.end and span.group), None
        )
        cached = served(cache, (items, spans), min(read if cut is None else cut.end, len(items)))
        assert not any(span.group and span.start < cached < span.end for span in spans)
        assert cached < len(items)
