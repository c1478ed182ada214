"""Completions in the compute thread: each drawn token becomes a delta, until a completion ends."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Self

from msgspec import Struct, field

from mlxpool.common.errors import DeadlineExceeded, PoolError
from mlxpool.common.protocol.deltas import Delta, RunEnd, Usage, new_delta
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.compute.messages import Admit, RunKey
from mlxpool.worker.compute.prompt_report import PromptReport, Row
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.thought_bound import ThoughtBound
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.sequence import Phase, PromptLogprobs, SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span

_pack_id = struct.Struct("<I").pack  # like `pack_ids`, but without its checks

log = logging.getLogger("mlxpool.worker")


class Generation(Struct, eq=False):
    """One completion. Times are monotonic seconds; a time is 0 until its event has happened.

    `bound`: bounds the tokens of the thoughts; None after the thoughts, and if a format applies.
    When few tokens are left, the bound also becomes the `constraint`, see Generations.apply_bound.
    """

    sequence: Sequence
    facts: Facts
    detokenizer: Detokenizer
    received: float
    deadline: float = math.inf
    facts_sent: bool = False
    prefill_at: float = 0.0  # time when the prompt's first chunk began
    decode_at: float = 0.0  # time when the whole prompt was read
    piece: Callable[[int], bytes] = field(default=lambda token: b"")
    constraint: Constraint | None = None
    bound: ThoughtBound | None = None
    report: PromptReport | None = None
    plain: bool = False  # whether deltas have only text and ids until the end, see `append`

    @classmethod
    def begin(cls, admit: Admit, piece: Callable[[int], bytes]) -> Self:
        """Returns the generation of a prepared sequence; `piece` returns the bytes of a token."""
        return cls(
            admit.sequence,
            admit.facts,
            admit.detokenizer,
            admit.received,
            admit.deadline,
            piece=piece,
            constraint=admit.constraint,
            bound=admit.bound,
            report=admit.report,
        )

    @property
    def key(self) -> RunKey:
        return self.sequence.id, self.sequence.run_number

    def commit(
        self,
        drawn: SampledToken,
        eos: frozenset[int],
        now: float,
        *,
        find: bool = False,
        least: int = 1,
    ) -> Delta:
        """Append one drawn token. Returns its delta, which also has the end if the completion ends.

        Also appends the tokens that the constraint forces next, if they are `least` or more.
        `find`: compute the forced tokens; otherwise use only forced tokens that are already known.
        Raises BadRequest for a token that the constraint does not allow.
        """
        sequence, detokenizer, token = self.sequence, self.detokenizer, drawn.token
        if not self.decode_at:
            self.prefill_at, self.decode_at = self.prefill_at or now, now
            if sequence.options.prompt_only:
                return self.last_delta(self.end("length", now))
        if token in eos and not sequence.options.ignore_eos:
            return self.last_delta(self.end("stop", now))
        ids, constraint = sequence.ids, self.constraint
        position = len(ids)
        rule = constraint or self.bound
        if rule is not None:
            rule.take(token)
        ids.append(token)
        text = detokenizer.push(token)
        packed = _pack_id(token)
        id, number = sequence.id, sequence.run_number
        goes_on = position + 1 < sequence.max_tokens and not detokenizer.stopped
        if goes_on and self.facts_sent and drawn.logprob is None:
            self.plain = not detokenizer.stops and sequence.shift is None and self.bound is None
            if constraint is None:
                return new_delta((id, number, position, text, packed, None, None, None))
        if goes_on and constraint is not None and not sequence.options.logprobs:
            run = constraint.forced(find=find)
            if len(run) >= least:
                text += self._append_forced(constraint, run)
                packed += pack_ids(ids[position + 1 :])
        reason = self.finish_reason()
        end = None if reason is None else self.end(reason, now).body()
        return Delta(id, number, position, text, packed, self._logprobs(drawn), self._facts(), end)

    def append(self, token: int, eos: frozenset[int], least: int) -> Delta | None:
        """Append one token to a `plain` completion. Returns the token's delta.

        Returns None and does nothing if the token may be the last token, or if `least` or more
        forced tokens may follow. The caller then calls `commit`.
        """
        sequence = self.sequence
        ids = sequence.ids
        position = len(ids)
        if token in eos or position + 1 >= sequence.max_tokens:
            return None
        constraint = self.constraint
        if constraint is not None and not constraint.goes_on(token, least):
            return None
        ids.append(token)
        text, packed = self.detokenizer.push(token), _pack_id(token)
        return new_delta(
            (sequence.id, sequence.run_number, position, text, packed, None, None, None)
        )

    def begin_report(self) -> list[Delta]:
        """Returns deltas with the prompt's tokens that are reported before the prompt is read."""
        return [] if self.report is None else self._reported(self.report.begin())

    def add_to_report(self, prompt: PromptLogprobs) -> list[Delta]:
        """Adds the log-probabilities of the prompt's next tokens to the report.

        Returns the deltas of these tokens.
        """
        report = self.report
        assert report is not None and report.reported == prompt.first, "no token is left out"
        deltas = self._reported(report.add(prompt.logprobs))
        self.sequence.reported = report.reported
        return deltas

    def _reported(self, rows: Iterable[Row]) -> list[Delta]:
        position = len(self.sequence.ids)
        return [
            Delta(*self.key, position, text, b"", entries, self._facts()) for text, entries in rows
        ]

    def _append_forced(self, constraint: Constraint, run: Iterable[int]) -> str:
        """Appends forced tokens until the completion ends. Returns their text."""
        sequence, detokenizer, text = self.sequence, self.detokenizer, ""
        before = len(sequence.ids)
        for token in run:
            sequence.ids.append(token)
            text += detokenizer.push(token)
            if detokenizer.stopped or len(sequence.ids) >= sequence.max_tokens:
                break
        constraint.take_forced(len(sequence.ids) - before)
        return text

    def last_delta(self, end: RunEnd | PoolError) -> Delta:
        """Returns the delta that ends the generation; it has no token."""
        facts = self._facts()
        return Delta(*self.key, len(self.sequence.ids), "", b"", facts=facts, end=end.body())

    def finish_reason(self) -> str | None:
        """Returns the finish reason if the completion is complete; else None."""
        if self.detokenizer.stopped:
            return "stop"
        if self.constraint is not None and self.constraint.finished:
            return "stop"
        if len(self.sequence.ids) >= self.sequence.max_tokens:
            return "length"
        return None

    def end(self, reason: str, now: float) -> RunEnd:
        """Returns the end of the generation, with the last text of the detokenizer."""
        sequence = self.sequence
        sequence.phase = Phase.FINISHED
        text = "" if reason == "cancelled" else self.detokenizer.finish()
        size = len(sequence.prompt)
        usage = Usage(size, min(sequence.cached, size), len(sequence.ids))
        timings_ms = {
            "prepare": _milliseconds(self.received, self.prefill_at),
            "prefill": _milliseconds(self.prefill_at, self.decode_at),
            "decode": _milliseconds(self.decode_at, now),
        }
        constraint = self.constraint
        formatted = constraint is not None and constraint is not self.bound
        complete = constraint.accepts if constraint is not None and formatted else None
        return RunEnd(reason, text, usage.body(), timings_ms, complete)

    def deadline_error(self) -> DeadlineExceeded:
        """Returns the error of a generation whose deadline has passed."""
        return DeadlineExceeded(
            f"not finished {self.deadline - self.received:.3f} s after it reached the worker"
            f" (deadline_ms), {len(self.sequence.ids)} tokens done"
        )

    def _facts(self) -> dict[str, object] | None:
        """Returns the constant values of the request for its first delta, and None later."""
        if self.facts_sent:
            return None
        self.facts_sent = True
        return self.facts.body()

    def _logprobs(self, drawn: SampledToken) -> list[dict[str, object]] | None:
        logprob = drawn.logprob
        if logprob is None:
            return None
        top = [self._named(token, value) for token, value in logprob.top]
        return [{**self._named(drawn.token, logprob.logprob), "top": top}]

    def _named(self, token: int, logprob: float) -> dict[str, object]:
        text = self.piece(token).decode("utf-8", "replace")
        return {"id": token, "token": text, "logprob": logprob}


class Generations:
    """All completions in order of arrival, including waiting completions.

    Removal of a completion also releases its sequence in the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_key: dict[RunKey, Generation] = {}
        self._by_sequence: dict[Sequence, Generation] = {}
        self.of = self._by_sequence.__getitem__  # generations by live sequence
        self._next_deadline = math.inf  # a time at or before the earliest deadline
        self._constrained: dict[Sequence, Generation] = {}  # generations with a constraint
        self.constrained_of = self._constrained.get  # a sequence's generation, if constrained

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, generation: Generation) -> None:
        self._by_key[generation.key] = self._by_sequence[generation.sequence] = generation
        self._next_deadline = min(self._next_deadline, generation.deadline)
        if generation.constraint is not None:
            self._constrained[generation.sequence] = generation
        self.apply_bound(generation)

    def apply_bound(self, generation: Generation) -> None:
        """Makes the bound of the thoughts the generation's constraint when the bound is near.

        Removes the bound when the thoughts have ended.
        """
        bound = generation.bound
        if bound is None:
            return
        if bound.is_over:
            bound.ended = True
            generation.bound = generation.constraint = None
            self._constrained.pop(generation.sequence, None)
        elif bound.is_near and generation.constraint is None:
            generation.constraint = bound
            self._constrained[generation.sequence] = generation

    def get(self, key: RunKey) -> Generation | None:
        return self._by_key.get(key)

    def sequences(self) -> list[Sequence]:
        """All live sequences in order of arrival."""
        return [*self._by_sequence]

    def constrained(self, spans: Iterable[Span]) -> list[Generation]:
        """Returns the generations that draw a token in these spans and have a constraint."""
        if not self._constrained:
            return []
        constrained = self._constrained
        return [
            constrained[span.sequence]
            for span in spans
            if span.draws and span.sequence in constrained
        ]

    @property
    def constrained_count(self) -> int:
        """The number of generations with a constraint."""
        return len(self._constrained)

    def finish(self, generation: Generation, reason: str) -> Delta:
        """End a generation without a further token. Returns its last delta."""
        delta = generation.last_delta(generation.end(reason, monotonic()))
        self.forget(generation)
        return delta

    def fail(self, sequence: Sequence, error: PoolError) -> Delta:
        """End the generation of a sequence with an error. Returns its last delta."""
        generation = self.of(sequence)
        delta = generation.last_delta(error)
        self.forget(generation)
        return delta

    def expire(self, now: float) -> list[Delta]:
        """End the generations whose deadline has passed. Returns their last deltas."""
        if now < self._next_deadline:
            return []
        late = [generation for generation in self._by_key.values() if now >= generation.deadline]
        deltas = [
            self.fail(generation.sequence, generation.deadline_error()) for generation in late
        ]
        left = [generation.deadline for generation in self._by_key.values()]
        self._next_deadline = min(left, default=math.inf)
        return deltas

    def forget(self, generation: Generation) -> None:
        """Remove a generation; sends no delta."""
        generation.sequence.phase = Phase.FINISHED
        if generation.constraint is not None:
            generation.constraint.ended = True
        del self._by_key[generation.key], self._by_sequence[generation.sequence]
        self._constrained.pop(generation.sequence, None)
        self.release(generation.sequence)

    def forget_all(self) -> None:
        """Remove all generations; sends no deltas."""
        for generation in list(self._by_key.values()):
            self.forget(generation)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's memory in the engine; the sequence may be admitted again."""
        try:
            self._engine.release(sequence)
        except Exception:  # an error may cost memory or prefixes, but must not end a stream
            log.exception("a sequence could not be released")


def _milliseconds(start: float, end: float) -> float:
    """Returns the milliseconds between two times in seconds; 0 if one time is 0."""
    return round((end - start) * 1000, 3) if start and end else 0.0
