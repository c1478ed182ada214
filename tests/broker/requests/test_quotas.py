"""Rate limits: bursts, debts after large messages, and accounts that owe nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.requests import blame
from mlxpool.broker.requests.quotas import MAX_DEBT, MAX_OWNERS, Rates


def test_a_burst_of_one_second_is_free_and_the_rest_waits() -> None:
    rates = Rates()
    assert rates.wait("a", 10, 0.0) == 0
    rates.spend("a", 10, 10, 0.0)
    assert rates.wait("a", 10, 0.0) > 0
    assert rates.wait("a", 10, 0.1) == 0
    assert rates.wait("b", 10, 0.0) == 0, "another owner has an account of his own"


def test_one_large_message_passes_and_is_paid_for_afterwards() -> None:
    rates = Rates()
    rates.spend("a", 35, 10, 0.0)
    assert rates.wait("a", 10, 0.0) == pytest.approx(2.5)
    assert rates.wait("a", 10, 2.6) == 0


def test_a_debt_is_bounded() -> None:
    rates = Rates()
    rates.spend("a", 10**9, 10, 0.0)
    assert rates.broke("a", 10, 0.0)
    assert rates.wait("a", 10, 0.0) == MAX_DEBT
    assert not rates.broke("a", 10, 0.1)


def test_a_limit_of_zero_is_no_limit() -> None:
    rates = Rates()
    rates.spend("a", 10**9, 0, 0.0)
    assert rates.wait("a", 0, 0.0) == 0
    assert not rates.broke("a", 0, 0.0)


def test_accounts_that_owe_nothing_are_dropped() -> None:
    rates = Rates()
    for number in range(MAX_OWNERS):
        rates.spend(f"o{number}", 1, 10, float(number))
    rates.spend("last", 1, 10, MAX_OWNERS + 5.0)
    assert len(rates) < MAX_OWNERS


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 50)), max_size=60))
def test_no_owner_gets_more_than_its_rate(spendings: list[tuple[float, int]]) -> None:
    """An owner gets at most a burst, plus the rate times the elapsed time, plus one message."""
    limit, now, passed, largest, rates = 20, 0.0, 0, 0, Rates()
    for pause, amount in spendings:
        now += pause
        if not rates.wait("a", limit, now):
            rates.spend("a", amount, limit, now)
            passed, largest = passed + amount, max(largest, amount)
    assert passed <= limit * (1 + now) + largest + 1e-6


# ---- blame ---------------------------------------------------------------------------------------
# Charges of requests for the end of a worker.


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
