"""Tests that masks made in one batch equal masks made one by one."""

from __future__ import annotations

import gc
import weakref
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxpool.worker.constraints import mask_batch, mask_jobs, masks
from mlxpool.worker.constraints.constraint import Constraint, Words
from mlxpool.worker.constraints.mask_batch import fill_table
from mlxpool.worker.constraints.mask_jobs import MadeMasks
from mlxpool.worker.constraints.mask_table import new_table, only_token, words_of_mask
from mlxpool.worker.constraints.masks import Masks
from mlxpool.worker.prompt.thoughts import Thoughts
from support.constrained_answers import constraint, tokens_of

FORMATS: list[dict[str, Any]] = [
    {"type": "regex", "pattern": "[a-z]{3,8}(-[0-9]{2}){1,3}"},
    {"type": "json_schema", "schema": {"type": "string", "maxLength": 9}},
    {"type": "choice", "choices": ["yes", "no", "perhaps not"]},
    {"type": "json"},
]
MOST = 12  # the most masks of each row that are compared
NO_RUN = 99  # forced tokens; no run has as many


def masks_of(constraints: list[Constraint]) -> list[Words | Exception]:
    """Returns the masks that are made together; in place of a failed mask, its exception."""
    table = new_table(len(constraints), words_of_mask(constraints[0].tokens))
    filled = fill_table(constraints, table)
    made_masks = MadeMasks(table, filled.used, dict(zip(constraints, filled.lines, strict=True)))
    return [
        filled.failed.get(at) or mask_in(made_masks, rule) for at, rule in enumerate(constraints)
    ]


def mask_in(made: MadeMasks, one: Constraint) -> Words:
    """Returns the mask [1, words] of one constraint in a batch of masks."""
    line = made.lines[one]
    token = only_token(line)
    if token is not None:
        return one.mask_of(token)
    return made.table.masks[line : line + 1, : one.others.size].copy()


def test_masks_made_together_are_those_made_one_by_one() -> None:
    drawn = np.random.default_rng(5)
    together, single = ([constraint(format) for format in FORMATS] for _ in range(2))
    together[3].begin_in_thoughts(Thoughts(lambda token: b""))
    single[3].begin_in_thoughts(Thoughts(lambda token: b""))
    compared = 0
    while len(single) > 1 and compared < MOST:
        compared += 1
        masks = masks_of(together)
        for number in reversed(range(len(together))):
            mask, wanted = masks[number], single[number].mask()
            assert not isinstance(mask, Exception) and (mask == wanted).all()
            token = int(drawn.choice(tokens_of(wanted)))
            together[number].take(token)
            single[number].take(token)
            if single[number].finished:
                del together[number], single[number]
    assert compared >= 3, "the answers ended before several masks were made together"


def test_a_mask_that_fails_is_an_error_of_its_own_row() -> None:
    wrong, right = constraint(FORMATS[0]), constraint(FORMATS[0])
    expected = right.mask()
    assert not wrong.matcher.consume_token(tokens_of(~expected)[0])
    failed, mask = masks_of([wrong, right])
    assert isinstance(failed, Exception) and str(failed).startswith("format: ")
    assert not isinstance(mask, Exception) and (mask == expected).all()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("many", [0, 99])
def test_tokens_taken_ahead_are_those_taken_one_by_one(
    many: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests one thread and several threads that take tokens, in `take` or in `take_ahead`."""
    monkeypatch.setattr(mask_batch, "MANY", many)
    monkeypatch.setattr(masks, "few", lambda: 0)
    monkeypatch.setattr(masks, "MAX_WAIT", 60.0)
    monkeypatch.setattr(masks, "QUICK", 60.0)
    drawn, maker = np.random.default_rng(7), Masks()
    rows = [(constraint(format), constraint(format)) for format in FORMATS]
    while not all(maker.is_quick(rule) for rule, _ in rows):
        maker.make([rule for rule, _ in rows])
    compared = 0
    while len(rows) > 1 and compared < MOST:
        compared += 1
        made_masks = maker.make([rule for rule, _ in rows])
        tokens: dict[Constraint, int] = {}
        for batched, single in rows:
            wanted = single.mask()
            assert (mask_in(made_masks, batched) == wanted).all()
            tokens[batched] = int(drawn.choice(tokens_of(wanted)))
        if ahead:
            maker.take_ahead([*tokens.items()], NO_RUN)
        maker.take([*tokens.items()], NO_RUN)
        assert not any(rule.takes_ahead for rule in tokens)
        for batched, single in rows:
            batched.take(tokens[batched])
            single.take(tokens[batched])
            assert (batched.finished, batched.accepts) == (single.finished, single.accepts)
            assert batched.forced(find=False) == single.forced(find=True)
        rows = [(rule, single) for rule, single in rows if not single.finished]
    assert compared >= 3, "the answers ended before several tokens were taken together"


def test_a_token_that_may_not_follow_is_refused_when_it_is_taken() -> None:
    wrong, right = constraint(FORMATS[0]), constraint(FORMATS[0])
    allowed = right.mask()
    token, other = tokens_of(~allowed & right.others)[0], tokens_of(allowed)[0]
    assert mask_batch.take_together([(wrong, token), (right, other)], find=True) == [right]
    right.take(other)
    with pytest.raises(Exception, match=r"^format: "):
        wrong.take(token)


class Panic(BaseException):
    """Stands for a panic of the grammar library, which is not an Exception in Python."""


def broken(*args: Any) -> Any:
    raise Panic("the library failed")


@pytest.mark.parametrize("many", [0, 99])
def test_a_library_that_fails_ends_the_answers_whose_tokens_it_had(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the library fails in a call for several answers, all of these answers fail.

    If it fails in a call for one answer, only this answer fails.
    """
    monkeypatch.setattr(mask_batch, "MANY", many)
    rows, maker = quick_rows(monkeypatch)
    token = tokens_of(rows[0].copy().mask())[0]
    failing = SimpleNamespace(consume_token=broken, consume_token_par=broken)
    monkeypatch.setattr(mask_batch, "executor", lambda: failing)
    true, rows[0].matcher = rows[0].matcher, failing  # type: ignore[assignment]
    pairs = [(row, token) for row in rows]
    maker.take_ahead(pairs, least=0)
    maker.take(pairs, least=0)
    rows[0].matcher = true
    for rule in rows if many == 0 else rows[:1]:
        assert not rule.goes_on(token, NO_RUN)
        with pytest.raises(RuntimeError, match="Panic: the library failed"):
            rule.take(token)
    if many:
        assert all(row.goes_on(token, NO_RUN) for row in rows[1:])


def test_masks_go_on_behind_one_that_the_library_failed_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, maker = quick_rows(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(mask_batch, "fill_table", broken)
        failed = maker.make(rows).failed
    assert [str(failed[row]) for row in rows] == ["Panic: the library failed"] * 3
    assert [*maker.make(rows).lines] == rows


def quick_rows(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Constraint], Masks]:
    """Three rows of one format, whose masks another thread makes together."""
    monkeypatch.setattr(masks, "few", lambda: 0)
    monkeypatch.setattr(masks, "MAX_WAIT", 60.0)
    monkeypatch.setattr(masks, "QUICK", 60.0)
    rows, maker = [constraint(FORMATS[1]) for _ in range(3)], Masks()
    while not all(map(maker.is_quick, rows)):
        maker.make(rows)
    return rows, maker


def test_a_mask_that_is_not_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused mask stays valid for a later batch, although the table's memory is reused."""
    rows, maker = quick_rows(monkeypatch)
    wanted = [constraint(FORMATS[1]).mask()]
    first = maker.make(rows)
    assert all(np.array_equal(mask_in(first, row), wanted[0]) for row in rows)
    maker.begin_early(rows)
    some = maker.make(rows[:2])
    assert [*some.lines] == rows[:2] and some.table is first.table
    for rule in rows[:2]:
        rule.take(tokens_of(wanted[0])[0])
    wanted.append(rows[0].copy().mask())
    assert not np.array_equal(wanted[0], wanted[1])
    again = maker.make(rows)
    assert all(np.array_equal(mask_in(again, row), wanted[1]) for row in rows[:2])
    assert np.array_equal(mask_in(again, rows[2]), wanted[0])


def test_tokens_that_are_given_back_were_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constraints stay unchanged, whether the other thread has begun to take the tokens or not."""
    rows, maker = quick_rows(monkeypatch)
    wanted = rows[0].mask()
    for helps in (True, False):
        with monkeypatch.context() as patch:
            if not helps:
                patch.setattr(mask_jobs, "helper", lambda: SimpleNamespace(submit=lambda job: None))
                patch.setattr(masks, "helper", mask_jobs.helper)
            maker.take_ahead([(row, tokens_of(wanted)[at]) for at, row in enumerate(rows)], NO_RUN)
            assert not maker.is_quick(rows[0]) or rows[0].record.making is not None
            maker.give_back()
        made_masks = maker.make(rows)
        assert all(np.array_equal(mask_in(made_masks, row), wanted) for row in rows)
    for rule in rows:
        rule.take(tokens_of(wanted)[-1])  # any token may still be the next one


def test_masks_of_answers_that_ended_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask for the position after an answer's last token is never used; its memory is freed."""
    rows, maker = quick_rows(monkeypatch)
    (table,) = maker._free
    left = weakref.ref(rows[0])
    for _ in range(4):
        token = tokens_of(rows[0].copy().mask())[0]
        maker.take_ahead([(row, token) for row in rows], NO_RUN)
        maker.take([(row, token) for row in rows], NO_RUN)
        batch = rows[0].record.making
        assert batch.constraints and batch.wait(monotonic() + 60)
        assert batch.table is table, "memory of masks that nobody asks for is not used again"
        del batch
        for rule in rows:
            rule.take(token)
            rule.ended = True
        rows = [constraint(FORMATS[1]) for _ in range(3)]
        for rule in rows:
            rule.record.quick = masks.QUICK_MASKS
    gc.disable()
    try:
        maker.make(rows)
        assert left() is None, "an answer that has ended keeps its grammar"
    finally:
        gc.enable()


def test_forced_tokens_are_found_again_when_one_is_given_back() -> None:
    rule = constraint({"type": "choice", "choices": ["something that is forced"]})
    forced = rule.forced(find=True)
    assert len(forced) > 3
    for taken in range(2):
        assert mask_batch.take_together([(rule, forced[taken])], find=True) == [rule]
        rule.give_back()
        assert rule.forced(find=True) == forced[taken:]
        rule.take(forced[taken])
    assert rule.forced(find=True) == forced[2:]


def test_an_answer_may_be_cancelled_when_its_token_was_given_back() -> None:
    """After `give_back` the constraint has stored `accepts` and `finished`, and needs no matcher.

    A cancel reads both while another thread may use the matcher.
    """
    rule = constraint({"type": "choice", "choices": ["yes", "yes and no"]})
    while not rule.accepts:
        token = tokens_of(rule.mask())[0]
        assert mask_batch.take_together([(rule, token)], find=True) == [rule]
        rule.give_back()
        true = rule.matcher
        rule.matcher = SimpleNamespace(is_accepting=broken, is_stopped=broken)  # type: ignore[assignment]
        assert (rule.accepts, rule.finished) == (False, False)
        rule.matcher = true
        rule.take(token)
    assert not rule.finished


def test_masks_of_several_makers_come_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch joins masks begun early, masks begun later, and a mask that a constraint made."""
    rows, maker = quick_rows(monkeypatch)
    slow = constraint(FORMATS[0])
    forced = constraint({"type": "choice", "choices": ["nothing else"]})
    wanted = {answer: answer.copy().mask() for answer in (*rows, slow, forced)}
    maker.begin_early(rows[:2])
    maker.begin_early(rows[2:])
    made_masks = maker.make([slow, *rows, forced])
    assert {*made_masks.lines} == {*wanted} and not made_masks.failed and not made_masks.late
    for rule, mask in wanted.items():
        assert np.array_equal(mask_in(made_masks, rule), mask)
