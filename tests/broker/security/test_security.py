"""The pure parts of what guards a pool: allow-list, rates, what a reload changes, beats."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.admin.reload import FIXED, compare
from mlxpool.broker.processes.remote_slots import sample_of
from mlxpool.broker.requests.quotas import MAX_DEBT, MAX_OWNERS, Rates
from mlxpool.broker.security.keyring import Keyring
from mlxpool.common.config.schema import BUILTIN, KeyConfig, ModelConfig, PoolConfig
from mlxpool.common.progress import Look
from mlxpool.common.protocol.to_broker import Beat

ALICE, BOB = "a" * 40, "b" * 40


# ---- the allow-list ----------------------------------------------------------------------------


def test_a_key_counts_in_its_role_alone() -> None:
    ring = Keyring({"alice": KeyConfig("client", ALICE), "hand": KeyConfig("worker", BOB)})
    assert ring.owner(f"key:{ALICE}", "client") == "key:alice"
    assert ring.owner(f"key:{BOB}", "worker") == "key:hand"
    for user, role in (
        (f"key:{ALICE}", "worker"),
        (f"key:{ALICE}", "admin"),
        (f"key:{BOB}", "client"),
        (f"key:{'c' * 40}", "client"),
        (ALICE, "client"),
        ("key:", ""),
        ("", "client"),
        ("", ""),
    ):
        assert ring.owner(user, role) == "", (user, role)


def test_who_is_on_this_machine_is_who_the_kernel_says() -> None:
    assert Keyring({}).owner("uid:7", "client") == "uid:7"


@pytest.mark.parametrize(
    ("after", "revoked"),
    [
        ({"alice": KeyConfig("client", ALICE)}, {}),
        ({}, {ALICE: "alice"}),
        ({"alice": KeyConfig("worker", ALICE)}, {ALICE: "alice"}),
        ({"alice": KeyConfig("client", BOB)}, {ALICE: "alice"}),
        ({"other": KeyConfig("client", ALICE)}, {ALICE: "alice"}),
        ({"alice": KeyConfig("client", ALICE), "bob": KeyConfig("client", BOB)}, {}),
    ],
)
def test_what_a_new_list_revokes(after: dict[str, KeyConfig], revoked: dict[str, str]) -> None:
    ring = Keyring({"alice": KeyConfig("client", ALICE)})
    assert ring.replace(after) == revoked
    assert ring.replace(after) == {}


# ---- rates -------------------------------------------------------------------------------------


def test_a_seconds_worth_is_free_and_the_rest_has_to_wait() -> None:
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


def test_a_debt_has_an_end() -> None:
    rates = Rates()
    rates.spend("a", 10**9, 10, 0.0)
    assert rates.broke("a", 10, 0.0)
    assert rates.wait("a", 10, 0.0) == MAX_DEBT
    assert not rates.broke("a", 10, 0.1)


def test_no_limit_is_no_limit() -> None:
    rates = Rates()
    rates.spend("a", 10**9, 0, 0.0)
    assert rates.wait("a", 0, 0.0) == 0
    assert not rates.broke("a", 0, 0.0)


def test_who_owes_nothing_is_forgotten() -> None:
    rates = Rates()
    for number in range(MAX_OWNERS):
        rates.spend(f"o{number}", 1, 10, float(number))
    rates.spend("last", 1, 10, MAX_OWNERS + 5.0)
    assert len(rates) < MAX_OWNERS


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 50)), max_size=60))
def test_nobody_gets_more_than_his_rate(spendings: list[tuple[float, int]]) -> None:
    """What passes is at most a burst, what the time allows, and the last message's excess."""
    limit, now, passed, largest, rates = 20, 0.0, 0, 0, Rates()
    for pause, amount in spendings:
        now += pause
        if not rates.wait("a", limit, now):
            rates.spend("a", amount, limit, now)
            passed, largest = passed + amount, max(largest, amount)
    assert passed <= limit * (1 + now) + largest + 1e-6


# ---- what a reload changes ---------------------------------------------------------------------

POOL = PoolConfig(models=BUILTIN, keys={"alice": KeyConfig("client", ALICE)})


def test_the_same_settings_change_nothing() -> None:
    change = compare(POOL, POOL)
    assert change.config == POOL
    assert not any(
        (change.fixed, change.limits, change.added, change.gone, change.changed, change.keys)
    )


def test_every_kind_of_change_is_told() -> None:
    models = {"demo": replace(BUILTIN["demo"], replicas=2), "new": ModelConfig(path="builtin:demo")}
    new = replace(
        POOL, models=models, keys={}, queue_limit=7, front=("tcp://127.0.0.1:1",), metrics="h:1"
    )
    change = compare(POOL, new)
    assert change.fixed == ("front", "metrics")
    assert change.limits == ("queue_limit",)
    assert (change.added, change.gone, change.changed) == (("new",), ("counting",), ("demo",))
    assert change.keys == ("alice",)
    assert change.config == replace(new, front=(), metrics=""), "what cannot change stays"


def test_what_needs_a_restart_is_a_setting() -> None:
    assert set(FIXED) <= set(PoolConfig.__dataclass_fields__)


# ---- what beats tell ---------------------------------------------------------------------------


def test_a_beat_is_a_look() -> None:
    beat = {"phase": "prefill", "progress": 3, "look": [512, False, 1000, 2000]}
    assert sample_of(Beat.parse(beat)).look == Look("prefill", 0, 3, 512, False, 1000, 2000)


def test_before_the_first_beat_it_loads() -> None:
    assert sample_of(Beat()).look.phase == "load"


@pytest.mark.parametrize(
    "beat",
    [
        {"phase": "holiday"},
        {"phase": 7, "progress": 1},
        {"phase": "decode", "progress": "x"},
        {"phase": "decode", "look": "x"},
        {"phase": "decode", "look": [1, 2]},
        {"phase": ["decode"]},
    ],
)
def test_a_strange_beat_harms_nobody(beat: dict[str, object]) -> None:
    assert sample_of(Beat.parse(beat)).look.count == 0 or beat.get("progress")
