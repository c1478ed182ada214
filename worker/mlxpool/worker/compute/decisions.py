"""The calls of `decide` in the compute thread: their lines run as sequences beside the streams.

A line is the prompt of a question, or that prompt and the first tokens of an answer: its one pass
gives the log-probabilities of the tokens that may follow. The first line of a call reads the text;
the others wait for it, and find the text in the prefix cache. While nobody waits for its row, a
line that has ended becomes the next one of its call, so that the text is not copied for each.
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

MIN_SHARED = 64  # tokens; a shorter text is read with every question
_OPTIONS = Options(temperature=0, max_tokens=1)


class Line(Generation, eq=False, kw_only=True):
    """A line of a call: question `index` after the tokens `branch` of an answer.

    `goes_on` is asked when it has ended, and makes it another one if it can.
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
        """The line of a call. `number`: its sequence's, which no run of a request has."""
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
        """Be another line of the call; its row has the text."""
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
        """See Generation.commit. Keeps the log-probabilities; the drawn token is of no use."""
        assert drawn.logprob is not None
        self.found = dict(drawn.logprob.top)
        if self.goes_on(self):
            return Delta(*self.key, 0, "", b"")
        return self.last_delta(RunEnd("stop"))

    def last_delta(self, end: RunEnd | PoolError) -> Delta:
        """See Generation.last_delta. `Decisions.take` takes it from those of the streams."""
        self.sequence.phase = Phase.FINISHED
        if isinstance(end, PoolError):
            self.error = end
        return Delta(*self.key, 0, "", b"", end={})


class DecideState(Struct, eq=False):
    """A call that is computed. `pending`: the lines that did not begin, as (question, branch).

    `leads`: whether its first line is still to read the text. `running`: the lines that run.
    `found`: what lines gave, by question and branch; `results`: of the questions that are answered.
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
        # The empty branches first: longer ones find the question in the cache as well.
        lines.sort(key=lambda line: len(line[1]))
        return cls(message, deque(lines), message.shared >= MIN_SHARED and len(lines) > 1)

    @property
    def ready(self) -> bool:
        """Whether its next line may begin."""
        waits = self.leads or self.message.alone
        return bool(self.pending) and not (waits and self.running)

    def took(self, line: Line) -> bool:
        """Take what a line has found. Returns whether all questions are answered."""
        assert line.found is not None
        index, question = line.index, self.message.questions[line.index]
        found = self.found.setdefault(index, {})
        found[line.branch] = line.found
        if len(found) == len(question.branches):
            temperature = self.message.temperature
            self.results[index] = decided(question.answers, self.found.pop(index), temperature)
        self.leads = False
        return len(self.results) == len(self.message.questions)

    def answer(self, now: float) -> CallAnswer:
        """The answer when all questions are answered; `now`: monotonic seconds."""
        message = self.message
        results = [self.results[index] for index in range(len(message.questions))]
        rows = [
            {"probabilities": list(one.probabilities), "outside": one.outside} for one in results
        ]
        own = sum(len(one.prompt) - message.shared for one in message.questions)
        tokens = message.shared + own
        fields: dict[str, Any] = {
            "decisions": rows,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "timings_ms": {"compute": round((now - self.began) * 1000, 3)},
        }
        return CallAnswer(fields, kind=DECISIONS)


class Decisions:
    """The open calls. Owners have turns, so that many questions of one do not delay another's."""

    def __init__(
        self, engine: Engine, generations: Generations, post: Callable[[Outbound], None]
    ) -> None:
        """Lines run among `generations`; `post` sends answers to the main thread."""
        self._engine = engine
        self._generations = generations
        self._post = post
        self._open: dict[CallKey, DecideState] = {}
        self._owners: OrderedDict[str, None] = OrderedDict()  # those with open calls, in turn
        self._lines: dict[RunKey, Line] = {}  # that run
        self._numbers = count(-1, -1)  # of lines; those of runs are positive

    def __len__(self) -> int:
        return len(self._open)

    def add(self, message: Decide) -> None:
        self._open[message.key] = DecideState.of(message)
        self._owners.setdefault(message.owner)

    def remove(self, key: CallKey) -> None:
        """A call has ended: its lines leave the engine. One that is not open is ignored."""
        call = self._open.pop(key, None)
        if call is None:
            return
        for line in call.running:
            self._stop(line)
        owner = call.message.owner
        if all(one.message.owner != owner for one in self._open.values()):
            del self._owners[owner]

    def clear(self) -> None:
        """Drop all calls without an answer."""
        for key in list(self._open):
            self.remove(key)

    def begin(self, room: int, *, apart: bool) -> None:
        """Begin at most `room` lines, and one in any case if none runs.

        `apart`: no two rows can begin with the same cached text at once, so one line runs at most.
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
        """The call whose turn it is; None: no line may begin."""
        for owner in self._owners:
            own = (one for one in self._open.values() if one.message.owner == owner)
            call = next((one for one in own if one.ready), None)
            if call is not None:
                self._owners.move_to_end(owner)
                return call
        return None

    def _continue(self, line: Line) -> bool:
        """Make a line that has ended the next one of its call, unless others want its row."""
        call = self._open.get(line.call)
        if call is None or not call.pending or call.leads or call.message.alone:
            return False
        live = self._generations.sequences()
        if len(self._owners) > 1 or any(one.phase is Phase.WAITING for one in live):
            return False
        if not self._engine.rewind(line.sequence, call.message.shared):
            return False
        call.took(line)
        line.become(call, *call.pending.popleft())
        return True

    def take(self, deltas: list[Delta]) -> list[Delta]:
        """Take the ends of lines from the deltas of a step; returns those of the streams."""
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
        """Put the lines that run back: a drained worker answers its calls before it ends."""
        for call in self._open.values():
            for line in call.running:
                self._stop(line)
                call.pending.appendleft((line.index, line.branch))
            call.running.clear()

    def _stop(self, line: Line) -> None:
        """Remove a line that runs, unless its end is among the deltas of this step."""
        if self._lines.pop(line.key, None) is not None and self._is_live(line):
            self._generations.forget(line)

    def _is_live(self, line: Line) -> bool:
        return self._generations.get(line.key) is line

    def _answer(self, call: DecideState, content: CallAnswer) -> None:
        """The one place where a call ends with an answer."""
        self.remove(call.message.key)
        self._post(Answer(call.message.key, content))


def named(body: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The body of an error with the question that it is about."""
    return {**body, "message": f"questions[{number}]: {body['message']}"}
