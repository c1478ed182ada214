"""A flood of one owner, beside a stream of another that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bystander import Bystander
from mlxpool.common.errors import OverQuota
from pool import until
from secure_pool import SLOW, SecurePool


def test_floods_of_bytes_requests_and_cancels_end_at_their_owners_quota(tmp_path: Path) -> None:
    """bob's stream costs him a request, little prompt, and now and then a ping."""
    quotas = "quota_requests = 2\nquota_bytes = '20KB'\nquota_cancels = 1\nquota_tokens = 3000"
    with (
        SecurePool(tmp_path, pool=quotas, models=SLOW.format(1000)) as secure,
        Bystander(lambda: secure.dial("bob")) as bystander,
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
        with pytest.raises(OverQuota, match="quota_cancels"):
            alice.generate("counting", "x", max_tokens=1)

        with secure.dial("alice") as flood:
            with pytest.raises(OverQuota, match=r"20000 bytes a second \(quota_bytes\)") as caught:
                for _ in range(4):
                    try:
                        flood.generate("counting", "x" * 60_000, max_tokens=1)
                    except OverQuota as error:
                        if "quota_bytes" in str(error):
                            raise
            assert caught.value.retry_after_ms
        bystander.unmoved()
