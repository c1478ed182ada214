"""Removed files of the run directory are made again; otherwise the log shows the reason."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from mlxpool.broker.edge.run_dir_watch import CHECK_INTERVAL, RunDirWatch
from mlxpool.common.files import FolderLocked, lock_folder
from mlxpool.common.transport import sockets

NAMES = ("front", "back", "admin")
WAIT = 60_000  # milliseconds


class Watched:
    """Sockets in a run directory, and one connection to each, made while their files exist."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.bound = {n: sockets.router(self.context, sockets.ipc(run_dir, n)) for n in NAMES}
        self.old = {name: self.connect(name) for name in NAMES}
        self.unbound = False
        self.restored = 0
        self.troubles: list[str] = []
        self.watch = RunDirWatch(
            run_dir,
            lock_folder(run_dir),
            self.bound,
            times_unbound=lambda: None if self.unbound else 0,
            restored=self._restored,
            on_trouble=lambda trouble, now: self.troubles.append(trouble),
        )
        self.now = 0.0
        self.reach_all()

    def _restored(self) -> None:
        self.restored += 1

    def connect(self, name: str) -> zmq.Socket[bytes]:
        return sockets.dealer(self.context, sockets.ipc(self.run_dir, name))

    def check(self) -> None:
        self.now += CHECK_INTERVAL
        self.watch.check(self.now)

    def reach_all(self) -> None:
        """Checks that old and new connections reach each socket."""
        for name in NAMES:
            with self.connect(name) as fresh:
                for connection in (self.old[name], fresh):
                    connection.send(b"x")
                    assert self.bound[name].poll(WAIT), name
                    assert self.bound[name].recv_multipart()[1] == b"x"

    def close(self) -> None:
        self.context.destroy(linger=0)
        os.close(self.watch.lock)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:  # paths of sockets are short
        os.chmod(folder, 0o700)
        watch = Watched(Path(folder))
        yield watch
        watch.close()
        Path(folder).mkdir(exist_ok=True)


def some(*names: str) -> Callable[[Path], None]:
    def remove(run_dir: Path) -> None:
        for name in names:
            (run_dir / name).unlink()

    return remove


def replaced(run_dir: Path) -> None:
    (run_dir / "back.ipc").unlink()
    (run_dir / "back.ipc").write_text("")


@pytest.mark.parametrize(
    "deed",
    [
        some("front.ipc"),
        some("back.ipc"),
        some("admin.ipc"),
        some("lock"),
        some("front.ipc", "back.ipc", "admin.ipc", "lock"),
        replaced,
        shutil.rmtree,
    ],
    ids=["front", "back", "admin", "lock", "files", "another file", "folder"],
)
def test_what_is_removed_is_made_again(watched: Watched, deed: Callable[[Path], None]) -> None:
    for times in (1, 2):
        deed(watched.run_dir)
        watched.check()
        watched.reach_all()
        assert (watched.restored, watched.watch.trouble, watched.troubles) == (times, "", [])
        with pytest.raises(FolderLocked) as locked:
            lock_folder(watched.run_dir)
        assert locked.value.holder == str(os.getpid())
        assert watched.run_dir.stat().st_mode & 0o777 == 0o700
        watched.check()
        assert watched.restored == times, "nothing is made twice"


def test_it_looks_in_intervals(watched: Watched) -> None:
    watched.check()
    (watched.run_dir / "lock").unlink()
    watched.watch.check(watched.now)
    assert not watched.restored and watched.watch.next_wake() == watched.now + CHECK_INTERVAL


def test_why_it_cannot_be_made_again_is_told_once(watched: Watched) -> None:
    shutil.rmtree(watched.run_dir)
    watched.run_dir.write_text("in the way")
    watched.check()
    watched.check()
    (trouble,) = watched.troubles
    assert str(watched.run_dir) in trouble and "cannot be made again" in trouble
    watched.run_dir.unlink()
    watched.check()
    assert watched.troubles == [trouble, ""]
    watched.reach_all()


def test_another_brokers_sockets_are_left_alone(watched: Watched) -> None:
    """While another broker has locked the directory, this broker changes no sockets there."""
    some("front.ipc", "lock")(watched.run_dir)
    other = lock_folder(watched.run_dir)
    (watched.run_dir / "front.ipc").write_text("another broker's")
    watched.check()
    assert f"another broker (pid {os.getpid()}) has the run directory" in watched.watch.trouble
    assert (watched.run_dir / "front.ipc").read_text() == "another broker's"
    os.close(other)
    watched.check()
    assert not watched.watch.trouble
    watched.reach_all()


def test_a_front_that_is_shut_stays_shut(watched: Watched) -> None:
    watched.unbound = True
    (watched.run_dir / "front.ipc").unlink()
    watched.check()
    assert not (watched.run_dir / "front.ipc").exists() and not watched.restored
    watched.unbound = False
    watched.check()
    watched.reach_all()
