"""Tests thoughts in answers: their beginning, the counted tokens, and the mark at the bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.prompt.thoughts import MARKS, Thoughts, closings_of

TOKENS = [b"a", b"<think>", b"</think>", b"\n", b"</thi", b"nk>", b"[THINK]", b"[/THINK]"]
A, BEGIN, END, SPACE, HALF, REST, BRACKET, BRACKET_END = range(len(TOKENS))
HARMONY = [
    b"<|channel|>", b"analysis", b"<|message|>", b"a", b"<|end|>", b"<|start|>", b"assistant",
    b"final", b"commentary",
]  # fmt: skip
CHANNEL, ANALYSIS, MESSAGE, TEXT, STOP, START, ASSISTANT, FINAL, COMMENTARY = range(9)


def answer(thoughts: Thoughts, drawn: Sequence[int]) -> list[int]:
    """Returns the ids of an answer that draws the tokens `drawn`, except for forced tokens."""
    ids: list[int] = []
    for token in drawn:
        while thoughts.forced:
            ids.append(thoughts.forced[0])
            thoughts.take(ids[-1])
        if not thoughts.ended:
            thoughts.take(token)
        ids.append(token)
    return ids


def tags(most: int | None, *, inside: bool = False) -> Thoughts:
    return Thoughts(TOKENS.__getitem__, MARKS["tags"], inside=inside, most=most, closings=[[END]])


@pytest.mark.parametrize("most", [0, 1, 3])
def test_so_many_tokens_are_thought(most: int) -> None:
    assert answer(tags(most, inside=True), [A] * 5) == [A] * most + [END] + [A] * (5 - most)
    drawn = [SPACE, BEGIN, *[A] * 5]
    assert answer(tags(most), drawn) == [SPACE, BEGIN, *[A] * most, END, *[A] * (5 - most)]


@pytest.mark.parametrize("end", [[END], [HALF, REST]])
def test_thoughts_that_end_by_themselves_are_left_alone(end: list[int]) -> None:
    drawn = [A, A, *end, *[A] * 9]
    thoughts = tags(5, inside=True)
    assert answer(thoughts, drawn) == drawn
    assert thoughts.ended


def test_an_answer_without_thoughts_has_no_bound() -> None:
    drawn = [SPACE, A, BEGIN, *[A] * 9]
    assert answer(tags(1), drawn) == drawn, "marks inside an answer are text"


def test_brackets() -> None:
    thoughts = Thoughts(
        TOKENS.__getitem__, MARKS["brackets"], inside=False, most=2, closings=[[BRACKET_END]]
    )
    drawn = [BRACKET, A, A, A]
    assert answer(thoughts, drawn) == [BRACKET, A, A, BRACKET_END, A]


def test_channels_are_left_for_the_next_message() -> None:
    """The first bound ends the thoughts; the model may then open any channel, such as a call.

    If it opens thoughts again, the second bound forces an answer.
    """
    choose, reply = [STOP, START, ASSISTANT], [STOP, START, ASSISTANT, CHANNEL, FINAL, MESSAGE]
    begin = [CHANNEL, ANALYSIS, MESSAGE]

    def bounded() -> Thoughts:
        return Thoughts(
            HARMONY.__getitem__, MARKS["harmony"], inside=False, most=2, closings=[choose, reply]
        )

    call = [CHANNEL, COMMENTARY, MESSAGE, TEXT, TEXT, TEXT, TEXT]
    assert answer(bounded(), [*begin, TEXT, TEXT, *call]) == [*begin, TEXT, TEXT, *choose, *call]
    again = answer(bounded(), [*begin, TEXT, TEXT, *begin, TEXT])
    assert again == [*begin, TEXT, TEXT, *choose, *begin, *reply, TEXT]
    twice = [*begin, TEXT, STOP, START, ASSISTANT, *begin, TEXT, TEXT]
    assert answer(bounded(), twice) == [*twice[:-1], *choose, TEXT], "both messages count"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_what_stands_before_the_mark_counts(most: int) -> None:
    thoughts = Thoughts(
        TOKENS.__getitem__, MARKS["tags"], inside=True, most=most, closings=[[SPACE, END, SPACE]]
    )
    ids = answer(thoughts, [A] * 4)
    assert ids.index(END) == max(1, most) and ids.count(A) == 4
    assert ids[ids.index(END) - 1 :][:3] == [SPACE, END, SPACE]


@pytest.mark.parametrize(
    ("thinking", "template", "closing"),
    [
        ("tags", r"'<think>\n' + thoughts.strip() + '\n</think>\n\n'", "\n</think>\n\n"),
        ("tags", r"{% if '</think>' in content %} '<think>\n\n</think>\n\n'", "</think>"),
        ("tags", r"'\n<think>' + thoughts + '</think>'", "</think>"),
        ("brackets", "'[THINK]' + thoughts + '[/THINK]'", "[/THINK]"),
    ],
)
def test_a_closing_is_written_as_the_template_writes_it(
    thinking: str, template: str, closing: str
) -> None:
    assert closings_of(thinking, [template]) == (closing,)
    assert closings_of(None, [template]) == ()


def test_ids_that_pass_over_the_bound_are_refused() -> None:
    thoughts = tags(1, inside=True)
    thoughts.take(A)
    with pytest.raises(BadRequest, match=f"token id {END}, got {A}"):
        thoughts.copy().take(A)
    thoughts.take(END)
    assert thoughts.ended
