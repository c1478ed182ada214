"""The state of the compute thread, for heartbeats and the memory block that the broker reads.

The compute thread writes the state; the main thread writes two words of the block, `edge_tid` and
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

NEWEST_WEIGHT = 0.1  # weight of the newest chunk or step in a long moving average


class Progress:
    """The state of the compute thread.

    `count` grows with each shard of weights that is loaded, each prefill chunk and each decode
    step.
    """

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
        self.loaded = 0.0  # loaded fraction of the weights, 0 to 1
        self.layout = ""  # the engine's layout, see Engine.layout
        self.memory = MemoryFigures()
        self.capacity_tokens = 0  # tokens that fit, including cached prefixes; 0: not known yet
        self.prefix: dict[str, int] = {}
        self.speculation: dict[str, int] = {}
        self.block = block or Block.private()
        self._on_phase = on_phase
        self._clock = clock
        self._units = 0  # tokens of the awaited pass; 0: a decode step
        self._started = 0.0
        self._measured = True  # whether the time since `_started` measures the awaited pass
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
        """Change the phase; the main thread sends a heartbeat immediately.

        The phase "idle" also ends the record made by `compiles`: drafts may compile something
        without a later step that checks them.
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
        """Record that the thread waits for a pass from now on.

        `tokens`: the number of inputs of a pass that reads prompts; 0: the pass is a decode step of
        `rows` rows. `request`: the request whose prompt is read; None: no or several requests. If
        not `measured`, the time of the pass does not count, because the device computed it while
        the thread did other work.
        """
        self.prefilling_request = request
        self.block.write_request(request)
        self.block.write("tokens", tokens)
        self._units = tokens
        if self._compiling:  # the compilation was for drafts, which exist now
            self._end_compiling()
            self.moved()
        self.enter("prefill" if tokens else "decode")
        self._started, self._measured = self._clock(), measured

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Returns a context in which the thread waits for another thread.

        In the context the phase is "blocked", whose time the broker does not limit. Afterwards the
        previous phase continues, and so does its wait for a pass, if any.
        """
        phase = self.phase
        self.enter("blocked")
        self._measured = False
        yield
        self.enter(phase)

    def drafts(self) -> None:
        """Record that the drafts of the next step are being made, perhaps by passes.

        Changes the phase "idle" to "decode", because the broker does not limit the time of "idle".
        """
        if self.phase == "idle":
            self.enter("decode")

    def compiles(self) -> None:
        """Record that something is compiled, which may take long, until the awaited pass ends.

        The compilation is for the awaited pass, or for a pass that is built while it is awaited. If
        no pass is awaited, the compilation is for drafts. Then the record ends when the next pass
        is awaited, or when the worker is idle.
        """
        if not self._compiling:
            self._compiling = True
            self.block.write("fresh", 1)

    def _end_compiling(self) -> None:
        self._compiling = False
        self.block.write("fresh", 0)

    def ended(self, *, fresh: bool) -> None:
        """Record that the awaited pass has ended, and learn its time.

        The time of a `fresh` pass does not count. If `compiles` was called during the wait, the
        time counts only if no time of such a pass is known yet.
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
        """Record that the awaited pass has failed; its time does not count."""
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
        """Write the current time into the block, once for each cycle of the main thread's loop."""
        self.block.write("edge_ns", round(self._clock() * 1e9))
