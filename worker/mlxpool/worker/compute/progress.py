"""The state of the compute thread, for the heartbeats and for the block that the broker reads.

The compute thread writes it; the main thread writes two words of the block, `edge_tid` and
`edge_ns`. Readers read single attributes and single words, so no lock is needed. An update takes a
few microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from mlxpool.common.progress import PHASES, Block
from mlxpool.worker.compute.memory_figures import MemoryFigures

NEWEST_WEIGHT = 0.1  # the weight of the newest chunk or step in a long moving average


class Progress:
    """The progress. `count` grows at each load shard, prefill chunk and decode step."""

    def __init__(
        self,
        on_phase: Callable[[], None],
        clock: Callable[[], float] = monotonic,
        block: Block | None = None,
    ) -> None:
        self.phase = "boot"
        self.since = clock()  # time when the phase began
        self.count = 0
        self.step_ms = 0.0  # milliseconds of the newest decode step whose shape was not new
        self.prefilling_request: bytes | None = None  # the request whose prompt is being read
        self.running = 0
        self.waiting = 0
        self.preemptions = 0  # since the start
        self.loaded = 0.0  # share of the weights that are loaded, 0 to 1
        self.layout = ""  # the engine's layout, see Engine.layout
        self.memory = MemoryFigures()
        self.capacity_tokens = 0  # tokens that fit, with cached prefixes; 0: not known yet
        self.prefix: dict[str, int] = {}
        self.speculation: dict[str, int] = {}
        self.block = block or Block.private()
        self._on_phase = on_phase
        self._clock = clock
        self._units = 0  # tokens of the awaited pass; 0: it is a decode step
        self._started = 0.0
        self._measured = True  # whether the time since then measures the awaited pass
        self._compiling = False  # whether `compiles` was called since a pass ended
        # Moving sums of seconds, and of tokens or steps. Sums, because a token of a short chunk
        # takes longer and must not count as much as a long chunk.
        self._usual = {"prefill": (0.0, 0.0), "decode": (0.0, 0.0)}
        self._write_phase()

    # ---- the compute thread --------------------------------------------------------------------

    def compute_begins(self) -> None:
        """Write the id of the calling thread, the compute thread, into the block."""
        self.block.write("compute_tid", threading.get_native_id())

    def enter(self, phase: str) -> None:
        """Change the phase; the main thread sends a heartbeat at once.

        The phase "idle" also ends a compilation for drafts that no step has checked.
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
        """Note that the thread waits for a pass from now on.

        The pass reads `tokens` tokens, some of them of the prompt of `request` (None: of several
        requests); 0: it is a decode step of `rows` rows. Without `measured` its time does not
        count, because it was already computed while the thread did something else.
        """
        self.prefilling_request = request
        self.block.write_request(request)
        self.block.write("tokens", tokens)
        self._units = tokens
        if self._compiling:  # for drafts, which are made now
            self._end_compiling()
            self.moved()
        self.enter("prefill" if tokens else "decode")
        self._started, self._measured = self._clock(), measured

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """A context in which the thread waits for another thread.

        The phase is "blocked" meanwhile, which the broker does not bound. Then the previous phase
        goes on, with the pass that it awaits, if any.
        """
        phase = self.phase
        self.enter("blocked")
        self._measured = False
        yield
        self.enter(phase)

    def drafts(self) -> None:
        """Note that drafts of the next step are made from now on; passes may compute them.

        The broker bounds the time of every phase but "idle". After a time without requests, a
        worker is in this phase until its first step.
        """
        if self.phase == "idle":
            self.enter("decode")

    def compiles(self) -> None:
        """Note that something is compiled, which may take long, until the awaited pass ends.

        It is compiled for the awaited pass, or for a pass that is built meanwhile. If no pass is
        awaited, it is for drafts, and ends when the next pass is awaited or the worker is idle.
        """
        if not self._compiling:
            self._compiling = True
            self.block.write("fresh", 1)

    def _end_compiling(self) -> None:
        self._compiling = False
        self.block.write("fresh", 0)

    def ended(self, *, fresh: bool) -> None:
        """Note that the awaited pass has ended.

        Its time does not count if it is `fresh`. Nor does it if `compiles` was called during the
        wait, unless no other time is known yet.
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
        """Note that no pass is awaited any more; does not count the failed pass."""
        if self._compiling:
            self._end_compiling()
        self.prefilling_request = None
        self.block.write_request(None)
        self.block.write("tokens", 0)

    def _learn(self, phase: str, seconds: float, units: int) -> None:
        """Learn the time of a pass: `units` are its tokens, or 1 for a decode step."""
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
