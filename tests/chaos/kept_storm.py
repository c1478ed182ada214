"""A storm: clients submit jobs, which the pool stores, over HTTP and from Python; processes die.

There are two owners over HTTP, and one with the Python client. Threads with their own seeds submit
jobs, background responses and batches, read them from any position, cancel, retry and delete them.
Meanwhile workers, broker, gateways, clients and the disk fail. Afterwards each accepted job is read
once more, and compared with the counting model's answer and with earlier readings. Then the store
is audited.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from chaos.harness import SHORT_LOADS, model
from chaos.kept_faults import LARGE, OTHER_CLOCK, Faults, until_none_left
from chaos.kept_http import HttpOwner
from chaos.kept_native import NativeOwner
from chaos.kept_readings import LONG, PAUSE
from chaos.kept_truth import ENDED, Known, StormOver, Truth
from support.disk_shim import ShimmedDisk
from support.free_ports import free_port
from support.gateway_process import GatewayProcess
from support.http_owners import ALICE, BOB, keys_file
from support.pool import Pool, with_path
from support.postgres_server import PostgresServer
from support.store_audit import audit_folder, audit_postgres

MAX_FILES = 160  # most files that an idle broker has open
MAX_LOG = 48 * 1024 * 1024  # most bytes of the write-ahead log
PADDING = 7 * 1024 * 1024  # size of a file that fills a small store
FILES = ("lock", "reserve")  # files in the folder of a store, beside the database


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the storm. `pause`: the mean time between two faults in seconds.

    `actions` is a minimum: threads continue until all faults have happened.
    """

    actions: int = 200
    faults: int = 12
    seed: int = 1
    threads: int = 1  # threads of each owner
    pause: float = 0.3
    lines: int = 12  # lines of a batch


class KeptStorm:
    """A storm of faults over stored jobs; `run` may be called once, and returns its figures."""

    def __init__(self, plan: Plan, tmp_path: Path, server: PostgresServer | None = None) -> None:
        """With a `server` the store is in PostgreSQL, and faults also kill this server."""
        self.plan = plan
        self.truth = Truth()
        self._folder = tmp_path
        self._clock = tmp_path / "clock"
        (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCK)
        self._server = server
        self._disk = ShimmedDisk(tmp_path / "disk")
        self._state = server.new_url() if server else str(tmp_path / "disk" / "jobs")
        bound = f'state_bytes = "{LARGE}"\n'
        small = model("small", extra="context = 16")
        environment = {"PYTHONPATH": with_path(tmp_path), "CLOCK_OFFSET": str(self._clock)}
        self._pool = Pool(
            tmp_path,
            SHORT_LOADS + bound + model(replicas=2, step_us=1500, joint=4) + small,
            arguments=("--state-dir", self._state),
            environment={**environment, **({} if server else self._disk.environment)},
        )
        self._numbers = itertools.count()
        self._striking = threading.Event()

    def run(self) -> dict[str, Any]:
        """Runs the storm, then the checks; returns figures. `truth` collects the errors found."""
        began = time.monotonic()
        try:
            self._run()
        finally:
            self._disk.close()
        self._check_what_is_left()
        return {
            "seconds": round(time.monotonic() - began, 1),
            "counts": dict(sorted(self.truth.counts.items())),
            "faults": dict(self.faults.counts),
        }

    def _run(self) -> None:
        keys = keys_file(self._folder)
        with self._pool:
            run_dir, log = self._pool.run_dir, self._folder / "gateway.log"
            with (
                GatewayProcess(run_dir, free_port(), log, "--keys", str(keys)) as keyed,
                GatewayProcess(run_dir, free_port(), log) as open_to_all,
            ):
                gateways = [keyed, open_to_all]
                disk = self._server or self._disk
                self.faults = Faults(
                    self._pool, gateways, disk, self._clock, self.truth, self.plan.seed
                )
                owners = self._owners(keyed.url, open_to_all.url)
                followers = [HttpOwner("alice", "follower", keyed.url, ALICE, self.truth, 0, 0)]
                try:
                    self._storm(owners, followers)
                    self._guarded(lambda: self._check(owners))
                    self._guarded(self._check_processes)
                finally:
                    for owner in (*owners, *followers):
                        owner.close()

    def _owners(self, keyed: str, open_to_all: str) -> list[HttpOwner | NativeOwner]:
        """Returns alice, bob and the local user over HTTP, and the local user from Python.

        `keyed` and `open_to_all` are the URLs of gateways with and without keys.
        """
        lines, owners = self.plan.lines, list[HttpOwner | NativeOwner]()
        truth, seed = self.truth, self.plan.seed
        for number in range(self.plan.threads):
            owners += [
                HttpOwner("alice", f"alice-{number}", keyed, ALICE, truth, seed, lines),
                HttpOwner("bob", f"bob-{number}", keyed, BOB, truth, seed, lines),
                HttpOwner("local", f"local-http{number}", open_to_all, "none", truth, seed, lines),
                NativeOwner("local", f"local-{number}", self._pool.run_dir, truth, seed, lines),
            ]
        return owners

    def _storm(self, owners: list[HttpOwner | NativeOwner], followers: list[HttpOwner]) -> None:
        for owner in owners[:2]:
            assert isinstance(owner, HttpOwner)
            padding = {"file": ("padding", b"x" * PADDING)}
            owner.fine("POST", "/v1/files", data={"purpose": "batch"}, files=padding)
        works = [partial(self._act, owner) for owner in owners]
        works += [partial(self._follow, follower) for follower in followers]
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        injector = threading.Thread(target=self._strike)
        self._striking.set()
        for thread in (injector, *threads):
            thread.start()
        injector.join()
        for thread in threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs `work`; an exception is recorded as an error, after which the storm ends."""
        try:
            work()
        except StormOver:
            self.faults.stop()
        except BaseException:
            self.truth.error(traceback.format_exc())

    def _strike(self) -> None:
        self._guarded(lambda: self.faults.strike(self.plan.faults, self.plan.pause))
        self._striking.clear()

    def _act(self, owner: HttpOwner | NativeOwner) -> None:
        while next(self._numbers) < self.plan.actions or self._striking.is_set():
            self.truth.check()
            owner.act()

    def _follow(self, owner: HttpOwner) -> None:
        """Follows the feed of ended jobs; checks that its numbers increase and none repeats."""
        after, seen = 0, 0
        while self._striking.is_set():
            page = owner.fine("GET", "/v1/jobs", params={"after": after, "limit": 100})
            numbers = [row["end_seq"] for row in page["data"]]
            if numbers != sorted(set(numbers)) or (numbers and numbers[0] <= after):
                self.truth.error(f"the feed of ends behind {after} has {numbers}")
            seen += len(numbers)
            after = max(numbers, default=after)
            time.sleep(PAUSE)
        self.truth.count("ends followed", seen)

    # ---- checks ----------------------------------------------------------------------------------

    def _check(self, owners: list[HttpOwner | NativeOwner]) -> None:
        """Checks that each job has ended, once, with the right result."""
        for owner in owners:
            for batch in list(owner.batches):
                owner.check_batch(batch)
        for owner in owners:
            rows = self._ended(owner) if isinstance(owner, HttpOwner) else {}
            for known in owner.mine:
                self._check_job(owner, known, rows)
        self._check_killed_clients(owners)

    def _ended(self, owner: HttpOwner) -> dict[str, dict[str, Any]]:
        """Returns the rows of the jobs of an owner by their keys, once all jobs have ended."""
        end = time.monotonic() + LONG
        for state in ("waiting", "running"):
            while owner.fine("GET", "/v1/jobs", params={"state": state, "limit": 1})["data"]:
                assert time.monotonic() < end, f"jobs of {owner.owner} do not end"
                time.sleep(PAUSE)
        rows: dict[str, dict[str, Any]] = {}
        after = 0
        while True:
            page = owner.fine("GET", "/v1/jobs", params={"after": after, "limit": 500})
            for row in page["data"]:
                if row["key"] in rows or row["end_seq"] <= after:
                    self.truth.error(f"{row['key']} is twice among the ends")
                rows[row["key"]] = row
            if not page["next"]:
                return rows
            after = page["next"]

    def _check_job(
        self, owner: HttpOwner | NativeOwner, known: Known, rows: dict[str, dict[str, Any]]
    ) -> None:
        if isinstance(owner, NativeOwner):
            self.truth.row(known, owner.fine(lambda: owner.client.job(known.key)))
            if not known.released:
                owner.read_job(known)
            return
        row = rows.get(known.key if known.kind == "job" else known.id)
        if row is None:
            self.truth.error(f"{known.key}: is not among the ends")
            return
        self.truth.told(known, row["state"])
        if row["state"] in ENDED:
            if known.kind == "job":
                had = owner.read_job(known)
                if had != row["ids"]:
                    self.truth.error(f"{known.key}: has {row['ids']} ids, read {had}")
            else:
                owner.read_response(known)

    def _check_killed_clients(self, owners: list[HttpOwner | NativeOwner]) -> None:
        """Checks that jobs whose keys a killed client had printed exist, and are done."""
        (reader,) = [owner for owner in owners if isinstance(owner, NativeOwner)][:1]
        for known in self.truth.of("local"):
            if "-killed" in known.key:
                reader.read_job(known)

    def _check_processes(self) -> None:
        """Checks that the broker reports no inconsistency, and has few open files."""
        assert self._pool.process is not None
        stats = self._pool.ask("stats")
        if stats["internal_errors"] or not stats["conserved"]:
            self.truth.error(f"the broker's figures: {stats}")
        files = psutil.Process(self._pool.process.pid).num_fds()
        self.truth.count("files of the broker", files)
        if files > MAX_FILES:
            self.truth.error(f"the broker has {files} files open")

    def _check_what_is_left(self) -> None:
        """Checks that the store is consistent, and that no process or other file is left."""
        self.truth.wrong += until_none_left(self._pool.run_dir)
        if self._pool.run_dir.exists():
            self.truth.error(f"{self._pool.run_dir} is left")
        for name in ("broker.log", "gateway.log"):
            text = (self._folder / name).read_text(errors="replace")
            if "Traceback" in text:
                at = text.index("Traceback")
                self.truth.error(f"{name}: {text[max(0, at - 500) : at + 3000]}")
        if self._server is not None:
            self.truth.wrong += audit_postgres(self._state)
            return
        state = Path(self._state)
        for path in state.iterdir():
            if path.suffix == ".db-wal" and path.stat().st_size > MAX_LOG:
                self.truth.error(f"{path.name} has {path.stat().st_size} bytes")
            if path.name not in FILES and not path.name.startswith("jobs-"):
                self.truth.error(f"{path.name} is left in the store's folder")
        self.truth.wrong += audit_folder(state)
