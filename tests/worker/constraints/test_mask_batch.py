"""Masks that are made together equal those that are made one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxpool.worker.constraints import mask_batch, masks
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.mask_batch import masks_of
from mlxpool.worker.constraints.masks import Masks
from support.constrained_answers import constraint, tokens_of

FORMATS: list[dict[str, Any]] = [
    {"type": "regex", "pattern": "[a-z]{3,8}(-[0-9]{2}){1,3}"},
    {"type": "json_schema", "schema": {"type": "string", "maxLength": 9}},
    {"type": "choice", "choices": ["yes", "no", "perhaps not"]},
    {"type": "json"},
]
MOST = 12  # masks of each row


def test_masks_made_together_are_those_made_one_by_one() -> None:
    drawn = np.random.default_rng(5)
    together, single = ([constraint(format) for format in FORMATS] for _ in range(2))
    together[3].begin_in_thoughts(lambda token: b"")
    single[3].begin_in_thoughts(lambda token: b"")
    compared = 0
    while len(single) > 1 and compared < MOST:
        compared += 1
        masks = masks_of(together, together[0].tokens)
        for number in reversed(range(len(together))):
            found, wanted = masks[number], single[number].mask()
            assert not isinstance(found, Exception) and (found == wanted).all()
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
    failed, found = masks_of([wrong, right], right.tokens)
    assert isinstance(failed, Exception) and str(failed).startswith("format: ")
    assert not isinstance(found, Exception) and (found == expected).all()


@pytest.mark.parametrize("many", [0, 99])
def test_tokens_taken_ahead_are_those_taken_one_by_one(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library's threads or by one; masks are begun before the constraints are told."""
    monkeypatch.setattr(mask_batch, "MANY", many)
    monkeypatch.setattr(masks, "few", lambda: 0)
    monkeypatch.setattr(masks, "MAX_WAIT", 60.0)
    monkeypatch.setattr(masks, "QUICK", 60.0)
    drawn, maker = np.random.default_rng(7), Masks()
    rows = [(constraint(format), constraint(format)) for format in FORMATS]
    while not all(maker.is_quick(one) for one, _ in rows):
        maker.make([one for one, _ in rows])
    compared = 0
    while len(rows) > 1 and compared < MOST:
        compared += 1
        found = maker.make([one for one, _ in rows])
        tokens: dict[Constraint, int] = {}
        for one, single in rows:
            wanted, mask = single.mask(), found[one]
            assert not isinstance(mask, Exception) and (mask == wanted).all()
            tokens[one] = int(drawn.choice(tokens_of(wanted)))
        taken = maker.take([*tokens.items()])
        assert taken == [*tokens]
        maker.begin_together([one for one in taken if not one.finished])
        for one, single in rows:
            one.take(tokens[one])
            single.take(tokens[one])
            assert (one.finished, one.accepts) == (single.finished, single.accepts)
            assert one.forced(find=False) == single.forced(find=True)
        rows = [(one, single) for one, single in rows if not single.finished]
    assert compared >= 3, "the answers ended before several tokens were taken together"


def test_a_token_that_may_not_follow_is_refused_when_it_is_taken() -> None:
    wrong, right = constraint(FORMATS[0]), constraint(FORMATS[0])
    allowed = right.mask()
    token, other = tokens_of(~allowed & right.others)[0], tokens_of(allowed)[0]
    assert mask_batch.take_together([(wrong, token), (right, other)], find=True) == [right]
    right.take(other)
    with pytest.raises(Exception, match=r"^format: "):
        wrong.take(token)


def test_a_mask_that_is_late_keeps_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of masks is used again when all of them were handed out, and not before."""
    monkeypatch.setattr(masks, "few", lambda: 0)
    monkeypatch.setattr(masks, "MAX_WAIT", 60.0)
    monkeypatch.setattr(masks, "QUICK", 60.0)
    rows, maker = [constraint(FORMATS[1]) for _ in range(3)], Masks()
    while not all(map(maker.is_quick, rows)):
        maker.make(rows)
    wanted = constraint(FORMATS[1]).mask()
    first = maker.make(rows)
    assert all(np.array_equal(mask, wanted) for mask in first.values())  # type: ignore[arg-type]
    maker.begin_together(rows)
    kept = maker.make(rows[:2])  # the third one's is not handed out
    maker.begin_together(rows[:2])
    again = maker.make(rows[:2])
    assert not np.shares_memory(kept[rows[0]], again[rows[0]])
    left = maker.make(rows[2:])
    assert np.array_equal(left[rows[2]], wanted)  # type: ignore[arg-type]
