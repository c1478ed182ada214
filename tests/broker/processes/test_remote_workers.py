"""Samples made from remote workers' heartbeats, and gateways whose address is in use."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from mlxpool.broker.processes.gateway_process import GatewayProcess
from mlxpool.broker.processes.remote_workers import sample_of
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol.from_worker import Beat
from mlxpool.common.transport import listening


def test_a_beat_becomes_a_sample() -> None:
    beat = {"phase": "prefill", "progress": 3, "look": [512, False, 1000, 2000]}
    assert sample_of(Beat.parse(beat)).look == ProgressReading(
        "prefill", 0, 3, 512, False, 1000, 2000
    )


def test_before_its_first_beat_a_worker_is_loading() -> None:
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
def test_odd_values_of_a_beat_raise_no_error(beat: dict[str, object]) -> None:
    assert sample_of(Beat.parse(beat)).look.count == 0 or beat.get("progress")


# ---- gateway address -----------------------------------------------------------------------------
# The gateway's address, which the gateway of an earlier broker may still use.


def config(run_dir: Path, port: int = 0) -> PoolConfig:
    return PoolConfig(run_dir=run_dir, http=f"127.0.0.1:{port}")


def test_a_gateway_that_has_just_ended_frees_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt to listen fails, because the old gateway still has the address.

    By the second attempt the old gateway has ended.
    """
    tries, listen = [0], listening.listen

    def busy_once(host: str, port: int) -> list[socket.socket]:
        tries[0] += 1
        if tries[0] == 1:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        return listen(host, port)

    monkeypatch.setattr(listening, "listen", busy_once)
    with GatewayProcess(config(tmp_path)) as gateway:
        assert tries == [2] and gateway.url.startswith("http://127.0.0.1:")


def test_an_address_of_another_program_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*another address"):
            GatewayProcess(config(tmp_path, port))
