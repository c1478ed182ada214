"""Tests lanes (processes that prepare requests): results, limits, cancels and fairness.

A job does not harm other jobs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from mlxpool.common.errors import BadRequest, DeadlineExceeded, Internal, OutOfMemory, PoolError
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from mlxpool.worker.preparation import fork_server, lane_service
from mlxpool.worker.preparation.errors import CANCELLED
from mlxpool.worker.preparation.jobs import Decode, Decoded, Encode, Encoded, Job, Render, Result
from mlxpool.worker.preparation.lane_service import LaneService
from mlxpool.worker.preparation.lanes import ForkServer
from mlxpool.worker.preparation.limits import MAX_LANES, MAX_LANES_OF_OWNER, SHORT_TEXT, Limits
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.preparation.room import WorkerMemory
from mlxpool.worker.prompt.chat_template.sandbox import MAX_MEMORY
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.system.cpu_threads import CpuThreads
from mlxpool.worker.weights.inspect import inspect
from support.pool import PATIENCE, gone, until
from support.slow_tokenizer import PANICS, SLOW, SLOW_PATTERN, split_texts
from support.worker_checkpoints import write_checkpoint

Patch = pytest.MonkeyPatch
CONTEXT = 10**6
CHAT = [{"role": "user", "content": "hi \ud800 \U0001f600", "extra": [b"\0", 2**99]}]
TWO = CHAT * 2  # the templates of these tests misbehave with two messages
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
BLOCKS = (
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% if n %}{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
    "{{ g(30) }}"
)
RECURSIVE = (
    "{% for a in [1, 1] recursive %}{% if loop.depth < 30 %}{{ loop([1, 1]) }}{% endif %}"
    "{% endfor %}"
)
LONG = SLOW * 2
UNHURRIED = Limits(render=PATIENCE, tokenize=PATIENCE)
linux = pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")


class Lanes:
    """A service, and the results that it has delivered."""

    def __init__(
        self,
        folder: Path,
        limits: Limits | None = None,
        memory_limit: int = 0,
        worker_memory: WorkerMemory | None = None,
    ) -> None:
        self.source = source = ChatTokenizer.from_folder(inspect(folder)).source
        self.results: queue.SimpleQueue[tuple[Hashable, Result]] = queue.SimpleQueue()
        server = ForkServer(source, limits or UNHURRIED)
        threads = CpuThreads(None, 1)
        self.service = LaneService(
            server,
            lambda key, result: self.results.put((key, result)),
            threads,
            memory_limit,
            worker_memory=worker_memory,
        )
        self.service.start()
        self._key = 0

    def submit(
        self, key: Hashable, job: Job, owner: str = "", deadline: float = float("inf")
    ) -> None:
        size = len(job.text) if isinstance(job, Encode) else 1
        self.service.submit(Waiting(key, owner, size, job, deadline))

    def next(self) -> tuple[Hashable, Result]:
        return self.results.get(timeout=PATIENCE)

    def do(self, job: Job) -> Result:
        """Returns the result of a job; no other job runs at the same time."""
        self._key += 1
        self.submit(self._key, job)
        key, result = self.next()
        assert key == self._key
        return result

    def text(self, messages: Any = CHAT, tools: Any = ()) -> str:
        """Renders and encodes a chat; returns the text of its ids, each of which is a byte here."""
        result = self.do(Render(messages, tools, None, 0.0, CONTEXT))
        assert isinstance(result, Encoded), result
        return bytes(unpack_ids(result.packed)).decode()

    def error(self, job: Job) -> PoolError:
        result = self.do(job)
        assert isinstance(result, PoolError), result
        return result


Make = Callable[..., Lanes]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    all_lanes: list[Lanes] = []

    def one(template: str = "ok", *, split: str = "", **options: Any) -> Lanes:
        folder = tmp_path / str(len(all_lanes))
        write_checkpoint(folder, tokenizer_config={"chat_template": template})
        if split:
            split_texts(folder, split)
        all_lanes.append(Lanes(folder, **options))
        return all_lanes[-1]

    yield one
    for lanes in all_lanes:
        lanes.service.close()


def servers() -> list[psutil.Process]:
    """The fork servers of this process."""
    return [
        process for process in psutil.Process().children() if fork_server.__name__ in words(process)
    ]


def words(process: psutil.Process) -> str:
    """Returns the command line of a process; "" if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def lanes_of(server: psutil.Process) -> list[psutil.Process]:
    return [lane for lane in server.children() if not gone(lane)]


@pytest.fixture
def lanes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service keeps the lane of a short job, even if the job takes long on a busy machine."""
    monkeypatch.setattr(lane_service, "SHORT_TIME", PATIENCE)


def idle_lane(lanes: Lanes) -> psutil.Process:
    """Does short jobs until a lane is left that waits for the next job; returns this lane."""
    assert lanes.text() == "ok"
    (server,) = servers()
    waiting: list[psutil.Process] = until(
        lambda: lanes_of(server) if lanes.text() == "ok" else [], "a lane waits"
    )
    return waiting[0]


# ---- results -------------------------------------------------------------------------------------


def test_texts_are_encoded_and_decoded(make: Make) -> None:
    lanes = make()
    assert lanes.do(Encode("né")) == Encoded(pack_ids(list(b"n\xc3\xa9")))
    assert lanes.do(Encode("né".encode())) == Encoded(pack_ids(list(b"n\xc3\xa9")))
    assert lanes.do(Decode(pack_ids(list(b"n\xc3\xa9")), 264)) == Decoded("né")
    each = Decode(pack_ids(list(b"n\xc3\xa9")), 264, each=True)
    assert lanes.do(each) == Decoded("né", ["n", "\ufffd", "\ufffd"])
    assert "below 264" in lanes.error(Decode(pack_ids([264]), 264)).message
    assert "not UTF-8" in lanes.error(Encode(b"\xff")).message
    assert "not valid Unicode" in lanes.error(Encode("\ud800")).message


def test_a_chat_is_rendered_and_encoded(make: Make) -> None:
    lanes = make("{{ bos_token[1] }}{{ strftime_now('%Y') }}{{ messages[0].content[:2] }}")
    assert lanes.text() == "s1970hi"


def test_the_ids_before_the_generation_prompt_are_counted(make: Make) -> None:
    lanes = make("{{ tools | length }}é{% if add_generation_prompt %}><think>{% endif %}")
    result = lanes.do(Render(CHAT, [{}], None, 0.0, CONTEXT))
    assert result == Encoded(pack_ids(list("1é><think>".encode())), restore_at=3, thinks=True)


def test_a_long_chat_is_encoded_whole(make: Make) -> None:
    large = [{"role": "user", "content": "é" * SHORT_TEXT}]
    assert make("{{ messages[0].content }}").text(large) == "é" * SHORT_TEXT


def test_a_prompt_over_the_context_is_refused_without_being_encoded(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    error = lanes.error(Encode(SLOW, context=10))
    assert error.code == "context_exceeded"
    assert error.details["prompt_bytes"] == len(SLOW) and error.details["context"] == 10


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no pets') }}", "refused the messages: no pets"),
        ("a\n{{ 1 / 0 }}", "failed at line 2: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        pytest.param(
            "\n{{ 'x' * 2**31 }}", f"line 2: it takes more than {MAX_MEMORY} bytes", marks=linux
        ),
        ("{{ 'x' * 5000000 }}", "5000000 characters, at most 4194304"),
    ],
)
def test_a_failed_chat_is_a_bad_request_and_harms_nothing(
    make: Make, source: str, words: str
) -> None:
    lanes = make(f"{{% if messages | length > 1 %}}{source}{{% else %}}ok{{% endif %}}")
    assert lanes.text() == "ok"
    error = lanes.error(Render(TWO, [], None, 0.0, CONTEXT))
    assert isinstance(error, BadRequest) and words in error.message
    assert lanes.text() == "ok"


def test_a_chat_that_cannot_be_sent_to_a_lane_ends_alone(make: Make) -> None:
    lanes = make()
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    error = lanes.error(Render([{"role": "user", "content": deep}], [], None, 0.0, CONTEXT))
    assert isinstance(error, BadRequest) and "cannot be prepared" in error.message
    assert lanes.text() == "ok"


def test_a_server_that_is_ended_while_it_starts_is_started_again(monkeypatch: Patch) -> None:
    servers: list[BrittleServer] = []

    def start(first: bytes) -> BrittleServer:
        servers.append(BrittleServer(len(servers)))
        if len(servers) == 3:
            raise ConnectionResetError("the fork server ended")
        return servers[-1]

    monkeypatch.setattr("mlxpool.worker.preparation.lanes._ServerProcess", start)
    source = TextSource("", "", (), {}, {}, None)
    server = ForkServer(source, Limits())
    assert server.fork() == (0, 1)  # type: ignore[comparison-overlap]
    servers[0].lives = False
    assert server.fork() == (1, 1)  # type: ignore[comparison-overlap]
    servers[1].lives = False
    assert server.fork() == (3, 1)  # type: ignore[comparison-overlap]


class BrittleServer:
    """Stands for a fork server's process; `fork` returns numbers instead of a process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lives = True
        self.forked = 0

    def fork(self) -> tuple[int, int]:
        if not self.lives:
            raise BrokenPipeError("it has ended")
        self.forked += 1
        return self.number, self.forked

    def close(self) -> None:
        self.lives = False


def test_a_fault_of_the_thread_ends_the_worker(make: Make) -> None:
    """If the thread of the lane service fails, the worker ends.

    Otherwise requests would wait for the thread for ever.
    """
    lanes = make()
    faults: queue.SimpleQueue[None] = queue.SimpleQueue()
    service = LaneService(
        ForkServer(lanes.source, Limits()), fail, CpuThreads(None, 1), 0, lambda: faults.put(None)
    )
    service.start()
    service.submit_result("key", Decoded("x"))
    faults.get(timeout=PATIENCE)
    service.join(PATIENCE)
    service.release()


def fail(key: Hashable, result: Result) -> None:
    raise RuntimeError("a fault of ours")


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [LOOP, TWICE, BLOCKS, RECURSIVE, "{{ (8 + messages | length) ** (10 ** 9) }}"],
    ids=["loops", "macros", "called blocks", "recursive loops", "one expression"],
)
def test_a_template_without_end_is_stopped(make: Make, source: str) -> None:
    template = f"{{% if messages | length > 1 %}}{source}{{% endif %}}ok"
    lanes = make(template, limits=Limits(render=1.0))
    assert lanes.text() == "ok"
    error = lanes.error(Render(TWO, [], None, 0.0, CONTEXT))
    assert isinstance(error, BadRequest)
    assert "the chat template was not done after 1 s of processor time" in error.message
    assert lanes.text() == "ok"


def test_both_renderings_of_a_chat_share_the_limit(make: Make) -> None:
    template = f"{{% if not add_generation_prompt %}}{LOOP}{{% endif %}}ok"
    lanes = make(template, limits=Limits(render=0.3))
    assert "not done" in lanes.error(Render(CHAT, [], None, 0.0, CONTEXT)).message


def test_time_without_a_processor_does_not_count_for_a_template() -> None:
    """A template whose process waits, as on a busy machine, is not stopped at the limit."""
    program = (
        "import time; from mlxpool.worker.preparation.lane import Bounds;"
        " from mlxpool.worker.preparation.limits import Limits\n"
        "with Bounds(Limits(render=0.01)).template(): time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_the_default_limits() -> None:
    assert Limits() == Limits(render=2.0, tokenize=5.0, memory=3 * 2**29)
    assert Limits().encoding(4_000_000) == 45.0


def test_a_tokenizer_without_end_is_stopped(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN, limits=Limits(render=PATIENCE, tokenize=0.2))
    error = lanes.error(Encode(SLOW))
    assert isinstance(error, BadRequest)
    assert f"not done with {len(SLOW)} bytes" in error.message and "prepare_limit" in error.message
    assert lanes.text() == "ok"


def test_a_panic_of_the_tokenizer_is_a_bad_request(make: Make) -> None:
    """A panic of the tokenizer gives BadRequest, although in Python a panic is not an Exception.

    An earlier version let it end the thread that prepares requests.
    """
    lanes = make(split=SLOW_PATTERN)
    error = lanes.error(Encode(PANICS))
    assert isinstance(error, BadRequest) and "fails with this text" in error.message
    assert lanes.text() == "ok"


def test_a_hang_delays_no_other_request(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    for number in range(MAX_LANES - 1):
        lanes.submit(("hang", number), Encode(SLOW), f"owner {number}")
    lanes.submit("short", Encode("a"))
    assert lanes.next() == ("short", Encoded(pack_ids(list(b"a"))))
    for number in range(MAX_LANES - 1):
        lanes.service.cancel(("hang", number))
        assert lanes.next() == (("hang", number), CANCELLED)


def test_one_owner_holds_some_lanes_only(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    for number in range(2 * MAX_LANES):
        lanes.submit(("hang", number), Encode(SLOW), "a")
    lanes.submit("short", Encode("a"), "b")
    assert lanes.next() == ("short", Encoded(pack_ids(list(b"a"))))
    expected = (MAX_LANES_OF_OWNER, MAX_LANES * 2 - MAX_LANES_OF_OWNER)

    def load() -> tuple[int, int]:
        return lanes.service.load.running, lanes.service.load.waiting

    until(lambda: load() == expected, "he has that many, and the others wait")
    lanes.service.cancel_all()


@linux
def test_a_text_that_takes_too_much_memory_is_a_bad_request(
    make: Make,
) -> None:
    limit = 2**27
    lanes = make(limits=replace(UNHURRIED, memory=limit))
    error = lanes.error(Encode("\u1234" * 2**20))
    assert isinstance(error, BadRequest)
    assert f"the tokenizer takes more than {limit} bytes of memory" in error.message
    assert lanes.text() == "ok"


def test_a_text_over_the_memory_limit_of_the_worker_ends_alone(make: Make) -> None:
    lanes = make(memory_limit=1, split=SLOW_PATTERN)
    lanes.submit("large", Encode(LONG))
    key, error = lanes.next()
    assert key == "large" and isinstance(error, OutOfMemory)
    assert error.details["bound"] == 1 and error.details["prompt_bytes"] == len(LONG)
    assert "the worker takes" in error.message and "memory_limit is 1;" in error.message


def test_the_memory_at_rest_is_told_and_room_is_made_before_a_text_is_ended(make: Make) -> None:
    reserved: list[int] = []
    asked: list[int] = []

    def make_room(size: int) -> None:
        asked.append(size)
        lanes.service._room.limit = 2**50  # as if enough memory had become free

    memory = WorkerMemory(reserved.append, make_room, lambda: {"prefix": 2**50})
    lanes = make(memory_limit=1, worker_memory=memory)
    until(lambda: bool(reserved), "what the processes take at rest is told")
    (server,) = servers()
    assert reserved[0] >= server.memory_info().rss / 2 > 0

    def encoded() -> bool:
        """Encodes a text. Returns whether room was requested, so not if the text took no time."""
        result = lanes.do(Encode("ab " * SHORT_TEXT, context=10**7))
        assert isinstance(result, Encoded), result
        return bool(asked)

    until(encoded, "room is requested")
    assert len(asked) == 1 and asked[0] > 0


# ---- order, cancels, deadlines -------------------------------------------------------------------


def test_short_jobs_pass_long_ones_and_owners_take_turns(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    long = "a b " * SHORT_TEXT
    lanes.submit("hang", Encode(LONG))
    until(lambda: lanes.service.load.running == 1, "the hang runs")
    for owner in ("x", "y"):
        for number in range(2):
            lanes.submit((owner, number), Encode(long), owner)
    lanes.submit("short", Encode("a"))
    assert lanes.next()[0] == "short"
    lanes.service.cancel("hang")
    assert lanes.next() == ("hang", CANCELLED)
    assert [lanes.next()[0] for _ in range(4)] == [("x", 0), ("y", 0), ("x", 1), ("y", 1)]


def test_a_cancel_ends_what_waits_and_what_runs(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    lanes.submit("runs", Encode(LONG))
    lanes.submit("waits", Encode(LONG))

    def load() -> tuple[int, int, int]:
        load = lanes.service.load
        return load.running, load.waiting, load.bytes

    until(lambda: load() == (1, 1, 2 * len(LONG)), "the first runs, and the second waits")
    lanes.service.cancel("waits")
    assert lanes.next() == ("waits", CANCELLED)
    lanes.service.cancel("runs")
    assert lanes.next() == ("runs", CANCELLED)
    lanes.service.cancel("runs")  # the job has its result
    lanes.service.cancel("unknown")
    assert lanes.text() == "ok"
    until(lambda: load() == (0, 0, 0), "nothing counts")


def test_cancel_all_delivers_nothing(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    lanes.submit("runs", Encode(LONG))
    lanes.submit("waits", Encode("a" * SHORT_TEXT * 2))
    lanes.service.cancel_all()
    lanes.service.submit_result("later", Decoded("x"))
    assert lanes.next() == ("later", Decoded("x"))


def test_a_deadline_ends_what_waits_and_what_runs(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    assert lanes.text() == "ok"
    lanes.submit("runs", Encode(LONG), deadline=monotonic() + 0.2)
    lanes.submit("waits", Encode(LONG), deadline=monotonic() + 0.1)
    errors = dict(lanes.next() for _ in range(2))
    assert set(errors) == {"runs", "waits"}
    assert all(isinstance(error, DeadlineExceeded) for error in errors.values())


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("which", ["server", "lane"])
@pytest.mark.usefixtures("lanes_stay")
def test_a_process_killed_from_outside_is_replaced(make: Make, number: int, which: str) -> None:
    lanes = make()
    assert lanes.text() == "ok"
    (server,) = servers()
    lane = idle_lane(lanes)
    (server if which == "server" else lane).send_signal(number)
    assert lanes.text() == "ok"
    until(lambda: gone(lane), "the lane has ended")


def test_all_jobs_of_a_killed_server_are_done_by_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lanes of a killed server are not children of the next server, which must not end them."""
    monkeypatch.setattr(lane_service, "SHORT_TIME", 0.0)  # all jobs start at once
    lanes = make(split=SLOW_PATTERN)
    slow = ("x" * 20 + " ") * 10  # 0.13 s of processor time
    for number in range(MAX_LANES):
        lanes.submit(number, Encode(slow), f"owner {number}")
    until(lambda: lanes.service.load.running > 1, "several run")
    servers()[0].kill()
    for _ in range(MAX_LANES):
        _, result = lanes.next()
        assert isinstance(result, Encoded), result
    assert lanes.text() == "ok"


@linux
@pytest.mark.usefixtures("lanes_stay")
def test_a_stopped_server_or_lane_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as impatient:  # servers that start here have this limit
        impatient.setattr("mlxpool.worker.preparation.lanes.REPLY_TIMEOUT", 2.0)
        lanes = make(split=SLOW_PATTERN)
        idle_lane(lanes)
        servers()[0].suspend()
    lanes.submit("long", Encode(LONG))
    lanes.service.cancel("long")
    assert lanes.next() == ("long", CANCELLED)
    lanes.submit("again", Encode("ab " * SHORT_TEXT))
    until(lambda: lanes.service.load.running == 1, "it runs")
    for lane in lanes_of(servers()[0]):
        with contextlib.suppress(psutil.NoSuchProcess):
            lane.suspend()
    key, result = lanes.next()
    assert key == "again" and isinstance(result, Encoded)


def test_a_job_whose_lanes_are_killed_is_tried_twice(make: Make) -> None:
    lanes = make(split=SLOW_PATTERN)
    lanes.submit("victim", Encode(LONG))
    for _ in range(lane_service.MAX_TRIES):
        (lane,) = until(busy_lanes, "a lane is at work")
        lane.kill()
        until(lambda: gone(lane), "it has ended")  # noqa: B023
    key, error = lanes.next()
    assert key == "victim" and isinstance(error, BadRequest)
    assert error.message == "preparing the request ended its process 2 times, with code -9"


def busy_lanes() -> list[psutil.Process]:
    lanes = []
    for server in servers():
        for lane in lanes_of(server):
            try:
                if lane.cpu_times().user > 0.1:
                    lanes.append(lane)
            except psutil.NoSuchProcess:
                pass
    return lanes


@pytest.mark.parametrize("program", [shutil.which("false"), "/nowhere"])
def test_a_server_that_cannot_start_is_an_internal_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    error = make().error(Encode("a"))
    assert isinstance(error, Internal) and "no process could be started" in error.message


@pytest.mark.usefixtures("lanes_stay")
def test_closing_leaves_no_process_and_no_descriptor(make: Make) -> None:
    first = make()
    assert first.text() == "ok"  # files that Python opens once are open now
    earlier = servers()
    idle_lane(first)
    gc.collect()  # closes files that other tests left open
    before = psutil.Process().num_fds()
    second = make(split=SLOW_PATTERN)
    second.submit("hang", Encode(SLOW))
    until(lambda: second.service.load.running == 1, "it runs")
    started = [each for each in servers() if each not in earlier]
    started += [lane for server in started for lane in lanes_of(server)]
    second.service.close()
    until(lambda: psutil.Process().num_fds() <= before, "descriptors are closed")
    until(lambda: all(gone(process) for process in started), "its processes have ended")


@pytest.mark.usefixtures("lanes_stay")
def test_lanes_inherit_no_descriptor_and_have_a_lower_priority(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    lanes = make()
    assert lanes.text() == "ok"
    (server,) = servers()
    assert "LD_PRELOAD" not in server.environ()

    def at_rest() -> bool:
        lane = idle_lane(lanes)
        with contextlib.suppress(psutil.Error):
            assert server.nice() == lane.nice() == min(os.nice(0) + fork_server.NICENESS, 19)
            return server.num_fds() == lane.num_fds() == 4
        return False

    until(at_rest, "both have the three descriptors of every process, and a socket")


@linux
@pytest.mark.usefixtures("lanes_stay")
def test_a_short_chat_that_takes_long_is_the_last_of_its_lane(make: Make) -> None:
    """The chat uses 0.15 s of processor time, three times SHORT_TIME, so its lane is replaced."""
    loops = "{% for i in range(2999) %}{% for j in range(999) %}{% endfor %}{% endfor %}"
    lanes = make(f"{{% if messages | length > 1 %}}{loops}{{% endif %}}ok")
    assert lanes.text() == "ok"
    before = idle_lane(lanes)
    assert lanes.text(TWO) == "ok"
    until(lambda: gone(before), "the lane has ended")
    assert lanes.text() == "ok"


@linux
def test_long_work_runs_in_the_idle_class(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_IDLE_CLASS", "1")  # see support/patient
    lanes = make(split=SLOW_PATTERN)
    lanes.submit("long", Encode(LONG))

    def classes() -> set[int]:
        return {
            os.sched_getscheduler(lane.pid) for server in servers() for lane in lanes_of(server)
        }

    until(lambda: os.SCHED_IDLE in classes(), "the lane of the long text is in the idle class")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in an endless template"])
@linux
def test_all_processes_end_with_the_worker(tmp_path: Path, busy: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", tokenizer_config={"chat_template": LOOP})
    script = tmp_path / "worker.py"
    job = f"Render([{{}}], [], None, 0.0, {CONTEXT})" if busy else 'Encode("a")'
    script.write_text(
        f"""
from pathlib import Path
from mlxpool.worker.preparation import lane_service
from mlxpool.worker.preparation.jobs import Encode, Render
from mlxpool.worker.preparation.lane_service import LaneService
from mlxpool.worker.preparation.lanes import ForkServer
from mlxpool.worker.preparation.limits import Limits
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.system.cpu_threads import CpuThreads
from mlxpool.worker.weights.inspect import inspect
source = ChatTokenizer.from_folder(inspect(Path({str(folder)!r}))).source
done = lambda key, result: print("ready", flush=True)
lane_service.SHORT_TIME = 1000  # a slow short job keeps its lane, too
service = LaneService(ForkServer(source, Limits(render=1000)), done, CpuThreads(None, 1))
service.start()
service.submit(Waiting(1, "", 1, Encode("a")))
service.submit(Waiting(2, "", 1, {job}))
input()
"""
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
            children = partial(psutil.Process(worker.pid).children, recursive=True)
            until(lambda: len(children()) >= 2, "a fork server and a lane run")
            processes = children()
        finally:
            worker.kill()
    until(lambda: all(gone(process) for process in processes), "they have ended")
