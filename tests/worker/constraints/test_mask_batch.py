"""Masks that are made together equal those that are made one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxpool.worker.constraints.mask_batch import masks_of
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
