"""Tests the limit of digits: endless numbers end; strings and required digits are not cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.worker.constraints import mask_batch
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.mask_table import new_table, words_of_mask
from mlxpool.worker.constraints.numbers import MAX_DIGITS, NumberBound, NumberTokens
from mlxpool.worker.constraints.vocabulary import make_vocabulary
from support.constrained_answers import tokens_of

PIECES = [bytes([byte]) for byte in range(128)] + [b"777", b"e7", b'"a": ', b"\xff"]
END = len(PIECES) - 1
VOCABULARY: Any = make_vocabulary(PIECES, {END}, [], lambda text: list(text.encode()))
COMPILER = Compiler(lambda: VOCABULARY, "", frozenset({END}), len(PIECES))


def schema(**given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": given}


def greedy(rule: Constraint, *wishes: str, most: int = 300) -> str:
    """Returns the text of a model that draws the first allowed token of `wishes`.

    If no wish is allowed, it draws the token that ends the text soonest. Raises AssertionError
    after `most` tokens.
    """
    text = b""
    for _ in range(most):
        allowed = tokens_of(rule.mask())
        tokens = [PIECES.index(wish.encode()) for wish in wishes]
        token = next(
            (choice for choice in [*tokens, END, *b'},]"'] if choice in allowed), allowed[0]
        )
        if token == END:
            return text.decode()
        rule.take(token)
        text += PIECES[token]
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize(
    "wishes",
    [("7",), ("777",), ("0", "."), ("e", "7"), ("e", "777"), ("e7", "777"), (".", "7"),
     ("e", "-", "777")],
)  # fmt: skip
def test_a_number_ends(kind: str, wishes: tuple[str, ...]) -> None:
    rule = COMPILER.constraint(schema(type=kind))
    rule.take(PIECES.index(b"3"))
    number = json.loads("3" + greedy(rule, *wishes))
    assert abs(number) < 10**150, "it is finite"


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json"},
        schema(),
        schema(type="object", properties={"a": {"type": "number"}}),
        {"type": "lark", "grammar": 'start: "<" a ">"\na: %json {"type": "object"}'},
    ],
)
def test_so_do_those_of_members(format: dict[str, Any]) -> None:
    rule = COMPILER.constraint(format)
    begin = '<{"a": ' if format["type"] == "lark" else '{"a": '
    rule.replay(list(begin.encode()))
    assert len(greedy(rule, "7")) < 2 * MAX_DIGITS


def test_texts_have_as_many_digits_as_they_like() -> None:
    rule = COMPILER.constraint(schema(type="string"))
    rule.replay(list(b'"' + b"7" * 3 * MAX_DIGITS))
    assert PIECES.index(b"7") in tokens_of(rule.mask())
    rule = COMPILER.constraint({"type": "regex", "pattern": "[0-9]{200}"})
    assert greedy(rule, "7") == "7" * 200


def test_digits_that_alone_may_follow_stay() -> None:
    words = -(-len(PIECES) // 32)
    tokens = NumberTokens.of(PIECES, words)
    bound = NumberBound(tokens)
    bound.take_all([PIECES.index(b"7")] * MAX_DIGITS)
    only = tokens.digits.copy()
    bound.limit(only)
    assert (only == tokens.digits).all()


def test_masks_that_are_made_together_are_the_same() -> None:
    rules = [COMPILER.constraint(schema(type="number")) for _ in range(3)]
    for number, rule in enumerate(rules):
        rule.replay(list(b"7" * (MAX_DIGITS - 1 + number)))
    table = new_table(4, words_of_mask(rules[0].tokens))
    mask_batch.fill_table(rules, table)
    for line, rule in enumerate(rules):
        alone = tokens_of(rule.mask())
        assert tokens_of(table.masks[line : line + 1]) == alone
        assert (PIECES.index(b"7") in alone) is (line == 0)


def test_a_token_that_is_given_back_does_not_count() -> None:
    rule = COMPILER.constraint(schema(type="number"))
    seven = PIECES.index(b"7")
    rule.replay([seven] * (MAX_DIGITS - 1))
    rule.matcher.consume_token(seven)
    rule.taken_ahead(seven, find=False)
    rule.give_back()
    assert seven in tokens_of(rule.mask())
    rule.take(seven)
    assert seven not in tokens_of(rule.mask()) and seven not in tokens_of(rule.copy().mask())
