"""The calls of `decide` in the compute thread. Their lines run as sequences beside the streams.

A line is the prompt of a question, or the prompt and the first tokens of an answer. A pass computes
the log-probabilities of the tokens that may follow. The first line of a call reads the text. The
other lines wait for the first line and find the text in the prefix cache. If no sequence waits for
the KV row of an ended line, the call's next line takes this row, which already has the text, so
that the text is not copied again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import count
from time import monotonic
from typing import Any, Self

from msgspec import Struct, field

from mlxpool.common.errors import PoolError
from mlxpool.common.options import Options
from mlxpool.common.protocol.decisions import DECISIONS
from mlxpool.common.protocol.deltas import Delta, RunEnd
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Answer, CallKey, Decide, Outbound, RunKey
from mlxpool.worker.decisions.answers import Decided, Path, decided
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence

MIN_SHARED = 64  # the least tokens of a shared text; a shorter text is read with every question
_OPTIONS = Options(temperature=0, max_tokens=1)


class Line(Generation, eq=False, kw_only=True):
    """A line of a `decide` call: question `index` after the tokens `branch` of an answer.

    `goes_on` is called at the end of the line. It returns True if it has made this object the next
    line of the call.
    """

    call: CallKey
    index: int
    branch: Path
    goes_on: Callable[[Line], bool]
    found: Mapping[int, float] | None = None  # log-probabilities of the tokens that may follow
    error: PoolError | None = None

    @classmethod
    def of(
        cls,
        call: DecideState,
        index: int,
        branch: Path,
        number: int,
        goes_on: Callable[[Line], bool],
    ) -> Self:
        """Returns a line of a call; no request's sequence has the same `number`."""
        message = call.message
        question = message.questions[index]
        sequence = Sequence(
            message.key.id,
            number,
            (*question.prompt, *branch),
            _OPTIONS,
            seed=0,
            max_tokens=1,
            read_alone=message.alone,
            restore_at=message.shared,
            scored=question.branches[branch],
            owner=message.owner,
        )
        return cls(
            sequence,
            Facts(),
            Detokenizer(lambda token: b"", ()),
            monotonic(),
            call=message.key,
            index=index,
            branch=branch,
            goes_on=goes_on,
        )

    def become(self, call: DecideState, index: int, branch: Path) -> None:
        """Makes this object another line of the call. The KV row keeps the text of the call."""
        question, sequence = call.message.questions[index], self.sequence
        sequence.prompt = (*question.prompt, *branch)
        sequence.scored = question.branches[branch]
        self.index, self.branch, self.found = index, branch, None

    def commit(
        self,
        drawn: SampledToken,
        eos: frozenset[int],
        now: float,
        *,
        find: bool = False,
        least: int = 1,
    ) -> Delta:
        """Stores the next tokens' log-probabilities; the line ends, or computes another branch.

        A pass computes these log-probabilities; its drawn token is ignored. For the parameters see
        Generation.commit.
        """
        assert drawn.logprob is not None
        self.found = dict(drawn.logprob.top)
        if self.goes_on(self):
            return Delta(*self.key, 0, "", b"")
        return self.last_delta(RunEnd("stop"))

    def last_delta(self, end: RunEnd | PoolError) -> Delta:
        """Returns the delta that ends the line; `Decisions.take` does not pass it on to streams."""
        self.sequence.phase = Phase.FINISHED
        if isinstance(end, PoolError):
            self.error = end
        return Delta(*self.key, 0, "", b"", end={})


class DecideState(Struct, eq=False):
    """A `decide` call in progress.

    `pending`: the lines that have not begun, as (question, branch). `leads`: whether the first line
    still has to read the text. `running`: the running lines. `found`: log-probabilities by question
    and branch. `results`: answers to finished questions.
    """

    message: Decide
    pending: deque[tuple[int, Path]]
    leads: bool
    running: set[Line] = field(default_factory=set)
    found: dict[int, dict[Path, Mapping[int, float]]] = field(default_factory=dict)
    results: dict[int, Decided] = field(default_factory=dict)
    began: float = field(default_factory=monotonic)

    @classmethod
    def of(cls, message: Decide) -> DecideState:
        lines = [
            (index, branch)
            for index, question in enumerate(message.questions)
            for branch in question.branches
        ]
        # Empty branches come first: longer branches then find the question in the cache as well.
        lines.sort(key=lambda line: len(line[1]))
        return cls(message, deque(lines), message.shared >= MIN_SHARED and len(lines) > 1)

    @property
    def ready(self) -> bool:
        """Whether the next line of the call may begin."""
        waits = self.leads or self.message.alone
        return bool(self.pending) and not (waits and self.running)

    def took(self, line: Line) -> bool:
        """Store the log-probabilities of a line. Returns whether all questions are answered."""
        assert line.found is not None
        index, question = line.index, self.message.questions[line.index]
        by_branch = self.found.setdefault(index, {})
        by_branch[line.branch] = line.found
        if len(by_branch) == len(question.branches):
            temperature = self.message.temperature
            self.results[index] = decided(question.answers, self.found.pop(index), temperature)
        self.leads = False
        return len(self.results) == len(self.message.questions)

    def answer(self, now: float) -> CallAnswer:
        """Returns the answer to a call after its last question; `now`: monotonic seconds."""
        message = self.message
        results = [self.results[index] for index in range(len(message.questions))]
        rows = [
            {"probabilities": list(result.probabilities), "outside": result.outside}
            for result in results
        ]
        own = sum(len(question.prompt) - message.shared for question in message.questions)
        tokens = message.shared + own
        fields: dict[str, Any] = {
            "decisions": rows,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "timings_ms": {"compute": round((now - self.began) * 1000, 3)},
        }
        return CallAnswer(fields, kind=DECISIONS)


class Decisions:
    """The open `decide` calls. Owners take turns, so that no owner's questions delay others."""

    def __init__(
        self, engine: Engine, generations: Generations, post: Callable[[Outbound], None]
    ) -> None:
        """Makes sequences (lines) of decisions, which run beside those of `generations`.

        `post` sends answers to the main thread."""
        self._engine = engine
        self._generations = generations
        self._post = post
        self._open: dict[CallKey, DecideState] = {}
        # Owners with open calls, the next owner first.
        self._owners: OrderedDict[str, None] = OrderedDict()
        self._lines: dict[RunKey, Line] = {}  # running lines
        self._numbers = count(-1, -1)  # negative numbers for lines; runs have positive numbers

    def __len__(self) -> int:
        return len(self._open)

    def add(self, message: Decide) -> None:
        self._open[message.key] = DecideState.of(message)
        self._owners.setdefault(message.owner)

    def remove(self, key: CallKey) -> None:
        """Remove a call and its running lines; ignores a call that is not open."""
        call = self._open.pop(key, None)
        if call is None:
            return
        for line in call.running:
            self._stop(line)
        owner = call.message.owner
        if all(other.message.owner != owner for other in self._open.values()):
            del self._owners[owner]

    def clear(self) -> None:
        """Drop all calls; sends no answers."""
        for key in list(self._open):
            self.remove(key)

    def begin(self, room: int, *, apart: bool) -> None:
        """Begin at most `room` lines of calls; if no line runs, begin one line even if `room` is 0.

        `apart`: at most one line may run, because two rows cannot use the same cached text at the
        same time.
        """
        most = 1 if apart else max(room + len(self._lines), 1)
        while len(self._lines) < most:
            call = self._next()
            if call is None:
                return
            number = next(self._numbers)
            line = Line.of(call, *call.pending.popleft(), number, self._continue)
            call.running.add(line)
            self._lines[line.key] = line
            self._generations.add(line)

    def _next(self) -> DecideState | None:
        """Returns the next call with a line that may begin, or None; owners take turns."""
        for owner in self._owners:
            own = (call for call in self._open.values() if call.message.owner == owner)
            call = next((call for call in own if call.ready), None)
            if call is not None:
                self._owners.move_to_end(owner)
                return call
        return None

    def _continue(self, line: Line) -> bool:
        """Make an ended line the next line of its call; returns whether it did.

        The line must end, for example, if other sequences wait for a row, if other owners have
        calls, or if the KV row cannot keep the text.
        """
        call = self._open.get(line.call)
        if call is None or not call.pending or call.leads or call.message.alone:
            return False
        live = self._generations.sequences()
        if len(self._owners) > 1 or any(sequence.phase is Phase.WAITING for sequence in live):
            return False
        if not self._engine.rewind(line.sequence, call.message.shared):
            return False
        call.took(line)
        line.become(call, *call.pending.popleft())
        return True

    def take(self, deltas: list[Delta]) -> list[Delta]:
        """Handle the deltas that end lines of `decide` calls; return only deltas of streams."""
        if not self._lines:
            return deltas
        lines = [self._lines.get((delta.id, delta.attempt)) for delta in deltas]
        pairs = [*zip(deltas, lines, strict=True)]
        ended = [line for delta, line in pairs if line is not None and delta.end is not None]
        for line in ended:
            del self._lines[line.key]
        for line in ended:
            if line.call in self._open:
                self._ended(self._open[line.call], line)
        return [delta for delta, line in pairs if line is None]

    def _ended(self, call: DecideState, line: Line) -> None:
        call.running.discard(line)
        if line.error is not None:
            number = call.message.first + line.index
            self._answer(call, CallAnswer(named(line.error.body(), number)))
            return
        if call.took(line):
            self._answer(call, call.answer(monotonic()))

    def restart(self) -> None:
        """Make running lines pending again, because all running sequences are about to be dropped.

        The lines begin again later: a drained worker ends only after it has answered its calls.
        """
        for call in self._open.values():
            for line in call.running:
                self._stop(line)
                call.pending.appendleft((line.index, line.branch))
            call.running.clear()

    def _stop(self, line: Line) -> None:
        """Remove a running line from the generations, unless it has already ended in this step."""
        if self._lines.pop(line.key, None) is not None and self._is_live(line):
            self._generations.forget(line)

    def _is_live(self, line: Line) -> bool:
        return self._generations.get(line.key) is line

    def _answer(self, call: DecideState, content: CallAnswer) -> None:
        """Send the answer of a call, and remove the call."""
        self.remove(call.message.key)
        self._post(Answer(call.message.key, content))


def named(body: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Returns the body of an error, with the number of the question before the message."""
    return {**body, "message": f"questions[{number}]: {body['message']}"}
