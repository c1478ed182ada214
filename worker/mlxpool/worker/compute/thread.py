"""The one thread that touches MLX, from load to unload: inbox -> scheduler -> engine -> outbox.

It never waits for the edge except when the outbox is full (phase `blocked`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial

from mlxpool.common.config.schema import ModelConfig, WorkerConfig
from mlxpool.common.errors import Internal, OutOfMemory, PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.generation import Run
from mlxpool.worker.compute.messages import (
    Admit,
    Drop,
    DropAll,
    HandedBack,
    Inbound,
    Key,
    Loaded,
    Outbound,
    Rows,
    Unusable,
)
from mlxpool.worker.compute.progress import Progress, monotonic
from mlxpool.worker.engine import factory
from mlxpool.worker.engine.block_manager import BLOCK, blocks_of, first_need, next_need, promise
from mlxpool.worker.engine.factory import Source
from mlxpool.worker.engine.interface import Engine, Share
from mlxpool.worker.engine.scheduler import (
    area_of,
    budget_of,
    growing,
    newest,
    plan,
    waiting,
    with_row,
)
from mlxpool.worker.engine.sequence import Drawn, Phase, RowFailed, Sequence
from mlxpool.worker.process.cpu_threads import Cores, of_process
from mlxpool.worker.testing.faults import NO_FAULTS, Faults

log = logging.getLogger("mlxpool.worker")

OUTBOX = 256  # steps that may wait for the edge
FAILED_PASSES = 3  # over several prompts, after which they are read one by one
REPORT = 0.1  # seconds between two looks at the memory
_MEMORY_WORDS = ("memory", "alloc", "metal::malloc", "resource limit")


class DeviceLost(Exception):
    """The device fails every call from now on; `reading` is whose prompt it was lost with."""

    def __init__(self, error: Exception, reading: bytes | None) -> None:
        super().__init__(f"the device is lost: {type(error).__name__}: {error}")
        self.reading = reading


class Compute(threading.Thread):
    """Start it with `start`, give it work with `tell`; it speaks through `post`."""

    def __init__(
        self,
        config: WorkerConfig,
        progress: Progress,
        post: Callable[[Outbound], None],
        faults: Faults = NO_FAULTS,
        open_source: Callable[[ModelConfig, Faults], Source] = factory.open_source,
    ) -> None:
        super().__init__(name="compute", daemon=True)
        self.config = config
        self.progress = progress
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.room = threading.Semaphore(OUTBOX)  # released by the edge for each Rows it took
        self._post = post
        self._faults = faults
        self._open_source = open_source
        self._generation = 0
        self._runs: dict[Key, Run] = {}
        self._cores = of_process()  # made here: other threads ask for it
        self._joint_failures = 0  # passes over several prompts that failed
        self._reported = 0.0
        self._ended_by: BaseException | None = None

    def tell(self, mail: Inbound) -> None:
        """From the edge's thread."""
        self.inbox.put(mail)

    # ---- load ----------------------------------------------------------------------------------

    def run(self) -> None:
        self.progress.compute_begins()
        try:
            opened = self._open()
        except BaseException as error:  # whatever it is, the broker has to hear of it
            log.error("the model cannot be served", extra={"why": str(error)}, exc_info=True)
            self.progress.enter("unload")
            self._post(Unusable(factory.as_load_error(error, self.config.name).body()))
            return
        try:
            self._serve(*opened)
        except DeviceLost as error:
            self.progress.blame(error.reading)
            self._end(error, str(error))
        except BaseException as error:
            self._end(error, f"the compute thread ended: {error!r}")

    def _end(self, error: BaseException, what: str) -> None:
        """The process is to end: the broker counts it as a crash, and streams go on elsewhere."""
        # Its frames hold the engine: to free what lies on a lost device may end the process before
        # it has said why.
        self._ended_by = error
        log.critical(what, exc_info=error)
        self.progress.enter("unload")
        self._post(Unusable(Internal(what).body()))

    def _open(self) -> tuple[Engine, int]:
        self.progress.enter("load")
        source = self._open_source(self.config.model, self._faults)
        self._post(source.opened)
        engine = source.load(self._loaded_so_far)
        engine.warm_up(self.progress.moved)
        self.progress.layout = engine.layout
        if not engine.yields_cores:
            self._cores = Cores(None, 1)
        self._report(engine, 0.0)
        self._post(Loaded(source.sequences))
        return engine, source.sequences

    def _loaded_so_far(self, tensors: int, size: int) -> None:
        self.progress.moved()
        self.progress.memory = {**self.progress.memory, "weights": size, "active": size}

    # ---- serve ---------------------------------------------------------------------------------

    def _serve(self, engine: Engine, places: int) -> None:
        while True:
            rows = self._control(engine, wait=not self._runs)
            rows += self._step(engine, places)
            self._hand_out(rows)
            self._report(engine, monotonic())

    def _control(self, engine: Engine, *, wait: bool) -> list[Delta]:
        """Take what the edge has sent; with nothing to do, wait for it."""
        rows: list[Delta] = []
        if wait:
            self._report(engine, 0.0)
            self.progress.enter("idle")
            self._cores.rest()
            self._handle(engine, self.inbox.get(), rows)
        while not self.inbox.empty():
            self._handle(engine, self.inbox.get(), rows)
        return rows

    def _handle(self, engine: Engine, mail: Inbound, rows: list[Delta]) -> None:
        """Do what the edge says; `rows` gets what streams receive of it."""
        if isinstance(mail, Admit):
            run = Run.begin(mail, engine.piece)
            self._runs[run.key] = run
            reason = run.over()  # a resume may have been complete already
            if reason is not None:
                rows.append(self._leave(engine, run, reason))
        elif isinstance(mail, Drop):
            dropped = self._runs.get(mail.key)
            if dropped is not None:
                rows.append(self._leave(engine, dropped, "cancelled"))
        elif isinstance(mail, DropAll):
            self._forget_all(engine)
            rows.clear()
            self._generation = mail.generation
        else:
            self._forget_all(engine)
            self._hand_out(rows)
            rows.clear()
            self._post(HandedBack(self._generation))

    def _forget_all(self, engine: Engine) -> None:
        for run in list(self._runs.values()):
            self._forget(engine, run)

    def _leave(self, engine: Engine, run: Run, reason: str) -> Delta:
        row = run.delta("", (), end=run.end(reason, monotonic()))
        self._forget(engine, run)
        return row

    def _forget(self, engine: Engine, run: Run) -> None:
        run.sequence.phase = Phase.FINISHED
        del self._runs[run.key]
        try:
            engine.release(run.sequence)
        except Exception:  # costs memory, not streams
            log.exception("a sequence could not be released")

    def _step(self, engine: Engine, places: int) -> list[Delta]:
        self._cores.turn(monotonic())
        rows = self._expire(engine, monotonic())
        rows += self._make_room(engine)
        rows += self._admissions(engine, places)
        live = self._live()
        step = plan(live, self._budget(engine, live), area_of(engine.chunk))
        for sequence, share in step.prefill:
            if not share:
                self._entered(sequence)
        shares = [one for one in step.prefill if one[1]]
        while shares:
            count = self._joint(engine, shares)
            group, shares = shares[:count], shares[count:]
            if count == 1:
                rows += self._prefill_one(engine, group[0])
            else:
                rows += self._prefill_joint(engine, group)
        if step.decode:
            decode = list(step.decode)
            rows += self._guarded(engine, decode, partial(self._decode, engine, decode))
        self.progress.running = len(with_row(self._live()))
        self.progress.waiting = len(self._runs) - self.progress.running
        return rows

    def _live(self) -> list[Sequence]:
        return [run.sequence for run in self._runs.values()]

    def _budget(self, engine: Engine, live: list[Sequence]) -> int:
        streams = any(s.phase is Phase.DECODE for s in live)
        return budget_of(engine.chunk, streams, self.progress.usual_token)

    def _expire(self, engine: Engine, now: float) -> list[Delta]:
        late = [run for run in self._runs.values() if now >= run.deadline]
        return [self._fail(engine, run.sequence, run.too_late()) for run in late]

    # ---- memory --------------------------------------------------------------------------------

    def _find(self, engine: Engine, wanted: int, *, in_use: bool = False) -> bool:
        """Whether so many blocks are free, once the prefix cache gave up what it must."""
        taken = sum(s.blocks for s in self._live())
        short = wanted - (engine.blocks - taken - engine.prefix_blocks())
        if short > 0:
            short -= engine.shrink(short, in_use=in_use)
        return short <= 0

    def _make_room(self, engine: Engine) -> list[Delta]:
        """Every row that needs another block gets it; the newest rows give way where they must."""
        failed: list[Delta] = []
        while wanting := growing(self._live()):
            sequence = wanting[0]
            need = next_need(sequence)
            victim = newest(self._live())
            if self._find(engine, need - sequence.blocks, in_use=victim is None):
                sequence.blocks = need
            elif victim is not None:
                self._preempt(engine, victim)
            elif need <= sequence.promised:
                sequence.blocks = need
            else:
                failed.append(self._fail(engine, sequence, _too_large(sequence, engine)))
        return failed

    def _preempt(self, engine: Engine, sequence: Sequence) -> None:
        """Its row goes, what it computed stays in the prefix cache if it fits; it comes back."""
        self._release(engine, sequence)
        sequence.preempt()
        self.progress.preemptions += 1

    def _release(self, engine: Engine, sequence: Sequence) -> None:
        try:
            engine.release(sequence)
        except Exception:  # costs what the prefix cache would have got
            log.exception("a sequence could not be released")

    def _admissions(self, engine: Engine, places: int) -> list[Delta]:
        rows: list[Delta] = []
        for sequence in waiting(self._live(), places):
            need = first_need(sequence, engine.blocks)
            if need > max(engine.blocks, sequence.promised):
                rows.append(self._fail(engine, sequence, _too_large(sequence, engine)))
            elif self._find(engine, need) or not with_row(self._live()):
                sequence.blocks = need
                promise(sequence, engine.blocks)
                rows += self._guarded(engine, [sequence], partial(self._admit, engine, sequence))
            else:
                break  # those behind it must not take what it waits for
        return rows

    # ---- steps ---------------------------------------------------------------------------------

    def _admit(self, engine: Engine, sequence: Sequence) -> list[Delta]:
        engine.admit(sequence)
        sequence.phase = Phase.PREFILL
        return []

    def _joint(self, engine: Engine, shares: Many[Share]) -> int:
        """How many of these are read in one pass."""
        if self._joint_failures >= FAILED_PASSES:
            return 1
        try:
            return engine.joint(shares)
        except Exception:
            log.exception("prompts are read one by one")
            self._joint_failures = FAILED_PASSES
            return 1

    def _prefill_one(self, engine: Engine, share: Share) -> list[Delta]:
        sequence = share[0]
        # An error of the step ahead may come to light here, where it is not this prompt's.
        reading = None if engine.ahead() else sequence.id
        read = partial(self._prefill, engine, [share], sequence.id)
        return self._guarded(engine, [sequence], read, reading=reading)

    def _prefill_joint(self, engine: Engine, shares: Many[Share]) -> list[Delta]:
        """Chunks of one pass. When it fails, each is read again, alone: who is to blame ends."""
        try:
            return self._prefill(engine, shares, None)
        except Exception as error:
            log.warning("a pass over %d prompts failed", len(shares), exc_info=True)
            self._ask_device(engine, error, None)
        self._joint_failures += 1
        for sequence, _ in shares:
            sequence.suspect = True
            self._release(engine, sequence)
            sequence.send_back()
        return []

    def _prefill(self, engine: Engine, shares: Many[Share], request: bytes | None) -> list[Delta]:
        for sequence, _ in shares:
            run = self._runs[sequence.id, sequence.attempt]
            run.prefill_at = run.prefill_at or monotonic()
        with self.progress.prefilling(request, sum(share for _, share in shares)):
            done = engine.prefill_all(shares)
        for (sequence, _), tokens in zip(shares, done, strict=True):
            if tokens == 0 or sequence.prefilled >= sequence.length - 1:
                self._entered(sequence)
        return []

    def _entered(self, sequence: Sequence) -> None:
        """Its prompt is read."""
        run = self._runs[sequence.id, sequence.attempt]
        run.prefill_at = run.prefill_at or monotonic()
        run.decode_at = run.decode_at or monotonic()
        sequence.phase = Phase.DECODE

    def _decode(self, engine: Engine, rows: list[Sequence]) -> list[Delta]:
        with self.progress.decoding(len(rows)):
            drawn = engine.decode(rows)
        now = monotonic()
        return [self._taken(engine, one, now) for one in drawn]

    def _taken(self, engine: Engine, drawn: Drawn, now: float) -> Delta:
        """The delta of one row; what goes wrong here is this row's alone."""
        sequence = drawn.sequence
        run = self._runs[sequence.id, sequence.attempt]
        had = len(sequence.ids)
        try:
            delta = run.take(drawn, engine.eos, now)
            if delta.end is not None:
                self._ends(sequence)
        except Exception as error:
            log.exception("a token could not be taken")
            del sequence.ids[had:]  # the error says how many ids were sent
            return self._fail(engine, sequence, _as_pool_error(error))
        if delta.end is not None:
            self._forget(engine, run)
        return delta

    def _ends(self, sequence: Sequence) -> None:
        faults = self._faults
        if faults.place == "end" and faults.victim([sequence.prompt], [range(0)]) is not None:
            faults.strike()

    def _guarded(
        self,
        engine: Engine,
        hit: list[Sequence],
        work: Callable[[], list[Delta]],
        reading: bytes | None = None,
    ) -> list[Delta]:
        """An error ends the requests it hit, in their streams, and nothing else.

        A lost device ends none: their streams go on in another process.
        """
        try:
            return work()
        except RowFailed as failed:
            return [self._fail(engine, failed.sequence, Internal(str(failed)))]
        except Exception as error:
            log.exception("a step failed")
            self._ask_device(engine, error, reading)
            return [self._fail(engine, sequence, _as_pool_error(error)) for sequence in hit]

    def _ask_device(self, engine: Engine, error: Exception, reading: bytes | None) -> None:
        """Raises DeviceLost when nothing computes any more."""
        if isinstance(error, PoolError | RowFailed):
            return  # it was found by ourselves
        self.progress.enter("decode")  # where a device that hangs is found
        self.progress.moved()
        if not engine.sound():
            raise DeviceLost(error, reading) from error

    def _fail(self, engine: Engine, sequence: Sequence, error: PoolError) -> Delta:
        run = self._runs[sequence.id, sequence.attempt]
        row = run.delta("", (), end=error.body())
        self._forget(engine, run)
        return row

    def _hand_out(self, rows: list[Delta]) -> None:
        if not rows:
            return
        if not self.room.acquire(blocking=False):
            self.progress.enter("blocked")
            self.room.acquire()
        self._post(Rows(tuple(rows), self._generation))

    def _report(self, engine: Engine, now: float) -> None:
        """Refresh the memory figures; `now` 0 always does."""
        if now and now - self._reported < REPORT:
            return
        self._reported = now or monotonic()
        memory = engine.memory()
        self.progress.memory = {
            "weights": memory.weights,
            "kv": memory.kv,
            "prefix": memory.prefix,
            "active": memory.active,
            "cache": memory.cache,
            "peak": memory.peak,
            "limit": memory.limit,
            "device_free": memory.device_free,
            "capacity_tokens": engine.blocks * BLOCK,
            "preemptions": self.progress.preemptions,
        }
        counters = getattr(engine, "prefix", None)
        if counters is not None:
            self.progress.prefix = {
                "hits": counters.hits,
                "misses": counters.misses,
                "tokens": counters.tokens,
                "evictions": counters.evictions,
            }


def _too_large(sequence: Sequence, engine: Engine) -> OutOfMemory:
    need, capacity = blocks_of(sequence.length) + 1, engine.blocks
    return OutOfMemory(
        f"{sequence.length} tokens, {len(sequence.prompt)} of them the prompt's, need {need} blocks"
        f" of {BLOCK} tokens; this worker's memory has {capacity}",
        details={
            "prompt_tokens": len(sequence.prompt),
            "need_tokens": need * BLOCK,
            "capacity_tokens": capacity * BLOCK,
        },
    )


def _as_pool_error(error: Exception) -> PoolError:
    if isinstance(error, PoolError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(w in text.lower() for w in _MEMORY_WORDS):
        return OutOfMemory(f"the step did not fit into memory: {text}")
    return Internal(f"the step failed: {text}")
