"""The allow-list: keys, roles, and revocations by a new list."""

from __future__ import annotations

import os

import pytest

from mlxpool.broker.security.keyring import Keyring, may_name_owners
from mlxpool.common.config.schema import KeyConfig

ALICE, BOB = "a" * 40, "b" * 40


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


def test_users_of_this_machine_are_known_by_the_kernels_uid() -> None:
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
def test_a_new_list_revokes_removed_and_changed_keys(
    after: dict[str, KeyConfig], revoked: dict[str, str]
) -> None:
    ring = Keyring({"alice": KeyConfig("client", ALICE)})
    assert ring.replace(after) == revoked
    assert ring.replace(after) == {}


def test_who_may_name_owners() -> None:
    keys = {
        "gateway": KeyConfig("client", ALICE, may_name_owners=True),
        "bob": KeyConfig("client", BOB),
    }
    assert may_name_owners("key:gateway", keys)
    assert may_name_owners(f"uid:{os.getuid()}", {}) and may_name_owners("uid:0", {})
    for owner in ("key:bob", "key:nobody", "gateway", "for:gateway", "host:127.0.0.1", "uid:77777"):
        assert not may_name_owners(owner, keys), owner
