"""Owners that a gateway names have their own rights, turns and quotas.

Other clients may not name owners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpool.common.errors import OverQuota, Unauthorized, UnknownJob
from mlxpool.gateway.settings import Broker
from support.gateway_thread import GatewayThread
from support.http_owners import ALICE, BOB, http_client, keys_file
from support.pool import PATIENCE, until
from support.secret_file import secret_file
from support.secure_pool import COUNTING_MODEL, SecurePool

ENDLESS: Any = {"max_tokens": 10**6}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecurePool]:
    """A pool in which alice's key may name owners, and bob's may not."""
    folder = tmp_path_factory.mktemp("pool")
    settings = f"quota_requests = 2\nstate_dir = '{folder / 'jobs'}'"
    pool = SecurePool(folder, pool=settings, models=COUNTING_MODEL.format(1000))
    text = pool.config.read_text().replace(
        "[keys.alice]\n", "[keys.alice]\nmay_name_owners = true\n"
    )
    pool.config.write_text(text)
    with pool:
        yield pool


def owners(secure: SecurePool) -> list[str]:
    return sorted(request["owner"] for request in secure.ask("requests")["requests"])


def test_quotas_and_rights_are_those_of_the_named_owner(secure: SecurePool) -> None:
    with secure.dial("alice") as alice:
        one, two = alice.for_owner("one"), alice.for_owner("two")
        held = [one.stream("counting", "x", **ENDLESS) for _ in range(2)]
        until(lambda: owners(secure) == ["for:one"] * 2, "both are there")
        with pytest.raises(OverQuota, match="for:one has 2 live requests"):
            one.generate("counting", "x", max_tokens=1)
        assert two.generate("counting", "x", max_tokens=1).ids
        assert alice.generate("counting", "x", max_tokens=1).ids
        assert two.cancel(held[0].id)["state"] == "unknown"
        assert one.cancel(held[0].id)["state"] == "streaming"
        for stream in held:
            stream.close()
        until(lambda: not owners(secure), "both are cancelled")
        job = one.submit("counting", "x", key="mine", max_tokens=2)
        assert list(one.fetch("mine").read().ids)
        for other in (two, alice):
            with pytest.raises(UnknownJob):
                other.job(job)
            with pytest.raises(UnknownJob):
                other.fetch(job).read()


def test_a_cancel_of_another_owners_reading_is_answered(secure: SecurePool) -> None:
    """The cancel ends nothing, and its answer reveals nothing of the other owner's job."""
    with secure.dial("alice") as alice:
        one, two = alice.for_owner("one"), alice.for_owner("two")
        one.submit("counting", "x", key="read", max_tokens=10**6)
        stream = one.fetch("read")
        deltas = iter(stream)
        assert next(deltas).ids
        assert two.cancel(stream.id) == {"state": "unknown", "pos": 0}
        assert next(deltas).ids
        assert one.cancel(stream.id)["state"] == "streaming"
        assert stream.read().reason == "cancelled"
        assert one.job("read")["state"] == "running"
        one.cancel(key="read")


def test_a_key_without_the_setting_is_refused_by_name(secure: SecurePool) -> None:
    with secure.dial("bob") as bob:
        named = bob.for_owner("one")
        with pytest.raises(Unauthorized, match=r"owner: key:bob .* may_name_owners"):
            named.generate("counting", "x", max_tokens=1)
        with pytest.raises(Unauthorized, match="may_name_owners"):
            named.jobs()
        # A client that names no owner is not disturbed.
        assert bob.generate("counting", "x", max_tokens=1).ids


def test_keys_of_http_are_owners_of_the_pool(secure: SecurePool, tmp_path: Path) -> None:
    keys = keys_file(tmp_path)
    body = {"model": "counting", "prompt": "x", "stream": True, **ENDLESS}

    def begun(gateway: GatewayThread, key: str) -> Any:
        client = http_client(gateway.url, key)
        request = client.build_request("POST", "/v1/completions", json=body)
        return client, client.send(request, stream=True)

    with GatewayThread(secure.run_dir, keys=keys) as gateway:
        open_ones = [begun(gateway, key) for key in (ALICE, ALICE, BOB)]
        until(lambda: owners(secure) == ["for:alice", "for:alice", "for:bob"], "they run")
        client, refused = begun(gateway, ALICE)
        assert refused.status_code == 429 and "for:alice" in refused.read().decode()
        client.close()
        for open_client, _ in open_ones:
            open_client.close()
        until(lambda: not owners(secure), "a request whose client is gone is cancelled")


def test_a_gateway_over_tcp_names_owners_if_both_sides_say_so(
    secure: SecurePool, tmp_path: Path
) -> None:
    keys = secret_file(tmp_path / "keys", f"carol {ALICE}\n")
    asked: dict[str, Any] = {"model": "counting", "prompt": "x", "max_tokens": 1}
    headers = {"authorization": f"Bearer {ALICE}"}

    def answer(name: str, path: str, name_owners: bool | None) -> httpx.Response:
        to_broker = {
            "remote": (Broker(secure.endpoint("front"), secure.server_key),),
            "key": str(secure.keys.path(name)),
        }
        with GatewayThread(
            secure.run_dir, keys=keys, name_owners=name_owners, **to_broker
        ) as gateway:
            url = f"{gateway.url}{path}"
            return httpx.post(url, json=asked, headers=headers, timeout=PATIENCE)

    assert answer("alice", "/v1/completions", True).status_code == 200
    # Without names, all clients of the gateway are one owner.
    assert answer("bob", "/v1/completions", None).status_code == 200
    refused = answer("bob", "/v1/completions", True)
    assert refused.status_code == 502 and "may_name_owners" in refused.text
    asked = {"model": "counting", "prompt": "x"}
    assert answer("alice", "/v1/jobs", True).status_code == 200
    unnamed = answer("bob", "/v1/jobs", None)
    assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (501, "owners_not_named")
