"""Tests T(k), the text of the first k ids, against an oracle that reads the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.prompt.detokenizer import Detokenizer, WholeTexts

ALPHABET = ["a", "b", "ab", "c", "é", "こ", "𝄞", "\ufffd"]
BYTES = [*(char.encode() for char in ALPHABET), b"\xe3", b"\x81", b"\xff", b"\xf0\x9d", b"\x00"]
pieces = st.lists(st.sampled_from(BYTES) | st.binary(max_size=3), max_size=30)
stop_lists = st.lists(st.text(st.sampled_from("abcéこ\ufffd"), min_size=1, max_size=4), max_size=3)


def run(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], Detokenizer]:
    completion = Detokenizer(lambda token: pieces[token], tuple(stops))
    texts = [completion.push(token) for token in range(len(pieces))]
    return [*texts, completion.finish()], completion


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Returns the text before the earliest complete stop, and whether a stop was found.

    If several stops end at the same character, the text before the longest stop is returned.
    """
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def held_back(text: str, stops: Sequence[str]) -> int:
    """Returns the expected length of held-back text: the longest suffix that may begin a stop."""
    return next(
        (n for n in range(len(text), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )


@given(pieces, stop_lists)
def test_the_whole_text_is_the_decode_cut_at_the_first_stop(
    pieces: list[bytes], stops: list[str]
) -> None:
    texts, completion = run(pieces, stops)
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert ("".join(texts), completion.stopped) == cut(whole, stops)


@given(pieces, stop_lists)
def test_text_that_may_begin_a_stop_is_held_back(pieces: list[bytes], stops: list[str]) -> None:
    texts, _ = run(pieces, stops)
    for k in range(1, len(pieces) + 1):
        known = _complete(b"".join(pieces[:k]))
        text, stopped = cut(known, stops)
        keep = 0 if stopped else held_back(text, stops)
        assert "".join(texts[:k]) == text[: len(text) - keep]
        if stopped:
            break


def _complete(data: bytes) -> str:
    """Returns the text of the bytes, without an incomplete character at their end."""
    for size in (3, 2, 1):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-size].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


@given(pieces, stop_lists, st.integers(0, 30))
def test_a_replay_gives_the_same_text_as_pushes(
    pieces: list[bytes], stops: list[str], k: int
) -> None:
    assert run(pieces[:k], stops)[0][:-1] == run(pieces, stops)[0][: len(pieces[:k])]


@given(pieces, stop_lists)
def test_a_replayed_completion_continues_with_the_same_text(
    pieces: list[bytes], stops: list[str]
) -> None:
    texts, whole = run(pieces, stops)
    for k in range(len(pieces) + 1):
        completion = Detokenizer(lambda token: pieces[token], tuple(stops))
        assert completion.replay(range(k)) == "".join(texts[:k])
        rest = [completion.push(token) for token in range(k, len(pieces))]
        assert [*rest, completion.finish()] == texts[k:]
        assert completion.stopped == whole.stopped


@given(pieces, stop_lists, st.integers(0, 30))
def test_texts_that_completions_share_change_nothing(
    pieces: list[bytes], stops: list[str], known: int
) -> None:
    """Texts of the first `known` tokens are made in advance, others on demand; all are equal."""
    texts = WholeTexts(lambda token: pieces[token], pieces[:known])
    for _ in range(2):
        completion = Detokenizer(lambda token: pieces[token], tuple(stops), texts)
        parts = [completion.push(token) for token in range(len(pieces))]
        assert [*parts, completion.finish()] == run(pieces, stops)[0]


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8),
    st.text("abc", max_size=60),
)
def test_many_overlapping_stops_are_found_like_one_by_one(stops: list[str], text: str) -> None:
    texts, completion = run([text[:20].encode(), text[20:].encode()], stops)
    assert ("".join(texts), completion.stopped) == cut(text, stops)


@pytest.mark.parametrize("stop", ["]", "^a", "a-c", "\\", "[", "𝄞\n"])
def test_a_stop_may_begin_with_any_character(stop: str) -> None:
    assert run([f"b{stop}c".encode()], [stop])[0] == ["b", ""]


@pytest.mark.parametrize(
    ("pieces", "stop", "sent"),
    [
        (["hello", "wor"], "or", "hellow"),
        (["Hello", " the", "re!"], "there!", "Hello "),
        (["hello", " wor"], "llo w", "he"),
    ],
)
def test_truncate_stop(pieces: list[str], stop: str, sent: str) -> None:
    texts, completion = run([piece.encode() for piece in pieces], [stop])
    assert ("".join(texts), completion.stopped) == (sent, True)


@pytest.mark.parametrize("char", ["é", "こ", "𝄞"])
def test_incomplete_unicode_is_held_back(char: str) -> None:
    data = char.encode()
    for missing in range(1, len(data)):
        assert run([data[:-missing]])[0] == ["", "\ufffd"]
    assert run([data])[0] == [char, ""]


def test_a_character_split_over_tokens() -> None:
    parts = [b"\xe3\x81", b"\x93\xe3", b"\x82\x93"]
    assert run(parts)[0] == ["", "こ", "ん", ""]


def test_no_text_after_a_stop() -> None:
    texts, completion = run([b"one STOP two", b"three", b"\xe3"], ["STOP"])
    assert texts == ["one ", "", "", ""]
    assert completion.finish() == ""


def test_the_stop_that_is_complete_first_wins_in_any_order() -> None:
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert run([b"xabcd"], stops)[0] == ["xa", ""]
        assert "".join(run([b"x", b"a", b"b", b"c", b"d"], stops)[0]) == "xa"


def test_of_stops_complete_at_once_the_longest_wins() -> None:
    for stops in (["bc", "abc"], ["abc", "bc"]):
        assert "".join(run([b"xab", b"c"], stops)[0]) == "x"


def test_held_text_is_released_when_no_stop_follows() -> None:
    assert run([b"a", b"a", b"b", b"x"], ["aabaa"])[0] == ["", "", "", "aabx", ""]
    assert run([b"aab"], ["aabaa"])[0] == ["", "aab"]


def test_long_repetitive_stops_are_linear() -> None:
    stops = [("a" * 1000) + chr(98 + index) for index in range(8)]
    texts, completion = run([b"a" * 50] * 400, stops)
    assert not completion.stopped
    assert "".join(texts) == "a" * 20000
