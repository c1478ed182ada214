"""The process of a rank after the first: loads its part of the model and computes it in each pass.

Rank 0 sends the passes. The main thread computes, as it does not have to answer a broker.

A rank after the first knows neither sequences nor prefixes, and draws no tokens. The messages have
the block tables of the rows.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.common.config.schema import WorkerConfig
from mlxpool.common.progress import Block
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout
from mlxpool.worker.attention.layout_choice import writes_in_place
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.pipeline import CLEAR_INTERVAL
from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.divisions import part_of
from mlxpool.worker.groups.links import Meeting
from mlxpool.worker.groups.loading import load_part
from mlxpool.worker.groups.messages import (
    Again,
    CopyBlock,
    Ended,
    Head,
    MakePool,
    Message,
    Pass,
    Settle,
)
from mlxpool.worker.groups.pipes import Inbox
from mlxpool.worker.kernels import device, kernel_cache
from mlxpool.worker.kernels.kernel_cache import KernelJob
from mlxpool.worker.prefix.shared_blocks import BlockRow
from mlxpool.worker.system import load_clock
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.transfers import downloads
from mlxpool.worker.transfers.uploads import Uploads
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import LoadedModel
from mlxpool.worker.weights.locate import locate, open_files

log = logging.getLogger("mlxpool.worker")


def run(config: WorkerConfig, inbox: Inbox) -> int:
    """Load, then compute until rank 0 ends; called after `Begin`. Returns the exit code."""
    block = Block.open(config.block_fd) if config.block_fd >= 0 else Block.private()
    progress = Progress(lambda: None, block=block)
    progress.compute_begins()
    block.write("pid", os.getpid())
    progress.enter("load")
    try:
        follower = _load(config, progress)
        progress.enter("idle")
        block.write("orders", done := 1)  # `Begin` counts as an order
        while (message := inbox.take()) is not None:
            follower.handle(message)
            done += 1
            block.write("orders", done)
    except Exception as error:
        fields = {"rank": config.rank, "why": f"{type(error).__name__}: {error}"}
        log.critical("a rank cannot go on", extra=fields, exc_info=True)
        return 1
    return 0


def _load(config: WorkerConfig, progress: Progress) -> Follower:
    model = config.model
    LOAD.enter("check")
    folder = inspect(open_files(locate(model)), model.engine)
    LOAD.enter("device")
    device.log_device()
    device.keep_large_arrays_off_heap()
    part = part_of(folder, config.rank, model.devices)
    os.write(config.ready_fd, b"1")
    meeting = Meeting.of(
        config.rank, model.devices, config.hosts_fd, config.group_port, config.wait_limit
    )
    group = load_part(part, model, meeting, lambda tensors, size: progress.moved())
    LOAD.enter("warm_up")
    return Follower(group.loaded, group.collectives, progress)


class GivenStore(PagedStore):
    """The store of rows whose blocks rank 0 has chosen."""

    def reserve(self, row: BlockRow, tokens: int) -> None:
        """Does nothing, as rank 0 has reserved the blocks."""

    def short(self, rows: Sequence[BlockRow], ends: Sequence[int]) -> list[int]:
        """Returns no row: rank 0 has reserved the blocks of all rows."""
        return []


class FollowerLayout(PagedLayout):
    """The layout of rows whose blocks rank 0 has chosen."""

    def _make_store(self) -> PagedStore:
        return GivenStore(self.pool)


class _Flight(Struct, frozen=True):
    """A pass in flight over `rows` rows; `tokens`: the number of prompt tokens that it reads.

    `fresh`: the pass compiles something. The pass has ended when the arrays `done` are evaluated.
    """

    rows: int
    tokens: int
    fresh: bool
    done: list[mx.array] = field(default_factory=list)


class _Pool(Struct):
    """The layout, and its rows by the row numbers in rank 0's messages."""

    layout: FollowerLayout
    rows: dict[int, PagedRow] = field(default_factory=dict)

    @property
    def memory(self) -> KVPool:
        return self.layout.pool


class Follower:
    """Computes passes of one part of a model; used by one thread."""

    def __init__(self, loaded: LoadedModel, collectives: Collectives, progress: Progress) -> None:
        self._loaded, self._collectives, self._progress = loaded, collectives, progress
        self._uploads = Uploads() if downloads.works() else None
        self._pool: _Pool | None = None
        self._flights: deque[_Flight] = deque()
        self._jobs: list[KernelJob] = []
        self._passes = 0
        self._before: tuple[list[RowSpan], Pass] | None = None  # the newest pass

    def handle(self, message: Message) -> None:
        """Perform a message of rank 0. After any exception this rank cannot continue."""
        if self._jobs and not (isinstance(message, Pass) and message.builds):
            jobs, self._jobs = self._jobs, []
            LOAD.enter("kernels")
            kernel_cache.compile_together(jobs, self._progress.moved)
            LOAD.enter("warm_up")
        match message:
            case Pass():
                spans = _spans(self._required_pool(), message)
                self._before = None if message.builds else (spans, message)
                self._compute(spans, message)
            case Again():
                self._repeat(message)
            case Ended():
                self._wait()
            case CopyBlock(source, target):
                self._required_pool().memory.copy(source, target)
            case MakePool():
                self._make_pool(message)
            case Head(lines, width):
                states = mx.zeros((lines, width), self._loaded.dtype)
                mx.async_eval(  # type: ignore[no-untyped-call]
                    self._loaded.model.logits_of(self._collectives.from_first(states))
                )
            case Settle(cache):
                self._collectives.check()
                mx.set_cache_limit(cache)
                mx.clear_cache()
                device.trim_heap()
                load_clock.log_end(rank=self._collectives.rank)

    def _required_pool(self) -> _Pool:
        assert self._pool is not None, "a pool is made before it is used"
        return self._pool

    def _make_pool(self, message: MakePool) -> None:
        if self._pool is not None:
            self._pool.layout.close()
            self._pool = self._before = None
            mx.clear_cache()
        caches = self._loaded.folder.plan.caches
        context, chunk = message.context, message.chunk
        shape = RowShape(caches, self._loaded.dtype, context, chunk, kv=message.kv)
        layout = FollowerLayout(
            shape,
            self._loaded.model,
            message.blocks,
            rows=message.rows,
            deterministic=False,
            in_place=writes_in_place(shape, device.on_gpu()),
            uploads=self._uploads,
            long_passes=True,
        )
        if layout.name != message.layout:
            raise RuntimeError(
                f"rank {self._collectives.rank} has the KV cache {layout.name!r}, rank 0 has"
                f" {message.layout!r}: the devices of a group must be alike"
            )
        layout.notice.tell = self._progress.compiles
        self._pool = _Pool(layout)

    def _repeat(self, message: Again) -> None:
        assert self._before is not None, "a pass is computed before it is repeated"
        spans, before = self._before
        _change_rows(self._required_pool(), message)
        # The layout recognises repeated spans by the identity of the list.
        self._compute(spans, replace(before, ids=message.ids, drawn=message.drawn, fresh=False))

    def _compute(self, spans: list[RowSpan], message: Pass) -> None:
        pool, fresh = self._required_pool(), message.fresh
        reads = any(count > 1 for count in message.counts) or not message.wanted
        flight = _Flight(len(message.rows), len(message.ids) * reads, fresh)
        if not message.builds:
            if not self._flights:
                self._await(flight)
            elif fresh:
                self._progress.compiles()
        if self._uploads is not None:
            self._uploads.begin()
        drawn = None
        if message.drawn:
            drawn = self._collectives.from_first(mx.zeros((message.drawn,), dtype=mx.int32))
        if message.builds:
            with kernel_cache.collecting() as jobs:
                pool.layout.step(spans, message.ids, drawn, message.wanted)
            self._jobs += jobs
            return
        outputs = pool.layout.step(spans, message.ids, drawn, message.wanted)
        flight.done.extend(output for output in outputs if output is not None)
        mx.async_eval(*flight.done)  # type: ignore[no-untyped-call]
        self._flights.append(flight)

    def _await(self, flight: _Flight) -> None:
        """Reports to the progress that this thread waits for the end of a pass from now on."""
        self._progress.awaits(None, flight.tokens, flight.rows)
        if flight.fresh:
            self._progress.compiles()

    def _wait(self) -> None:
        flight = self._flights.popleft()
        mx.eval(*flight.done)
        self._collectives.check()
        self._progress.ended(fresh=flight.fresh)
        if self._flights:
            self._await(self._flights[0])
        else:
            self._progress.enter("idle")
        self._passes += 1
        if not device.on_gpu() and self._passes % CLEAR_INTERVAL == 0:
            mx.clear_cache()
            device.trim_heap()


def _change_rows(pool: _Pool, message: Pass | Again) -> None:
    """Gives rows the blocks in a message, and frees the blocks of rows that have left."""
    for number in message.left:
        row = pool.rows.pop(number, None)
        if row is not None:
            row.table = []  # so that the row's line of the block tables is free
    for number, first, blocks in message.tables:
        if number not in pool.rows:
            row = pool.layout.store.new_row()
            pool.rows[number] = row
        row = pool.rows[number]
        if first < len(row.table):  # stored states of decoding rows become invalid
            pool.layout.store.changes += 1
        row.table[first:] = blocks
        row.changed = min(row.changed, first)


def _spans(pool: _Pool, message: Pass) -> list[RowSpan]:
    """Returns the spans of a pass, after its rows got the blocks in the message."""
    _change_rows(pool, message)
    hidden = set(message.hidden)
    spans = []
    lists = message.rows, message.offsets, message.counts, message.lines
    for at, (number, offset, count, lines) in enumerate(zip(*lists, strict=True)):
        row = pool.rows[number]
        row.advance(offset - row.offset)
        spans.append(RowSpan(cast(Any, row), count, lines, at in hidden))
    return spans
