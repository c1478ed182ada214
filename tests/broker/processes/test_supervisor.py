"""Real child processes: they are started, observed and ended, and their exits get a cause."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.broker.processes.supervisor import (
    KEPT_DUMPS,
    SAVE_SHARE,
    Child,
    DialSettings,
    Supervisor,
    rank_wait_limit,
)
from mlxpool.broker.workers.exit_causes import WorkerExit, exit_of
from mlxpool.common.config.schema import (
    WAIT_LIMIT,
    WORKER_VARIABLE,
    ModelConfig,
    PoolConfig,
    WorkerConfig,
)
from mlxpool.common.gpus import GpusUnavailable
from mlxpool.common.progress import PHASES, ProgressReading
from support.pool import PATIENCE, until

PYTHON = sys.executable
SLEEP = "import sys; print('up', flush=True); sys.stdin.read()"
DEAF = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print('up', flush=True); time.sleep(600)"
)


class Nursery:
    """A supervisor whose workers are `python -c CODE`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, portable: bool) -> None:
        (folder / "logs").mkdir()
        self.folder = folder
        models = {"m": ModelConfig(path="builtin:counting")}
        self.config = PoolConfig(
            run_dir=folder, models=models, stop_grace=7.0, worker_log_bytes=2048, log_level="debug"
        )
        self.supervisor = Supervisor(self.config, "ipc:///back", portable=portable)
        self.patch = patch

    def start(
        self, code: str = SLEEP, slot: str = "m/0", model: ModelConfig | None = None
    ) -> Child:
        """Starts a worker and waits until it reports that it is up."""
        program = self.folder / "python"
        program.write_text(f'#!/bin/sh\nexec "{PYTHON}" -c "{code}"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.patch.setattr("sys.executable", str(program))
        before = self.said(slot).count("up\n")
        child = self.supervisor.start(slot, "m", model or self.config.models["m"])
        end = time.monotonic() + PATIENCE
        while self.said(slot).count("up\n") == before and child.process.poll() is None:
            assert time.monotonic() < end, "it never came up"
            time.sleep(0.005)
        return child

    def said(self, slot: str = "m/0") -> str:
        path = self.supervisor.log_path(slot)
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(params=[False, True], ids=["pidfd", "portable"])
def nursery(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Nursery]:
    new_nursery = Nursery(tmp_path, monkeypatch, request.param)
    try:
        yield new_nursery
    finally:
        new_nursery.supervisor.close()


def gone(child: Child, patience: float = PATIENCE) -> bool:
    """Returns whether `exit_descriptor` becomes readable in time."""
    return bool(select.select([child.exit_descriptor], [], [], patience)[0])


def test_a_kill_is_noticed(nursery: Nursery) -> None:
    child = nursery.start()
    assert not gone(child, 0.05)
    os.kill(child.process.pid, signal.SIGKILL)
    assert gone(child)
    assert nursery.supervisor.reap("m/0") == WorkerExit("killed by SIGKILL", False, None)
    assert nursery.supervisor.children == {}


def test_an_exit_is_noticed(nursery: Nursery) -> None:
    child = nursery.start("import sys; sys.exit(3)")
    assert gone(child)
    assert nursery.supervisor.reap("m/0").cause == "exit code 3"


def test_a_worker_that_cannot_begin_is_told_with_its_last_line(nursery: Nursery) -> None:
    """The cause of an exit has the last output line of this worker, never of an earlier worker."""
    child = nursery.start(
        "import sys; print('lib.so: cannot open\\x1b[1m'); print(); sys.exit(127)"
    )
    assert gone(child)
    assert nursery.supervisor.reap("m/0").cause == "exit code 127: lib.so: cannot open [1m"
    child = nursery.start("import sys; sys.exit(3)")
    assert gone(child)
    assert nursery.supervisor.reap("m/0").cause == "exit code 3"


def test_the_last_line_of_a_worker_that_ends_while_it_is_started_is_told(nursery: Nursery) -> None:
    """The worker writes its line and ends before `start` returns, as on a busy machine."""
    add = nursery.supervisor.records.add

    def add_late(slot: str, pid: int) -> None:
        until(lambda: "cannot open" in nursery.said(slot), "the worker has written its line")
        add(slot, pid)

    nursery.patch.setattr(nursery.supervisor.records, "add", add_late)
    child = nursery.start("import sys; print('lib.so: cannot open'); sys.exit(127)")
    assert gone(child)
    assert nursery.supervisor.reap("m/0").cause == "exit code 127: lib.so: cannot open"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells before it is collected")
@pytest.mark.parametrize(("deed", "by_itself"), [("sys.exit(3)", True), ("os.abort()", False)])
def test_an_exit_is_told_from_an_end_by_a_signal(
    nursery: Nursery, deed: str, by_itself: bool
) -> None:
    child = nursery.start(f"import os, sys; print('up', flush=True); sys.stdin.read(); {deed}")
    assert not nursery.supervisor.exited_by_itself("m/0")
    assert child.process.stdin is not None
    child.process.stdin.close()
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    assert nursery.supervisor.exited_by_itself("m/0") == by_itself
    nursery.supervisor.reap("m/0")


def test_nothing_of_a_reaped_child_is_left_open(nursery: Nursery) -> None:
    before = set(os.listdir("/dev/fd"))
    child = nursery.start()
    child.process.kill()
    assert gone(child)
    nursery.supervisor.reap("m/0")
    assert set(os.listdir("/dev/fd")) <= before, "a descriptor was left open"


def test_sigterm_ends_a_worker(nursery: Nursery) -> None:
    child = nursery.start()
    nursery.supervisor.stop("m/0", now=100.0)
    assert nursery.supervisor.observation_due(106.9)
    assert nursery.supervisor.next_wake() == 107.0
    nursery.supervisor.kill_overdue(now=106.9)
    assert gone(child)
    assert nursery.supervisor.reap("m/0").cause == "stopped"
    assert child.process.returncode == -signal.SIGTERM
    assert nursery.supervisor.next_wake() == float("inf")


def test_sigkill_follows_when_sigterm_is_ignored(nursery: Nursery) -> None:
    child = nursery.start(DEAF)
    nursery.supervisor.stop("m/0", now=100.0)
    nursery.supervisor.stop("m/0", now=105.0)
    nursery.supervisor.kill_overdue(now=106.9)
    assert not gone(child, 0.2)
    nursery.supervisor.kill_overdue(now=107.0)
    assert gone(child)
    nursery.supervisor.reap("m/0")
    assert child.process.returncode == -signal.SIGKILL


def test_a_stop_of_an_empty_slot_does_nothing(nursery: Nursery) -> None:
    nursery.supervisor.stop("m/0", now=1.0)
    nursery.supervisor.kill_overdue(now=1.0)
    child = nursery.start("pass")
    assert gone(child)
    nursery.supervisor.stop("m/0", now=1.0)  # the child has ended, but was not reaped yet
    nursery.supervisor.kill_overdue(now=99.0)


def test_close_kills_all_workers(nursery: Nursery) -> None:
    children = [nursery.start(DEAF, slot) for slot in ("m/0", "m/1")]
    nursery.supervisor.close()
    assert nursery.supervisor.children == {}
    assert [child.process.returncode for child in children] == [-signal.SIGKILL] * 2


def test_a_worker_ends_with_its_broker(nursery: Nursery) -> None:
    """A worker ends when its standard input closes, a pipe that only the broker holds open."""
    child = nursery.start()
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert gone(child)
    assert nursery.supervisor.reap("m/0").cause == "exit code 0"


def test_a_worker_is_told_its_settings(nursery: Nursery) -> None:
    child = nursery.start(
        f"import os, sys; print(os.environ['{WORKER_VARIABLE}']); print('up', flush=True);"
        " sys.stdin.read()"
    )
    line = nursery.said().splitlines()[0]
    settings = WorkerConfig.from_environment(line)
    model = nursery.config.models["m"]
    assert settings.block_fd > 2 and settings.dump_fd > 2
    settings = replace(settings, block_fd=-1, dump_fd=-1)
    assert settings == WorkerConfig(
        "ipc:///back",
        "m/0",
        child.token,
        "m",
        model,
        "text",
        log_level="debug",
        prefix_dir=str(nursery.config.prefix_dir),
        save_limit=SAVE_SHARE * nursery.config.stop_grace,
    )
    assert len(json.loads(line)["token"]) == 32


def test_each_worker_gets_its_own_token(nursery: Nursery) -> None:
    assert nursery.start().token != nursery.start(slot="m/1").token


def test_a_worker_leads_its_own_session(nursery: Nursery) -> None:
    child = nursery.start()
    assert os.getpgid(child.process.pid) == child.process.pid


def test_a_log_is_appended_to_and_cut_when_it_is_long(nursery: Nursery) -> None:
    path = nursery.supervisor.log_path("m/0")
    assert path.name == "m-0.log"
    path.write_text("old\n")
    child = nursery.start("import sys; print('new')")
    assert gone(child)
    nursery.supervisor.reap("m/0")
    assert nursery.said() == "old\nnew\n"
    path.write_bytes(b"a" * 5000 + b"end\n")
    child = nursery.start("import sys; print('new')")
    assert gone(child)
    nursery.supervisor.reap("m/0")
    assert nursery.said() == "a" * 1020 + "end\n" + "new\n"


def test_a_worker_whose_log_cannot_be_opened_is_not_started(nursery: Nursery) -> None:
    (nursery.folder / "logs").rmdir()
    (nursery.folder / "logs").write_text("no folder")
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(OSError):
        nursery.supervisor.start("m/0", "m", nursery.config.models["m"])
    assert nursery.supervisor.children == {}
    assert set(os.listdir("/dev/fd")) <= before, "a descriptor was left open"


LEADER_OF_ANOTHER = (
    "import subprocess, sys; p = subprocess.Popen(['sleep', '600']);"
    " print(p.pid, flush=True); print('up', flush=True); sys.stdin.read()"
)


def has_stacks(path: Path) -> bool:
    return "most recent call first" in path.read_text()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_process_group_of_an_ended_worker_is_killed(nursery: Nursery) -> None:
    child = nursery.start(LEADER_OF_ANOTHER)
    other = int(nursery.said().splitlines()[0])
    assert is_alive(other)
    child.process.kill()
    assert gone(child)
    nursery.supervisor.reap("m/0")
    until(lambda: not is_alive(other), "the worker's own child is gone")


def test_survivors_of_an_earlier_broker_are_swept(nursery: Nursery) -> None:
    child = nursery.start()
    later = Supervisor(nursery.config, "ipc:///back")
    assert later.records.kill_survivors() == [child.process.pid]
    assert gone(child)
    assert later.records.kill_survivors() == []


def test_a_pid_that_is_another_process_by_now_is_left_alone(nursery: Nursery) -> None:
    child = nursery.start()
    record = nursery.folder / "workers" / "m-0.json"
    known = json.loads(record.read_text())
    record.write_text(json.dumps({**known, "start_time": known["start_time"] - 1}))
    (nursery.folder / "workers" / "broken.json").write_text("{")
    assert Supervisor(nursery.config, "ipc:///back").records.kill_survivors() == []
    assert not gone(child, 0.05)
    assert list((nursery.folder / "workers").iterdir()) == []


def test_a_child_is_observed_from_outside(nursery: Nursery) -> None:
    child = nursery.start()
    sample = nursery.supervisor.observe("m/0")
    assert sample.look.phase == "boot" and not sample.stopped and sample.rss > 0
    child.block.write("phase", PHASES.index("prefill"))
    child.block.write_request(bytes(range(16)))
    os.kill(child.process.pid, signal.SIGSTOP)
    until(lambda: nursery.supervisor.observe("m/0").stopped, "it is seen as stopped")
    assert nursery.supervisor.observe("m/0").look.phase == "prefill"
    child.process.kill()
    assert gone(child)
    assert nursery.supervisor.reap("m/0").prefill == bytes(range(16))


DUMPER = (
    "import faulthandler, json, os, signal, sys;"
    f" fd = json.loads(os.environ['{WORKER_VARIABLE}'])['dump_fd'];"
    " faulthandler.register(signal.SIGUSR1, file=fd);"
    " print('up', flush=True); sys.stdin.read()"
)


def test_stacks_are_kept_of_workers_that_were_asked_for_them(nursery: Nursery) -> None:
    supervisor = nursery.supervisor
    for number in range(KEPT_DUMPS + 2):
        child = nursery.start(DUMPER)
        supervisor.dump_stacks("m/0")
        until(partial(has_stacks, child.dump_path), "the stacks are written")
        assert supervisor.last_dump("m/0") == child.dump_path
        child.process.kill()
        assert gone(child)
        supervisor.reap("m/0")
        assert len(list((nursery.folder / "logs").glob("*.stacks"))) == min(number + 1, KEPT_DUMPS)
    quiet = nursery.start(slot="m/1")
    quiet.process.kill()
    assert gone(quiet)
    supervisor.reap("m/1")
    assert supervisor.last_dump("m/1") is None


def test_a_missing_program_raises_oserror_and_leaks_nothing(nursery: Nursery) -> None:
    nursery.patch.setattr("sys.executable", str(nursery.folder / "missing"))
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(OSError):
        nursery.supervisor.start("m/0", "m", nursery.config.models["m"])
    assert nursery.supervisor.children == {}
    assert set(os.listdir("/dev/fd")) <= before, "a descriptor was left open"


def test_without_pidfd_the_portable_twin_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert Supervisor(PoolConfig(run_dir=tmp_path), "ipc:///back").portable


@pytest.mark.parametrize(
    ("code", "commanded", "out_of_memory", "words", "own"),
    [
        (0, False, False, "exit code 0", True),
        (3, False, False, "exit code 3", True),
        (-11, False, False, "killed by SIGSEGV", True),
        (-6, False, True, "killed by SIGABRT", True),
        (-9, False, False, "killed by SIGKILL", False),
        (-9, False, True, "killed by the kernel: out of memory", True),
        (-15, False, False, "killed by SIGTERM", False),
        (-250, False, False, "killed by signal 250", False),
        (-15, True, False, "stopped", False),
        (-9, True, True, "stopped", False),
        (0, True, False, "stopped", False),
    ],
)
def test_exit_codes_become_causes_in_words(
    code: int, commanded: bool, out_of_memory: bool, words: str, own: bool
) -> None:
    look = ProgressReading(request=bytes(range(16)))
    assert exit_of(code, commanded, out_of_memory, look) == WorkerExit(words, own, look.request)


def test_each_slot_has_files_of_its_own(nursery: Nursery) -> None:
    slots = ("a/b/0", "a-b/0", "a%2Fb/0", "a/0", "a-0/0")
    assert len({nursery.supervisor.log_path(slot) for slot in slots}) == len(slots)
    assert nursery.supervisor.log_path("org/name/0").name == "org%2Fname-0.log"


RANK = (
    "import json, os, sys; from mlxpool.common.progress import Block;"
    f" settings = json.loads(os.environ['{WORKER_VARIABLE}']);"
    " block = Block.open(settings['rank_block_fds'][0]); block.write('phase', 4);"
    " block.write('pid', os.getpid()); print('up', flush=True); sys.stdin.read()"
)


def test_a_group_is_observed_rank_by_rank(nursery: Nursery) -> None:
    """Each rank is sampled by its progress block.

    Here rank 0's process also writes that of rank 1.
    """
    nursery.config = replace(
        nursery.config, models={"m": ModelConfig(path="builtin:counting", devices=2)}
    )
    child = nursery.start(RANK)
    (other,) = nursery.supervisor.observe("m/0").others
    assert (other.look.pid, other.look.phase) == (child.pid, "decode")
    assert other.rss > 0 and not other.stopped
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: nursery.supervisor.observe("m/0").others[0].stopped, "it is seen to be stopped")
    os.kill(child.pid, signal.SIGKILL)
    assert gone(child)
    nursery.supervisor.reap("m/0")


def test_a_pid_outside_of_the_worker_is_no_rank(nursery: Nursery) -> None:
    """A rank has ended and another process has its pid: that process is not sampled."""
    nursery.config = replace(
        nursery.config, models={"m": ModelConfig(path="builtin:counting", devices=2)}
    )
    nursery.start(RANK.replace("os.getpid()", str(os.getpid())))
    (other,) = nursery.supervisor.observe("m/0").others
    assert other.look.pid == os.getpid() and other.rss == 0


@pytest.mark.parametrize(
    "config",
    [
        PoolConfig(load_limit=1000.0),
        PoolConfig(fresh_limit=1000.0),
        PoolConfig(prefill_limit=1000.0),
        PoolConfig(step_limit=1000.0),
    ],
    ids=["load", "fresh", "prefill", "step"],
)
def test_a_rank_waits_longer_than_the_broker_lets_it_stand_still(config: PoolConfig) -> None:
    """A rank that waits for another one gives up later than the broker ends the group.

    So the broker's log can name the rank that hangs.
    """
    assert rank_wait_limit(PoolConfig()) == WAIT_LIMIT
    assert rank_wait_limit(config) > 2 * 1000.0


# ---- GPUs ----------------------------------------------------------------------------------------

SHOW_GPUS = (
    "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True);"
    " print('up', flush=True); sys.stdin.read()"
)


def seen_by(nursery: Nursery, slot: str, **settings: Any) -> tuple[tuple[str, ...], str]:
    """Returns the GPUs assigned to the next worker of a slot, and the GPUs that the worker sees."""
    child = nursery.start(SHOW_GPUS, slot, ModelConfig(path="builtin:counting", **settings))
    return child.gpus, nursery.said(slot).splitlines()[-2]


def end(nursery: Nursery, slot: str) -> None:
    nursery.supervisor.children[slot].process.kill()
    assert gone(nursery.supervisor.children[slot])
    nursery.supervisor.reap(slot)


def test_workers_of_all_models_share_the_gpus(nursery: Nursery) -> None:
    nursery.patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,1,2")
    assert seen_by(nursery, "a/0") == (("GPU-a",), "GPU-a")
    assert seen_by(nursery, "b/0") == (("1",), "1")
    assert seen_by(nursery, "big/0", devices=2) == (("GPU-a", "2"), "GPU-a,2")
    assert seen_by(nursery, "c/0", gpu_ids=("2",)) == (("2",), "2")
    end(nursery, "b/0")
    assert seen_by(nursery, "d/0") == (("1",), "1"), "the only one without a worker"
    assert seen_by(nursery, "b/0") == (("1",), "1"), "the fewest workers, and it was its own"
    assert nursery.supervisor.places.held().keys() == nursery.supervisor.children.keys()


def test_a_restarted_worker_has_its_gpu_again(nursery: Nursery) -> None:
    nursery.patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for slot in ("a/0", "b/0"):
        seen_by(nursery, slot)
    for slot in ("a/0", "b/0"):
        end(nursery, slot)
    assert nursery.supervisor.places.held() == {}
    assert seen_by(nursery, "b/0") == (("1",), "1")
    assert seen_by(nursery, "a/0") == (("0",), "0")


@pytest.mark.parametrize("visible", ["", "5", "-1"])
def test_where_there_is_no_choice_the_environment_stays(nursery: Nursery, visible: str) -> None:
    nursery.patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = ("5",) if visible == "5" else ()
    for slot in ("a/0", "b/0"):
        assert seen_by(nursery, slot) == (gpus, visible)


def test_a_worker_that_cannot_have_its_gpus_is_not_started(nursery: Nursery) -> None:
    nursery.patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = set(os.listdir("/dev/fd"))
    for model, words in (
        (ModelConfig(gpu_ids=("0", "7")), "gpu_ids has 7, but .* are 0, 1"),
        (ModelConfig(devices=3), "devices is 3, .* there are 2"),
    ):
        with pytest.raises(GpusUnavailable, match=words):
            nursery.supervisor.start("m/0", "m", model)
    assert not nursery.supervisor.children and not nursery.supervisor.places.held()
    assert len(os.listdir("/dev/fd")) == len(before)


def test_a_start_that_fails_gives_its_gpu_back(nursery: Nursery) -> None:
    nursery.patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    nursery.patch.setattr("sys.executable", str(nursery.folder / "nothing"))
    for _ in range(2):
        with pytest.raises(OSError):
            nursery.supervisor.start("m/0", "m", nursery.config.models["m"])
    assert nursery.supervisor.places.held() == {}


@pytest.mark.parametrize(("gpu_ids", "seen"), [((), "0,1,0"), (("2", "0"), None), (("1",), "1")])
def test_a_worker_that_dials_chooses_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_ids: tuple[str, ...], seen: str | None
) -> None:
    """The worker chooses among the GPUs of gpu_ids; its supervisor assigns none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,0")
    config = PoolConfig(run_dir=tmp_path)
    (tmp_path / "logs").mkdir()
    supervisor = Supervisor(config, "ipc:///back", dial=DialSettings())
    model = ModelConfig(path="builtin:counting", gpu_ids=gpu_ids)
    visible: list[str | None] = []

    def start(command: object, env: Mapping[str, str], **options: object) -> object:
        visible.append(env.get("CUDA_VISIBLE_DEVICES"))
        raise OSError("no process is needed")

    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(OSError if seen else GpusUnavailable):
        supervisor.start("m/1", "m", model)
    assert visible == ([seen] if seen else [])
    assert supervisor.places.held() == {}
