"""Floods of one owner, beside a stream of another that must continue."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from mlxpool.client import Client
from mlxpool.common.errors import OverQuota
from support.bystander import Bystander
from support.pool import until
from support.secure_pool import COUNTING_MODEL, SecurePool


def over_quota(client: Client, prompt: str, setting: str) -> OverQuota | None:
    """Returns the refusal of a request by this setting, or None."""
    try:
        client.generate("counting", prompt, max_tokens=1)
    except OverQuota as error:
        return error if setting in str(error) else None
    return None


def cancels(client: Client) -> OverQuota | None:
    for _ in range(20):
        client.cancel(bytes(16))
    return over_quota(client, "x", "quota_cancels")


def bytes_too_many(client: Client) -> OverQuota | None:
    return over_quota(client, "x" * 60_000, "quota_bytes")


def test_floods_are_bounded_by_their_owners_quota(tmp_path: Path) -> None:
    """Floods of bytes, requests and cancels; bob's stream stays far below his quota."""
    quotas = "quota_requests = 2\nquota_bytes = '20KB'\nquota_cancels = 1\nquota_tokens = 3000"
    with (
        SecurePool(tmp_path, pool=quotas, models=COUNTING_MODEL.format(1000)) as secure,
        Bystander(partial(secure.dial, "bob")) as bystander,
        secure.dial("alice") as alice,
    ):
        held = [alice.stream("counting", "x", max_tokens=10**6) for _ in range(2)]
        until(lambda: len(secure.ask("requests")["requests"]) == 3, "both are there")
        with pytest.raises(OverQuota, match=r"key:alice has 2 live requests, at most 2") as caught:
            alice.generate("counting", "x", max_tokens=1)
        assert caught.value.details == {"owner": "key:alice", "value": 2, "bound": 2}
        for stream in held:
            stream.close()
        until(lambda: len(secure.ask("requests")["requests"]) == 1, "both are cancelled")
        assert until(lambda: cancels(alice), "its cancels are too many").retry_after_ms
        with secure.dial("alice") as flood:
            error = until(lambda: bytes_too_many(flood), "its bytes are too many")
        assert "20000 bytes a second" in str(error) and error.retry_after_ms
        bystander.check_unaffected()
