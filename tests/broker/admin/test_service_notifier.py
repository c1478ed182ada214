"""The messages to a service manager, over a socket with a path and over an abstract socket."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.broker.admin.service_notifier import STATUS_INTERVAL, ServiceNotifier
from support.notify_socket import NotifySocket


@pytest.fixture(params=["a path", "no file"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    name = f"@mlxpool-{uuid.uuid4()}" if request.param == "no file" else str(tmp_path / "n")
    with NotifySocket(name) as listening:
        yield listening


def ours(manager: NotifySocket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.address, **more}


def test_each_message_has_the_text_of_the_protocol(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager)) as notify:
        notify.ready()
        notify.stopping()
        assert manager.received() == ["READY=1", "STOPPING=1"]
        notify.reloading()
        (said,) = manager.received()
        word, time = said.split("\n")
        assert word == "RELOADING=1"
        assert time.startswith("MONOTONIC_USEC=") and time.partition("=")[2].isdecimal()


def test_the_watchdog_message_is_sent_at_half_its_time(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager, WATCHDOG_USEC="30000000")) as notify:
        for now, pings in ((100.0, 1), (114.9, 0), (115.0, 1), (129.9, 0), (140.0, 1), (150.0, 0)):
            notify.on_turn(str, now)
            assert manager.received() == ["WATCHDOG=1"] * pings, now
        assert notify.next_wake() == 155.0


def test_the_first_watchdog_message_is_due_at_once(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager, WATCHDOG_USEC="1000000")) as notify:
        assert notify.next_wake() == 0.0


def test_without_a_watchdog_time_no_message_is_due(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager)) as notify:
        notify.on_turn(str, 100.0)
        assert manager.received() == []
        assert notify.next_wake() == float("inf")


@pytest.mark.parametrize(("pid", "pings"), [("ours", 1), ("1", 0), ("", 1)])
def test_a_watchdog_of_another_process_is_not_ours(
    manager: NotifySocket, pid: str, pings: int
) -> None:
    pid = str(os.getpid()) if pid == "ours" else pid
    asked = ours(manager, WATCHDOG_USEC="2000000", WATCHDOG_PID=pid)
    with ServiceNotifier.from_environment(asked) as notify:
        notify.on_turn(str, 100.0)
        assert len(manager.received()) == pings


@pytest.mark.parametrize("time", ["soon", "-5", "1e6", "²", ""])
def test_a_watchdog_time_that_is_no_number_is_ignored(manager: NotifySocket, time: str) -> None:
    with ServiceNotifier.from_environment(ours(manager, WATCHDOG_USEC=time)) as notify:
        notify.on_turn(str, 100.0)
        assert manager.received() == []


def test_a_status_is_sent_when_it_has_changed(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager)) as notify:
        notify.on_turn(lambda: "one", 100.0)
        notify.on_turn(lambda: "too soon", 101.0)
        notify.on_turn(lambda: "one", 100.0 + STATUS_INTERVAL)
        notify.on_turn(lambda: "two", 100.0 + 2 * STATUS_INTERVAL)
        assert manager.received() == ["STATUS=one", "STATUS=two"]


def test_the_variables_are_removed_from_the_environment() -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    ServiceNotifier.from_environment(environment).close()
    assert environment == {"HOME": "/"}


def test_without_a_service_manager_nothing_is_sent() -> None:
    def never() -> str:
        raise AssertionError("nobody reads it")

    with ServiceNotifier.from_environment({"WATCHDOG_USEC": "1000000"}) as notify:
        notify.ready()
        notify.on_turn(never, 100.0)
        assert notify.next_wake() == float("inf")


def test_a_service_manager_that_is_gone_raises_no_error(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager, WATCHDOG_USEC="1000000")) as notify:
        manager.close()
        notify.ready()
        notify.on_turn(lambda: "here", 100.0)


def test_a_service_manager_that_does_not_read_does_not_block(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager, WATCHDOG_USEC="2")) as notify:
        for turn in range(10_000):
            notify.on_turn(str, float(turn))
        assert 0 < len(manager.received()) < 10_000


def test_a_socket_of_another_kind_is_logged_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with ServiceNotifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1234"}) as notify:
        notify.ready()
    assert "no such service manager" in caplog.text
    assert not notify.enabled


def test_child_processes_do_not_inherit_the_socket(manager: NotifySocket) -> None:
    with ServiceNotifier.from_environment(ours(manager)) as notify:
        assert isinstance(notify._socket, socket.socket)
        assert not notify._socket.get_inheritable()
