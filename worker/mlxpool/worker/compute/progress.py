"""What the compute thread is doing, for the heartbeats and for the block that the broker reads.

Written by the compute thread; the main thread writes two words of the block, `edge_tid` and
`edge_ns`. Others read single attributes and single words, so no lock is needed. An update takes a
few microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from mlxpool.common.progress import PHASES, Block
from mlxpool.worker.compute.memory_figures import MemoryFigures

NEWEST_WEIGHT = 0.1  # of the newest chunk or step in the moving average, once there are many


class Progress:
    """`count` grows at each load shard, prefill chunk and decode step."""

    def __init__(
        self,
        on_phase: Callable[[], None],
        clock: Callable[[], float] = monotonic,
        block: Block | None = None,
    ) -> None:
        self.phase = "boot"
        self.since = clock()  # when the phase began
        self.count = 0
        self.step_ms = 0.0  # the newest decode step whose shape was not new
        self.prefilling_request: bytes | None = None  # the request whose prompt is being read
        self.running = 0
        self.waiting = 0
        self.preemptions = 0  # since the start
        self.loaded = 0.0  # share of the weights, 0 to 1
        self.layout = ""  # of the engine, see Engine.layout
        self.memory = MemoryFigures()
        self.capacity_tokens = 0  # that fit, cached prefixes included; 0: not known yet
        self.prefix: dict[str, int] = {}
        self.speculation: dict[str, int] = {}
        self.block = block or Block.private()
        self._on_phase = on_phase
        self._clock = clock
        self._units = 0  # tokens of the awaited pass; 0: it is a decode step
        self._started = 0.0
        self._measured = True  # whether the time since then is that of the awaited pass
        self._compiling = False  # whether `compiles` was called since a pass ended
        # Moving sums of seconds, and of tokens or steps: short chunks, of which a token takes
        # longer, say little of the time that a long one takes.
        self._usual = {"prefill": (0.0, 0.0), "decode": (0.0, 0.0)}
        self._write_phase()

    # ---- the compute thread --------------------------------------------------------------------

    def compute_begins(self) -> None:
        """Write the id of the calling thread, which computes, into the block."""
        self.block.write("compute_tid", threading.get_native_id())

    def enter(self, phase: str) -> None:
        """Change the phase; the main thread sends a heartbeat at once.

        What was compiled for drafts that no step has checked ends with the phase "idle".
        """
        if phase == "idle" and self._compiling:
            self._end_compiling()
        if phase != self.phase:
            self.phase, self.since = phase, self._clock()
            self._write_phase()
            self._on_phase()

    def _write_phase(self) -> None:
        self.block.write("phase", PHASES.index(self.phase))
        self.block.write("since_ns", round(self.since * 1e9))

    def moved(self) -> None:
        self.count += 1
        self.block.write("count", self.count)

    def awaits(
        self, request: bytes | None, tokens: int, rows: int, *, measured: bool = True
    ) -> None:
        """The thread waits for a pass from now on.

        It reads `tokens`, of which some are the prompt's of `request` (None: of several requests),
        or 0 in a decode step of `rows` rows. Without `measured` it was computed before, too, while
        the thread did something else, so that its time is no measure.
        """
        self.prefilling_request = request
        self.block.write_request(request)
        self.block.write("tokens", tokens)
        self._units = tokens
        if self._compiling:  # drafts, which are made now
            self._end_compiling()
            self.moved()
        self.enter("prefill" if tokens else "decode")
        self._started, self._measured = self._clock(), measured

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The thread waits for another one in here, and then for the pass that it awaits, if any.

        The phase is "blocked" meanwhile, in which a worker may rest, and then the one before.
        """
        phase = self.phase
        self.enter("blocked")
        self._measured = False
        yield
        self.enter(phase)

    def drafts(self) -> None:
        """Drafts of the next step are made from now on; passes may compute them.

        The broker bounds the time of every phase but "idle", in which a worker that had no request
        is until its first step.
        """
        if self.phase == "idle":
            self.enter("decode")

    def compiles(self) -> None:
        """Something is compiled, which may take longer, until the awaited pass ends.

        It is that pass, or one that is built while that one is computed. Where none is awaited it
        is one that computes drafts, until the next pass is awaited or the worker is idle.
        """
        if not self._compiling:
            self._compiling = True
            self.block.write("fresh", 1)

    def _end_compiling(self) -> None:
        self._compiling = False
        self.block.write("fresh", 0)

    def ended(self, *, fresh: bool) -> None:
        """The awaited pass has ended.

        Its time is no measure if it is `fresh`. Nor is it if `compiles` was called since it is
        awaited, unless it is the first one: some measure is better than none.
        """
        seconds = self._clock() - self._started
        known = self._usual["prefill" if self._units else "decode"][1] > 0
        measured = self._measured and not fresh and not (known and self._compiling)
        self.failed()
        self.moved()
        if not measured:
            return
        if not self._units:
            self.step_ms = round(seconds * 1000, 3)
        self._learn("prefill" if self._units else "decode", seconds, max(1, self._units))

    def failed(self) -> None:
        """No pass is awaited any more; one that failed is not counted."""
        if self._compiling:
            self._end_compiling()
        self.prefilling_request = None
        self.block.write_request(None)
        self.block.write("tokens", 0)

    def _learn(self, phase: str, seconds: float, units: int) -> None:
        """A pass over so many tokens, or one decode step, took so long."""
        took, done = self._usual[phase]
        took, done = (1 - NEWEST_WEIGHT) * took + seconds, (1 - NEWEST_WEIGHT) * done + units
        self._usual[phase] = took, done
        word = "usual_token_ns" if phase == "prefill" else "usual_step_ns"
        self.block.write(word, max(1, round(took / done * 1e9)))

    # ---- the main thread -----------------------------------------------------------------------

    def edge_begins(self) -> None:
        """Write the id of the calling thread, the main thread, into the block."""
        self.block.write("edge_tid", threading.get_native_id())

    def edge_turns(self) -> None:
        """Write the time of one turn of the main thread's loop into the block."""
        self.block.write("edge_ns", round(self._clock() * 1e9))
