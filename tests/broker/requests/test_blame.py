"""Which requests are charged for the end of a worker."""

from __future__ import annotations

import pytest

from mlxpool.broker.requests import blame


def test_the_shares_of_a_charge() -> None:
    ids = [bytes([n]) * 16 for n in range(4)]
    assert blame.shares(ids, ids[2]) == {ids[0]: 0, ids[1]: 0, ids[2]: 1, ids[3]: 0}
    assert blame.shares(ids, None) == dict.fromkeys(ids, 0.25)
    assert blame.shares(ids, b"gone") == dict.fromkeys(ids, 0.25)


@pytest.mark.parametrize(
    ("charge", "bound"),
    [(0.0, 0), (0.125, 2), (0.9, 1), (1.0, 1), (0.01, 25), (0.5, 1), (1 / 8 + 1 / 2, 1)],
)
def test_the_batch_bound_follows_from_the_charge(charge: float, bound: int) -> None:
    assert blame.batch_bound(charge) == bound


def test_the_batch_bound_is_a_quarter_of_those_that_were_charged() -> None:
    for group in range(2, 200):
        assert blame.batch_bound(1 / group) == max(1, group // 4)
