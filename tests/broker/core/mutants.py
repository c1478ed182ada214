"""Faults (mutants) that are put into the packages, one at a time, to check that tests detect them.

`python tests/broker/core/mutants.py [--only NAME] [--jobs N]` copies the packages to a temporary
folder, applies one patch there, runs each layer of tests on it, and prints the layers that detect
the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ("broker", "client", "common", "worker")
STORIES = "tests/broker"
NOT_STORIES = ("core/test_properties.py", "core/test_simulator.py", "core/test_mutants.py")
EXAMPLES, SEEDS = 150, 1500  # numbers of cases of the two random layers
TIME = 300.0  # time limit of one layer, in seconds


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in `file`, `new` replaces `old`, which occurs once there.

    `tests`: files with further tests that may detect the fault.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


def _broker(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"broker/mlxpool/broker/{file}.py", old, new)


_SEND_END = "        self._outbox.send_stream(request, terminal, reader.sent)\n"
_RESUME = "        resume = Resume(bytes(run.ids), run.facts,"

MUTANTS = (
    _broker(
        "a terminal obeys a shut window",
        "core/delivery",
        _SEND_END,
        "        if reader.sent - reader.acked < reader.window:\n    " + _SEND_END,
    ),
    _broker("a terminal is sent twice", "core/delivery", _SEND_END, 2 * _SEND_END),
    _broker(
        "the tail behind a shut window is dropped at the end",
        "core/delivery",
        "        while reader.unread:\n",
        "        while False:\n",
    ),
    _broker(
        "a shut window is ignored",
        "core/delivery",
        "        while reader.unread and reader.sent - reader.acked < reader.window:\n",
        "        while reader.unread:\n",
    ),
    _broker(
        "a cancel is forgotten in prefill",
        "core/worker_pool",
        "        if worker is not None and key in worker.leases:\n",
        "        if worker is not None and request.run.taken:\n",
    ),
    _broker(
        "credit is leaked",
        "workers/worker",
        "        return max(0, self.sequences - (self.works_sent - self.works_seen))\n",
        "        return max(0, self.sequences)\n",
    ),
    _broker(
        "ids are matched by prefix",
        "core/token_ingest",
        "            request = requests.get(ident)\n"
        "            if (\n"
        "                request is not None\n"
        "                and (run := request.run).number == number\n",
        "            alike = [r for i, r in requests.items() if i[:8] == ident[:8]]\n"
        "            request = alike[0] if alike else None\n"
        "            if (\n"
        "                request is not None\n",
    ),
    _broker(
        "the wall clock is used",
        "core/core",
        "        self._handlers[type(event)](event, now)\n",
        '        self._handlers[type(event)](event, __import__("time").time())\n',
    ),
    _broker(
        "a resume has one token too many",
        "core/dispatcher",
        _RESUME,
        "        resume = Resume(bytes(run.ids + run.ids[-4:]), run.facts,",
    ),
    _broker(
        "a resume is made of what was sent",
        "core/dispatcher",
        _RESUME,
        "        resume = Resume(bytes(run.ids[: 4 * request.reader.sent]), run.facts,",
    ),
    _broker(
        "facts are dropped in a resume",
        "core/dispatcher",
        _RESUME,
        "        resume = Resume(bytes(run.ids), None,",
    ),
    _broker(
        "a frame of a connection without a welcome counts",
        "core/worker_pool",
        '        worker.move("hello")\n        state.workers.pop(worker.epoch, None)\n',
        '        worker.move("hello")\n',
    ),
    _broker(
        "a condemned worker is still heard",
        "core/worker_pool",
        "        worker.cause = why\n        self._state.workers.pop(worker.epoch, None)\n",
        "        worker.cause = why\n",
    ),
    _broker(
        "a position is not checked",
        "core/token_ingest",
        "                and pos * ID_WIDTH == len(run.ids)\n",
        "",
    ),
    _broker(
        "a request that was taken over is lost twice",
        "core/failover",
        "r.run.leased_by(worker.epoch, n))",
        "r.run.epoch == worker.epoch)",
    ),
    _broker(
        "kills from outside are charged",
        "core/failover",
        "        shares = self._shares(worker, prefill) if own else {}\n",
        "        shares = self._shares(worker, prefill)\n",
    ),
    _broker(
        "losses without a token are never counted",
        "core/failover",
        "            run.resumes_without_progress += int(counts and not cleared)\n",
        "            pass\n",
    ),
    _broker(
        "a loss counts though another request is named for it",
        "core/failover",
        "            run.resumes_without_progress += int(counts and not cleared)\n",
        "            run.resumes_without_progress += int(counts)\n",
    ),
    _broker(
        "the second end by one request counts against its model",
        "core/worker_pool",
        "        elif not commanded and not worker.ended_by_charged_request:\n",
        "        elif not commanded:\n",
    ),
    _broker(
        "a worker that is found gone has not said its last words",
        "transport/peers",
        "        if not self.keep_gone:\n",
        "        if True:\n",
    ),
    _broker(
        "losses are counted for ever",
        "core/token_ingest",
        "            if row.ids or row.logprobs:\n"
        "                run.resumes_without_progress = 0\n",
        "",
    ),
    _broker(
        "a drain counts as a loss",
        "core/failover",
        "(worker.epoch, number):\n                self._requeue(request, now)\n",
        '(worker.epoch, number):\n                self._resume(request, worker, "drained", now)\n',
    ),
    _broker(
        "a charged request runs in any company",
        "workers/placement",
        "    return len(worker.leases) + 1 <= min(bounds) if bounds else True\n",
        "    return True\n",
    ),
    _broker(
        "owners do not take turns",
        "requests/fair_queue",
        "            self.owners.move_to_end(owner)\n",
        "",
    ),
    _broker(
        "a lower attempt takes over",
        "core/admission",
        "        elif event.attempt > known.attempt:\n",
        "        elif event.attempt != known.attempt:\n",
    ),
    _broker(
        "tombstones are ignored",
        "core/admission",
        " or self._state.tombstones.get(event.id)\n",
        "\n",
    ),
    _broker(
        "a take-over keeps what was unread",
        "core/admission",
        "        request.reader = _new_reader(event, message)\n",
        "        before, request.reader = request.reader, _new_reader(event, message)\n"
        "        request.reader.unread = before.unread\n"
        "        request.reader.unread_bytes = before.unread_bytes\n",
    ),
    _broker(
        "a take-over draws a new seed",
        "core/admission",
        "        run.release(now)\n",
        "        run.release(now)\n        run.seed = _seed(message, event.entropy)\n",
    ),
    _broker(
        "a take-over leaves the old run alone",
        "core/admission",
        "        self._pool.cancel_run(request)\n        self._state.detach(request)\n",
        "        self._state.detach(request)\n",
    ),
    _broker(
        "text is lost when deltas merge",
        "requests/request",
        "    last.texts.append(text)\n",
        "    last.texts[:] = [text]\n",
    ),
    _broker(
        "a broker that was frozen blames its workers",
        "workers/liveness",
        "        gap = min(now - self.at, 2 * tick) if self.at else 0.0\n",
        "        gap = now - self.at if self.at else 0.0\n",
    ),
    _broker(
        "waiting for a CPU counts as a hang",
        "workers/liveness",
        "    return gap - max(0, wait_now - wait_before) / 1e9\n",
        "    return gap\n",
    ),
    _broker(
        "a broker that was frozen blames its clients",
        "core/endings",
        "            link.heard_at = min(now, link.heard_at + event.seconds)\n",
        "            pass\n",
    ),
    _broker(
        "pinned models are evicted",
        "models/registry",
        " and m.local_workers and m.config.keep_alive >= 0]\n",
        " and m.local_workers]\n",
    ),
    _broker(
        "a kill from outside is taken for its own",
        "workers/exit_causes",
        "    own = code >= 0 or -code in _FAULTS\n",
        "    own = True\n",
    ),
    Mutant(
        "the worker counts work of an older connection",
        "worker/mlxpool/worker/process/intake.py",
        "        self.drop_all()\n        self._works = 0\n",
        "        self.drop_all()\n",
        ("tests/worker/process/test_edge.py",),
    ),
    Mutant(
        "the worker keeps what it ran when the broker does not know it",
        "worker/mlxpool/worker/process/intake.py",
        "        self._compute(DropAll(self.fence))\n",
        "",
        ("tests/worker/process/test_edge.py",),
    ),
    Mutant(
        "the client does not look at boot and link",
        "client/mlxpool/client/retry.py",
        "        elif state.accepted and (state.boot, state.link) != peer:\n",
        "        elif False:\n",
        ("tests/client/test_retry.py",),
    ),
    Mutant(
        "the client takes frames of older sendings",
        "client/mlxpool/client/stream.py",
        "        return not self.over and attempt in (0, self.attempt)\n",
        "        return not self.over\n",
        ("tests/client/test_retry.py",),
    ),
    Mutant(
        "the client sends again after a cancel",
        "client/mlxpool/client/retry.py",
        "self._cancel_again() if self.cancelled else self._send_again(now, heard_at)",
        "self._send_again(now, heard_at)",
        ("tests/client/test_retry.py",),
    ),
)


@contextlib.contextmanager
def sown(mutant: Mutant) -> Iterator[dict[str, str]]:
    """Yields environment variables with which Python imports the packages with this fault."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-mutant-") as folder:
        skip = shutil.ignore_patterns("__pycache__")
        for source in SOURCES:
            shutil.copytree(ROOT / source, Path(folder, source), ignore=skip)
        target = Path(folder, mutant.file)
        target.write_text(patched(mutant, target.read_text("utf-8")), "utf-8")
        roots = [str(Path(folder, source)) for source in SOURCES] + [str(ROOT / "tests")]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "PYTHONDONTWRITEBYTECODE": "1"}


def patched(mutant: Mutant, text: str) -> str:
    """Returns the text with the fault. Raises ValueError unless `old` occurs exactly once."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name!r}: {mutant.file} has its place {count} times, not once")
    return text.replace(mutant.old, mutant.new)


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Returns exit code and output; a process that exceeds its time limit counts as failed."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME,
        )
    except subprocess.TimeoutExpired:
        return 1, "FAILED in-time"
    return done.returncode, done.stdout + done.stderr


def pytest_of(paths: Sequence[str], environment: dict[str, str]) -> str:
    """Returns the name of the first failed test.

    Returns "" if all tests pass.
    """
    ignored = [f"--ignore={STORIES}/{name}" for name in NOT_STORIES]
    options = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *ignored]
    code, output = run([*options, *paths], environment)
    failed = re.search(r"(?:FAILED|ERROR) (\S+)", output)
    if failed:
        return failed[1].rsplit("/", 1)[-1]
    if code:
        raise RuntimeError(f"pytest ended with {code}:\n{output[-2000:]}")
    return ""


def caught_by(mutant: Mutant) -> dict[str, str]:
    """Returns a map from each layer of tests to its result; "" if it does not detect the fault.

    The result of the layer "stories" is the name of the failed test; other layers have "yes".
    """
    with sown(mutant) as environment:
        properties, _ = run([__file__, "--properties"], environment)
        seeds = ["--seeds", str(SEEDS), "--jobs", "1"]
        simulator, _ = run([str(Path(__file__).with_name("simulator.py")), *seeds], environment)
        return {
            "stories": pytest_of([STORIES, *mutant.tests], environment),
            "properties": "yes" if properties else "",
            "simulator": "yes" if simulator else "",
        }


def properties() -> None:
    """Runs the state machine, without shrinking a failed example."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from broker.core.test_properties import Pool

    run_state_machine_as_test(
        Pool,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="a part of a mutant's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--properties", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.properties:
        properties()
        return 0
    chosen = [m for m in MUTANTS if not args.only or args.only in m.name]
    for mutant in chosen:
        patched(mutant, (ROOT / mutant.file).read_text("utf-8"))
    survived = 0
    print("| fault | in | stories | properties | simulator |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, caught in zip(chosen, pool.map(caught_by, chosen), strict=True):
            lost = not any(caught.values())
            survived += lost
            shown = [caught[layer] or "no" for layer in ("stories", "properties", "simulator")]
            name = f"**SURVIVED** {mutant.name}" if lost else mutant.name
            print(f"| {name} | {Path(mutant.file).name} | {' | '.join(shown)} |", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
