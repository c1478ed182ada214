"""The ports that tests give to servers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from support import free_ports


def test_each_port_is_free_and_given_once() -> None:
    ports = [*free_ports.free_ports(20), free_ports.free_port()]
    assert len(set(ports)) == 21
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = free_ports.highest_port()
    first = free_ports.free_port()
    monkeypatch.setattr(free_ports, "given", set(range(free_ports.LOWEST, limit)) - {first})
    assert free_ports.free_port() == first
    with socket.create_server(("127.0.0.1", first)), pytest.raises(IndexError):
        free_ports.given.discard(first)
        free_ports.free_port()


def test_processes_of_a_run_give_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    for number in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        ports = free_ports.free_ports(20)
        assert {(port - free_ports.LOWEST) % 3 for port in ports} == {number}


@pytest.mark.parametrize("low", [1024, 32_768])
def test_they_are_not_those_of_the_kernel_if_it_leaves_others(
    low: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_ports, "RANGE", tmp_path / "range")
    free_ports.RANGE.write_text(f"{low}\t60999\n")
    ports = free_ports.free_ports(3)
    assert len(set(ports)) == 3 and (low == 1024 or max(ports) < low)
