"""Builds the parts of a broker, connects them, and runs the broker's loop."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker.admin.commands import Commands, Controls
from mlxpool.broker.admin.reload import CurrentSettings, Reloader, without_local_workers
from mlxpool.broker.admin.server import AdminServer
from mlxpool.broker.admin.service_notifier import ServiceNotifier
from mlxpool.broker.catalogue import Catalogue, all_locations, all_weights_bytes
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.edge.client_ingress import ClientIngress
from mlxpool.broker.edge.endpoints import Endpoints, IdlePeers
from mlxpool.broker.edge.executor import Actions, Executor
from mlxpool.broker.edge.full_collections import FullCollections
from mlxpool.broker.edge.http_gateway import HttpGateway
from mlxpool.broker.edge.job_service import (
    JobService,
    refuse_questions,
    why_without_jobs,
)
from mlxpool.broker.edge.lifecycle import Lifecycle, Signals, lock, raise_descriptor_limit
from mlxpool.broker.edge.loop import Loop, LoopLag, Priority
from mlxpool.broker.edge.page_requests import PageCancels, PageJobs
from mlxpool.broker.edge.reporting import Reporter
from mlxpool.broker.edge.run_dir_watch import RunDirWatch
from mlxpool.broker.edge.tracing import Spans
from mlxpool.broker.edge.worker_ingress import WorkerIngress
from mlxpool.broker.edge.worker_processes import WorkerProcesses
from mlxpool.broker.host import memory_limit_bytes, resident_bytes
from mlxpool.broker.jobs import events as job_events
from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.models.registry import Registry
from mlxpool.broker.processes.gateway_process import GatewayProcess
from mlxpool.broker.processes.remote_workers import RemoteWorkers
from mlxpool.broker.processes.supervisor import Supervisor
from mlxpool.broker.store.records import MAX_STACKS, StoreError
from mlxpool.broker.telemetry.reports import top
from mlxpool.broker.transport.memory_guard import MemoryGuard, busy_descriptors
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.common.config.loading import check_run_dir
from mlxpool.common.config.schema import BUILTIN_PREFIX, ModelConfig, PoolConfig
from mlxpool.common.protocol.frames import EXACT_BITS
from mlxpool.common.protocol.kept.job_messages import JOBS_OFF
from mlxpool.common.trace import History

if TYPE_CHECKING:
    from mlxpool.broker.http.server import HttpServer


class ReloadTarget(Struct, eq=False):
    """The parts of the broker that a reload changes, see `admin.reload.Target`."""

    _registry: Registry
    _supervisor: Supervisor
    _endpoints: Endpoints
    _remote: RemoteWorkers
    _catalogue: Catalogue
    _gateway: HttpGateway | None

    def model_of(self, name: str) -> str:
        return self._registry.model(name).name

    def use(self, config: PoolConfig) -> dict[str, str]:
        self._supervisor.config = config
        if self._gateway is not None:
            self._gateway.reload()
        return self._endpoints.access.keyring.replace(config.keys)

    def use_models(self, models: Mapping[str, ModelConfig]) -> None:
        self._catalogue.reload(models)

    def disconnect_user(self, user: str, now: float) -> None:
        self._remote.revoke(user, now)
        self._endpoints.disconnect_user(user)


log = logging.getLogger("mlxpool.broker")

MAX_READ_ROUNDS = 64  # most rounds of back-socket reads before a remote worker's end is reported


class Broker:
    """A broker. `run` serves until SIGTERM, SIGINT or an operator's `stop`."""

    def __init__(self, config: PoolConfig, reread: Callable[[], PoolConfig] | None = None) -> None:
        """`reread` reads the settings again for a reload; if None, the settings never change."""
        check_run_dir(config.run_dir)
        self.notifier = ServiceNotifier.from_environment()
        if not config.local_workers:
            config = without_local_workers(config)
        descriptors = raise_descriptor_limit()
        self.settings = CurrentSettings(config)
        self.spans = Spans.open() if config.traces else None
        locked = lock(config.run_dir)
        self.http = _http_server(config) if config.metrics else None
        self.gateway_process = GatewayProcess(config) if config.http else None
        self.boot = secrets.randbits(EXACT_BITS) or 1
        self._started_at = time.monotonic()
        self.core = Core(
            config,
            self.boot,
            all_weights_bytes(config),
            memory_limit_bytes(config),
            all_locations(config),
        )
        self.state = self.core.state
        self.counters = self.state.counters
        self.executor = Executor(self.core, self.counters, History("broker"))
        self.perform = self.executor.perform
        self.lag = LoopLag()
        self.collections = FullCollections(
            lambda: bool(self.state.requests or self.state.calls or self.core.ends_more),
            partial(resident_bytes, os.getpid()),
        )
        self.loop = Loop(self.lag, lambda late, now: self.perform(ev.Late(late), now))
        self.gateway = self._make_gateway()
        self.lifecycle = Lifecycle(self.perform, self.notifier, self.gateway, self._end_readings)
        self.endpoints = Endpoints(config, descriptors, self._count_refusal)
        listener = self.endpoints.listener
        self.run_dir = RunDirWatch(
            config.run_dir,
            locked,
            self.endpoints.sockets,
            times_unbound=lambda: None if listener.unbound else listener.times_unbound,
            restored=self._record_processes,
            on_trouble=self._on_trouble,
        )
        # Without local workers, the model files are elsewhere and cannot be scanned.
        scanned = config if config.local_workers else replace(config, models={})
        self.catalogue = Catalogue(scanned, self.perform)
        self._build_workers(config)
        self._build_clients()
        self._build_operations(reread)
        self._add_to_loop()
        for pid in self.supervisor.records.kill_survivors():
            log.warning("ended a worker of an earlier broker", extra={"pid": pid})

    def _record_processes(self) -> None:
        """Rewrites the files that record the running processes, because they were removed."""
        self.supervisor.record_all()
        if self.gateway_process is not None:
            self.gateway_process.record()

    def _on_trouble(self, trouble: str, now: float) -> None:
        """Reports to the core why new workers and commands cannot connect.

        `trouble` is the reason, or "" if they can connect. While they cannot connect, ends the
        workers that have not connected yet.
        """
        self.perform(ev.Unreachable(trouble), now)
        if trouble:
            for slot in list(self.supervisor.children):
                if self.sessions.epoch_of_slot(slot) is None:
                    self.supervisor.stop(slot, now, at_once=True)

    def _unreachable(self, now: float) -> str:
        """Returns why a worker that starts now could not connect; "" if it could."""
        self.run_dir.look(now)
        return self.run_dir.trouble

    def _check_run_dir(self, now: float) -> None:
        if not self.lifecycle.stopping:
            self.run_dir.check(now)

    def _count_refusal(self) -> None:
        self.counters.auth_failures += 1

    def _current(self) -> PoolConfig:
        return self.settings.config

    def _make_gateway(self) -> HttpGateway | None:
        process = self.gateway_process
        if process is None:
            return None
        return HttpGateway(process, self._current, self.loop, self.boot)

    def _build_workers(self, config: PoolConfig) -> None:
        perform, state = self.perform, self.state
        self.sessions = sessions = WorkerSessions(self.endpoints.back)
        self.supervisor = Supervisor(config, self.endpoints.ipc("back"))
        self.remote_workers = RemoteWorkers(
            sessions,
            state,
            perform,
            read_pending=lambda now: self.worker_ingress.read_all(MAX_READ_ROUNDS, now),
            stopping=lambda: self.lifecycle.stopping,
            local_workers=config.local_workers,
        )
        self.worker_ingress = WorkerIngress(
            sessions, self.supervisor, self.remote_workers, state, perform, self.counters
        )
        self.worker_processes = WorkerProcesses(
            self.supervisor,
            sessions,
            state,
            perform,
            self.loop,
            read_pending=self.worker_ingress.read,
            stop_remote=self.remote_workers.stop,
            unreachable=self._unreachable,
        )

    def _build_clients(self) -> None:
        front = self.endpoints.front
        self.no_jobs = ""  # why the pool runs without jobs although the settings name a store
        self.jobs = self._make_jobs()
        self.client_ingress = ClientIngress(
            front,
            self.perform,
            self.counters,
            boot=self.boot,
            settings=self._current,
            is_live=lambda id: id in self.state.requests,
            is_faulty=self.state.registry.is_faulty,
            after_scan=self.catalogue.after_scan,
            jobs=self.jobs,
            jobs_off=self._jobs_off,
        )
        self.guard = MemoryGuard(self.endpoints.listener, front, self.state)
        self.endpoints.listener.busy = partial(busy_descriptors, front, self.state)
        self.endpoints.listener.on_ended = self._on_client_gone
        self.idle_peers = IdlePeers(front, self.sessions, lambda link: link in self.state.links)
        self.executor.bind(
            Actions(
                front,
                self.sessions,
                self.worker_processes,
                self.perform,
                dump_stacks=self.supervisor.dump_stacks,
                stop_pool=lambda now: self.lifecycle.stop(now, final=False),
                deliver_to_jobs=lambda action: self.jobs.deliver(action) if self.jobs else None,
                spans=self.spans,
            )
        )

    def _end_readings(self, final: bool, now: float) -> None:
        if self.jobs is not None:
            self.jobs.handle(job_events.Closing(final), now)

    def _make_jobs(self) -> JobService | None:
        """Creates the service of jobs; None without jobs.

        If the store cannot be opened, returns None or raises StoreError. `why_without_jobs` decides
        whether the broker may run without jobs.
        """
        config = self._current()
        if not config.state_dir:
            return None
        try:
            return JobService(
                self.core,
                self.boot,
                self._current,
                self.endpoints.front,
                self.perform,
                on_fenced=lambda now: self.lifecycle.end_at_once(now),
                stacks=lambda slot: self.supervisor.stacks(slot, MAX_STACKS),
            )
        except StoreError as error:
            why = why_without_jobs(config, error)
            if why is None:
                raise
        self.no_jobs = why
        log.warning("no jobs are kept, streams go on", extra={"why": why})
        return None

    @property
    def _jobs_off(self) -> str:
        """The answer to questions about jobs in a pool without jobs."""
        return f"this pool keeps no jobs: {self.no_jobs}" if self.no_jobs else JOBS_OFF

    @property
    def _folder_of_jobs(self) -> str | None:
        """The folder of the job store; None for a database URL, which may have a password."""
        place = self._current().state_dir
        return place if self.jobs is not None and "://" not in place else None

    def _job_figures(self) -> JobFigures | None:
        if self.jobs is not None:
            return self.jobs.figures()
        return JobFigures.none(self.no_jobs) if self.no_jobs else None

    def _build_operations(self, reread: Callable[[], PoolConfig] | None) -> None:
        self.reporter = reporter = Reporter(
            self.state,
            self.lifecycle,
            self.lag,
            boot=self.boot,
            started_at=self._started_at,
            settings=self._current,
            front=self.endpoints.front,
            listener=self.endpoints.listener,
            guard=self.guard,
            endpoints=self.endpoints.bound,
            metrics_url=None if self.http is None else self.http.url,
            gateway=self.gateway,
            jobs=self._job_figures,
            run_dir=self.run_dir,
        )
        target = ReloadTarget(
            self.state.registry,
            self.supervisor,
            self.endpoints,
            self.remote_workers,
            self.catalogue,
            self.gateway,
        )
        self.reloader = Reloader(
            self.settings, reread, target, self.perform, self.notifier, self.counters
        )
        controls = Controls(
            reporter.snapshot,
            self.supervisor.last_dump,
            self.reloader.outcome,
            stop=lambda now: self.lifecycle.stop(now, final=True),
            drain_grace=lambda: self.settings.config.drain_grace,
        )
        commands = Commands(self.core, controls, self.perform)
        ask_jobs = refuse_questions(self._jobs_off) if self.jobs is None else self.jobs.ask
        self.page_cancels = None
        if self.http is not None and self.http.cancels is not None:
            self.page_cancels = PageCancels(self.http.cancels, self.state, commands)
        self.page_jobs = None
        if self.http is not None and self.http.jobs is not None:
            self.page_jobs = PageJobs(self.http.jobs, ask_jobs)
        self.admin = AdminServer(
            self.endpoints.admin,
            commands,
            lambda now: top(reporter.snapshot(now)),
            self.catalogue.after_scan,
            self.reloader.after_reload,
            ask_jobs,
            self.counters,
        )
        self.signals = Signals(self.lifecycle, self.supervisor.kill_all, self.reloader.begin)

    # ---- the loop ------------------------------------------------------------------------------

    def _add_to_loop(self) -> None:
        loop, endpoints, remote = self.loop, self.endpoints, self.remote_workers
        add_source, add_task = loop.add_source, loop.add_task
        listener, zap = endpoints.listener, endpoints.access.zap
        add_source(listener.monitor, listener.on_accepted, Priority.LISTENER)
        add_source(endpoints.back.socket, self.worker_ingress.read, Priority.WORKERS)
        add_source(remote.slots.monitor, remote.on_disconnected, Priority.WORKER_EXITS)
        add_source(endpoints.front.socket, self.client_ingress.read, Priority.CLIENTS)
        if zap is not None:
            add_source(zap.socket, zap.serve)
        add_source(endpoints.admin.socket, self.admin.serve)
        add_source(self.signals.waker, self.signals.handle)
        add_source(self.reloader.waker, self.reloader.apply)
        add_source(self.catalogue.waker, self.catalogue.on_results)
        if self.http is not None:
            add_source(self.http.latest.waker, self._put_snapshot)
        if self.jobs is not None:
            add_source(self.jobs.waker, self.jobs.serve)
            add_task(self.jobs.serve, self.jobs.next_wake)
        if self.page_cancels is not None:
            add_source(self.page_cancels.waker, self.page_cancels.serve)
        if self.page_jobs is not None:
            add_source(self.page_jobs.waker, self.page_jobs.serve)
        add_task(self.catalogue.answer_waiting, self.catalogue.next_wake)
        add_task(self._wake_core, self.core.next_wake)
        add_task(self.worker_processes.observe, self.supervisor.next_wake)
        if self.gateway is not None:
            add_task(self.gateway.check, self.gateway.next_wake)
        add_task(remote.observe, remote.slots.next_wake)
        add_task(listener.check, listener.next_wake)
        add_task(self._check_run_dir, self.run_dir.next_wake)
        add_task(self.guard.check, self.guard.next_wake)
        add_task(self._retry_full_peers, self._next_retry)
        add_task(self.admin.send_updates, self.admin.subscriptions.next_wake)
        add_task(self.idle_peers.sweep, self.idle_peers.next_wake)
        add_task(self._notify, self.notifier.next_wake)
        add_task(self.collections.on_turn)

    def _wake_core(self, now: float) -> None:
        if self.core.next_wake() <= now:
            self.perform(ev.Wake(), now)

    def _put_snapshot(self, now: float) -> None:
        assert self.http is not None
        self.http.latest.put(self.reporter.snapshot(now))

    def _on_client_gone(self, descriptor: int, now: float) -> None:
        """Handles the end of a client's connection.

        The core can treat the client as lost now, without waiting for the limit of silence.
        """
        peer = self.endpoints.front.ended(descriptor)
        link = None if peer is None else self.state.links.get(peer.number)
        if peer is not None and link is not None and link.ids:
            self.perform(ev.LinkLost(peer.number), now)

    def _retry_full_peers(self, now: float) -> None:
        self.endpoints.back.retry(now)
        self.endpoints.admin.retry(now)
        for number in self.endpoints.front.retry(now):
            self.perform(ev.LinkLost(number), now)

    def _next_retry(self) -> float:
        endpoints = self.endpoints
        return min(
            peers.next_retry() for peers in (endpoints.back, endpoints.front, endpoints.admin)
        )

    def _notify(self, now: float) -> None:
        self.notifier.on_turn(self.reporter.status, now)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serves until a stop. `ready` is called once the signal handlers are installed."""
        try:
            with self.signals.installed():
                about = {"run_dir": self.settings.config.run_dir, "pid": os.getpid()}
                log.info("broker ready", extra={**about, "jobs": self._folder_of_jobs})
                ready()
                self.notifier.ready()
                self._start()
                while not self._has_ended():
                    self.loop.turn()
        finally:
            self.close()

    def _has_ended(self) -> bool:
        """Returns whether a stop was requested, and all streams and child processes have ended."""
        if not self.lifecycle.stopping or self.core.ends_more or self.supervisor.children:
            return False
        return self.gateway is None or self.gateway.ended

    def _start(self) -> None:
        """Starts the catalogue, the gateway and the workers of pinned models."""
        config = self.settings.config
        if self.jobs is not None:
            self.jobs.start()
        if self.gateway is not None:
            self.gateway.start(time.monotonic())
        # Built-in models are inspected only when the list is first requested.
        own = any(not model.path.startswith(BUILTIN_PREFIX) for model in config.models.values())
        self.catalogue.start(scan=config.local_workers and own)
        for name, model in config.models.items():
            if model.pin:
                self.perform(ev.LoadModel(self.state.registry.model(name).name), time.monotonic())
        self.collections.start(time.monotonic())

    def close(self) -> None:
        """Frees all resources: child processes, threads, sockets, the lock."""
        self.reloader.close()
        self.catalogue.close()
        self.supervisor.close()
        if self.gateway_process is not None:
            self.gateway_process.close()
        if self.http is not None:
            self.http.close()
        self.remote_workers.slots.close()
        if self.jobs is not None:
            self.jobs.close()
        self.endpoints.close()
        self.signals.waker.close()
        os.close(self.run_dir.lock)
        self.notifier.close()
        if self.spans is not None:
            self.spans.close()
        log.info("broker stopped")


def _http_server(config: PoolConfig) -> HttpServer:
    # Imported here, so that a broker that replaces another broker starts faster.
    from mlxpool.broker.http.operator_access import read_token
    from mlxpool.broker.http.server import HttpServer

    file = config.metrics_admin_token
    token = None if file is None else read_token(file)
    return HttpServer(config.metrics, operator_token=token, run_dir=config.run_dir)
