"""SIGHUP and `mlxpool reload`: models, limits and keys change while streams go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mlxpool.cli.main import OK, USAGE
from mlxpool.common.errors import OverQuota, UnknownModel
from support.bystander import Bystander
from support.pool import Pool, until

HEAD = "[models.counting]\npath = 'builtin:counting'\n[models.counting.counting]\nstep_us = 1000\n"
EXTRA = "[models.extra]\npath = 'builtin:counting'\n"


def reload(pool: Pool, config: str) -> str:
    """Writes these settings and reloads them; returns the log since then."""
    before = len(pool.log())
    pool.config.write_text(config)
    assert pool.process is not None
    os.kill(pool.process.pid, signal.SIGHUP)

    def verdict() -> bool:
        return any(words in pool.log()[before:] for words in ("event=reloaded", "not reloaded"))

    until(verdict, f"it is read:\n{pool.log()}")
    return pool.log()[before:]


def test_a_reload_changes_all_settings_beside_a_stream(tmp_path: Path) -> None:
    with Pool(tmp_path, HEAD) as pool, Bystander(pool.client) as bystander, pool.client() as client:
        with pytest.raises(UnknownModel):
            client.generate("extra", "x", max_tokens=1)

        assert "added=extra" in reload(pool, HEAD + EXTRA)
        assert len(client.generate("extra", "x", max_tokens=3).ids) == 3

        said = reload(pool, "[pool]\nquota_requests = 1\n" + HEAD + EXTRA)
        assert "limits=quota_requests" in said
        with pytest.raises(OverQuota, match=r"1 live requests, at most 1 \(quota_requests\)") as e:
            client.generate("extra", "x", max_tokens=1)
        assert e.value.retryable and e.value.retry_after_ms

        for broken in ("[pool]\nquota_request = 1\n", "[pool]\nquota_requests = 'many'\n", "=\n"):
            said = reload(pool, broken)
            assert "not reloaded: nothing has changed" in said
        assert "quota_requests" in reload(pool, HEAD + EXTRA)
        assert len(client.generate("extra", "x", max_tokens=3).ids) == 3

        said = reload(pool, "[pool]\nmetrics = '127.0.0.1:0'\n" + HEAD)
        assert "a restart is needed" in said and "metrics" in said and "gone=extra" in said
        with pytest.raises(UnknownModel, match="extra"):
            client.generate("extra", "x", max_tokens=1)
        until(lambda: pool.worker("extra/0")["state"] == "none", "its worker has ended")
        assert "extra" not in [model["name"] for model in pool.ask("models")["models"]]
        bystander.check_unaffected()


def test_a_removed_model_finishes_its_requests_and_can_be_added_again(tmp_path: Path) -> None:
    with Pool(tmp_path, HEAD + EXTRA) as pool, pool.client() as client:
        stream = client.stream("extra", "x", max_tokens=200)
        deltas = iter(stream)
        next(deltas)
        reload(pool, HEAD)
        assert [*deltas] and len(stream.result.ids) == 200
        reload(pool, HEAD + EXTRA)
        assert len(client.generate("extra", "x", max_tokens=3).ids) == 3


def test_changed_settings_replace_the_workers_and_no_stream_ends(tmp_path: Path) -> None:
    changed = HEAD.replace("path =", "sequences = 3\nreplicas = 2\npath =")
    with Pool(tmp_path, "[pool]\ndrain_grace = 0.0\n" + HEAD) as pool:
        with pool.client() as client:
            stream = client.stream("counting", "x", seed=1, max_tokens=500)
            deltas = iter(stream)
            next(deltas)
            before = pool.worker("counting/0")["pid"]
            reload(pool, "[pool]\ndrain_grace = 0.0\n" + changed)
            assert [*deltas] and len(stream.result.ids) == 500

        def renewed() -> bool:
            rows = [pool.worker(f"counting/{number}") for number in (0, 1)]
            return all(row.get("state") == "ready" for row in rows) and rows[0]["pid"] != before

        until(renewed, "two fresh workers")


def test_the_command_does_the_same(tmp_path: Path) -> None:
    with Pool(tmp_path, HEAD) as pool:
        pool.config.write_text(HEAD + EXTRA)
        done = pool.cli("reload")
        assert (done.returncode, done.stdout) == (OK, "reloaded\nnew models: extra\n")
        assert "extra" in {model["name"] for model in pool.ask("models")["models"]}
        assert pool.cli("reload").stdout == "reloaded\nthe settings are as they were\n"
        pool.config.write_text("[pool]\ndeadline = -1\n" + HEAD)
        failed = pool.cli("reload")
        assert (failed.returncode, failed.stdout) == (USAGE, "")
        assert "not reloaded, nothing has changed: pool.deadline is -1" in failed.stderr
