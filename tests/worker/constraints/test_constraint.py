"""Tests masks over the demo model's vocabulary, and the states of constraints after tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from mlxpool.common.errors import BadRequest
from mlxpool.worker.constraints import compiler as compiling
from mlxpool.worker.constraints import grammar
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.vocabulary import make_vocabulary
from mlxpool.worker.prompt.thoughts import Thoughts
from support.constrained_answers import constraint, demo, tokens_of

COLOURS = ["red", "reddish", "blue", "black and white"]
PERSON = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def test_a_mask_allows_exactly_the_tokens_that_go_on() -> None:
    folder, _, table = demo()
    rule = constraint({"type": "choice", "choices": COLOURS})
    had = b""
    for text in (b"r", b"e", b"d"):
        left = [
            colour.encode()[len(had) :] for colour in COLOURS if colour.encode().startswith(had)
        ]
        wanted = [
            token
            for token, piece in enumerate(table.pieces)
            if piece
            and token not in folder.eos_ids
            and any(rest.startswith(piece) for rest in left)
        ]
        assert tokens_of(rule.mask()) == wanted, had
        assert not rule.accepts
        rule.take(table.pieces.index(text))
        had += text
    assert rule.accepts and not rule.finished
    assert folder.eos_ids < set(tokens_of(rule.mask())), "it may end, or become `reddish`"


def test_only_the_end_may_follow_what_is_finished() -> None:
    folder, text, _ = demo()
    rule = constraint({"type": "choice", "choices": COLOURS})
    for token in text.encode("blue")[len(text.prefix) :]:
        assert not rule.finished
        rule.take(token)
    assert rule.accepts and rule.finished
    assert set(tokens_of(rule.mask())) == folder.eos_ids


def test_forced_bytes_have_the_ids_of_the_tokenizer() -> None:
    _, text, _ = demo()
    rule = constraint({"type": "choice", "choices": ["return value"]})
    for token in text.encode("return value")[len(text.prefix) :]:
        assert tokens_of(rule.mask()) == [token]
        rule.take(token)


def test_a_replay_gives_the_same_masks() -> None:
    _, text, _ = demo()
    ids = text.encode('{"name": "a b", "age": 31}')[len(text.prefix) :]
    whole = constraint(PERSON)
    for count, token in enumerate(ids):
        again = constraint(PERSON)
        again.replay(ids[:count])
        assert (again.mask() == whole.mask()).all()
        assert again.accepts == whole.accepts
        whole.take(token)


def test_ids_that_may_not_follow_are_refused() -> None:
    _, text, _ = demo()
    ids = text.encode('{"age": 1}')[len(text.prefix) :]
    with pytest.raises(BadRequest, match="position 2 may not follow in the format"):
        constraint(PERSON).replay(ids)
    rule = constraint(PERSON)
    with pytest.raises(BadRequest, match="format:"):
        rule.take(ids[2])
    with pytest.raises(BadRequest, match="format:"):
        rule.mask()


def test_a_vocabulary_that_cannot_write_a_text_is_an_error() -> None:
    """A mask without any allowed token raises BadRequest, because nothing could be drawn."""
    pieces = [b"a", b"b", b""]
    vocabulary = make_vocabulary(
        pieces, {2}, [], lambda text: ["ab".index(letter) for letter in text]
    )
    format = {"type": "regex", "pattern": "a[x-z]"}
    rule = Compiler(lambda: vocabulary, "", frozenset({2}), 3).constraint(format)
    rule.take(0)
    with pytest.raises(BadRequest, match="format:"):
        rule.mask()


def test_every_end_token_ends_an_answer_and_a_model_may_have_none() -> None:
    pieces = [b"a", b"b", b"", b"<end>", b"<stop>"]
    format = {"type": "regex", "pattern": "a?"}
    for eos in ({3, 4}, {4}, set[int]()):
        vocabulary = make_vocabulary(pieces, eos, [3], lambda text: [0] * len(text))
        compiler = Compiler(lambda made=vocabulary: made, "", frozenset(eos), len(pieces))  # type: ignore[misc]
        rule = compiler.constraint(format)
        assert set(tokens_of(rule.mask())) == {0} | eos


def test_the_tokenizer_of_forced_bytes_may_be_of_another_text() -> None:
    """If the tokenizer begins each text with a space, its ids for a forced text are not used.

    The longest tokens that give the text are forced instead.
    """
    pieces = [b"a", b"b", b"ab", b" ab", b"c"]
    vocabulary = make_vocabulary(pieces, {}, [], lambda text: [3])
    format = {"type": "choice", "choices": ["abc"]}
    rule = Compiler(lambda: vocabulary, "", frozenset(), len(pieces)).constraint(format)
    assert tokens_of(rule.mask()) == [2]


def test_a_text_that_names_a_special_token_is_written_as_text() -> None:
    """A grammar that names a special token allows the token's text, never the token itself."""
    pieces = [b"<", b"e", b">", b"<e>", b'"', b"<e", b"<>"]
    texts = {"<e>": [3], '"<e>"': [4, 3, 4]}
    vocabulary = make_vocabulary(pieces, {3}, [6], lambda text: texts.get(text, [6]))
    compiler = Compiler(lambda: vocabulary, "", frozenset({3}), len(pieces))
    rule = compiler.constraint({"type": "choice", "choices": ["<e>"]})
    assert tokens_of(rule.mask()) == [5]
    rule.take(5)
    assert tokens_of(rule.mask()) == [2]
    assert tokens_of(compiler.constraint({"type": "regex", "pattern": "<.*"}).mask()) == [0, 5]


def test_answers_share_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer whose constraint needs too many lexer states fails, and no other answer does."""
    _, _, table = demo()
    limits = LLParserLimits(step_lexer_fuel=400_000, max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr(grammar, "LIMITS", limits)
    format = {"type": "regex", "pattern": "[ab]*a[ab]{12}c"}
    letters = [table.pieces.index(b"a"), table.pieces.index(b"b")]
    drawn = np.random.default_rng(0)
    before = constraint(format)
    greedy = constraint(format)
    with pytest.raises(BadRequest, match="too many states"):
        for _ in range(500):
            allowed = [
                token for token in tokens_of(greedy.mask()) if b"c" not in table.pieces[token]
            ]
            greedy.take(int(drawn.choice(allowed)))
    for rule in (before, constraint(format)):
        rule.mask()
        rule.take(letters[0])
        assert letters[1] in tokens_of(rule.mask())


def test_the_newest_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_GRAMMARS", 2)
    loads: list[Any] = []
    pieces = [b"a", b"b", b"c"]

    def load() -> Any:
        loads.append(1)
        return make_vocabulary(
            pieces, {}, [], lambda text: ["abc".index(letter) for letter in text]
        )

    compiler = Compiler(load, "", frozenset(), 3)
    formats = [{"type": "choice", "choices": [choice]} for choice in "abc"]
    first = compiler.constraint(formats[0])
    first.take(0)
    assert tokens_of(compiler.constraint(formats[0]).mask()) == [0], "each answer has its own state"
    compiler.constraint(formats[1])
    compiler.constraint(formats[0])
    compiler.constraint(formats[2])
    assert [compiler.knows(entry) for entry in formats] == [True, False, True]
    assert loads == [1]


BEHIND: list[dict[str, Any]] = [
    PERSON,
    {"type": "choice", "choices": COLOURS},
    {"type": "regex", "pattern": "[a-z]{1,6}(-[0-9]+){0,3}; done"},
    {"type": "json"},
]


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(BEHIND),
    had=st.integers(0, 12),
    count=st.integers(0, 6),
    seed=st.integers(0, 2**32),
    wrong=st.booleans(),
    thinks=st.booleans(),
)
def test_masks_behind_drafts_are_those_of_single_tokens(
    format: dict[str, Any], had: int, count: int, seed: int, wrong: bool, thinks: bool
) -> None:
    """`masks_behind` returns the mask after each draft, and changes no constraint.

    The masks equal those that follow when the tokens are taken one by one. After a wrong draft no
    token is allowed.
    """
    folder, _, table = demo()
    draw = random.Random(seed)
    asked, single = constraint(format), constraint(format)
    pieces: list[bytes] = [piece or b"" for piece in table.pieces]
    if thinks:  # the thoughts may end among the drafts
        had = 0
        for rule in (asked, single):
            rule.begin_in_thoughts(
                Thoughts(lambda token: b"</think>" if token % 3 else pieces[token])
            )

    def next_token() -> int | None:
        allowed = [token for token in tokens_of(single.mask()) if token not in folder.eos_ids]
        return draw.choice(allowed) if allowed else None

    for _ in range(had):
        token = next_token()
        if token is None:
            return
        asked.take(token)
        single.take(token)
    masks, drafts = [single.mask()[0]], list[int]()
    for _ in range(count):
        token = next_token()
        if token is None:
            break
        drafts.append(token)
        single.take(token)
        masks.append(single.mask()[0])
    if wrong and drafts:
        at = draw.randrange(len(drafts))
        banned = {*range(len(pieces))} - {*tokens_of(masks[at][None])}
        drafts[at] = draw.choice(sorted(banned or folder.eos_ids))
        masks[at + 1 :] = [np.zeros_like(masks[0])] * (len(drafts) - at)
    before = asked.mask().copy()
    lines = asked.masks_behind(before, drafts)
    assert lines.shape == (len(drafts) + 1, before.size)
    assert [line.tolist() for line in lines] == [line.tolist() for line in masks]
    assert asked.mask().tolist() == before.tolist()
    if drafts and not wrong:
        asked.take(drafts[0])
        assert asked.mask().tolist() == masks[1][None].tolist()


def test_an_error_behind_a_draft_is_left_to_the_answer_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = constraint({"type": "regex", "pattern": "[a-z]{9}"})
    draft = tokens_of(rule.mask())[0]
    first = rule.mask()

    def fails(self: Any) -> Any:
        raise BadRequest("format: too complex")

    monkeypatch.setattr(type(rule), "mask", fails)
    lines = rule.masks_behind(first, [draft, draft])
    assert lines[0].tolist() == first[0].tolist() and not lines[1:].any()
