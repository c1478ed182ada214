"""Somebody removes the run directory of a running pool: the pool continues, or logs the reason."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.engine.counting_engine import token_at
from support.pool import PATIENCE, Pool, until


def test_a_pool_whose_run_directory_is_removed(tmp_path: Path) -> None:
    """The worker is killed as well, so that a new worker must connect. In the end `stop` works."""
    config = '[models.m]\npath = "builtin:counting"\n'
    expected = [token_at(list(b"x"), 7, i, 50_000) for i in range(3)]

    def ids() -> list[int]:
        return list(client.generate("m", "x", max_tokens=3, seed=7).ids)

    with Pool(tmp_path, config) as pool, pool.client() as client:
        assert ids() == expected
        shutil.rmtree(pool.run_dir)
        until((pool.run_dir / "admin.ipc").exists, "the sockets are bound again")
        pool.kill_worker("m/0")
        assert ids() == expected
        assert client.models()[0].get("trouble") is None
        assert (pool.run_dir / "workers" / "m-0.json").exists(), "a survivor would be ended"

        shutil.rmtree(pool.run_dir)
        pool.run_dir.write_text("in the way")
        assert until(lambda: client.models()[0].get("trouble"), "it says why it is unreachable")
        assert pool.process is not None
        (worker,) = (
            child for child in psutil.Process(pool.process.pid).children()
            if "mlxpool.worker" in child.cmdline()
        )  # fmt: skip
        worker.send_signal(signal.SIGKILL)
        with pytest.raises(ModelLoadFailed, match="cannot be made again"):
            until(lambda: ids() != expected, "a request is refused while no worker can come")

        pool.run_dir.unlink()
        until((pool.run_dir / "admin.ipc").exists, "the sockets are bound again")
        assert ids() == expected
        assert pool.cli("stop").returncode == 0
        assert pool.process.wait(PATIENCE) == 0
        pool.process = None
    assert "files of the run directory were removed: made again" in pool.log()
