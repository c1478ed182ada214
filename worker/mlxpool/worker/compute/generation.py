"""A sequence at work in the compute thread: its text, its facts, when and how it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common.errors import DeadlineExceeded
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.compute.messages import Admit, Key
from mlxpool.worker.engine.sequence import Drawn, Phase, Sequence
from mlxpool.worker.prompt.detokenizer import Completion


@dataclass(eq=False, slots=True)
class Run:
    """Times are monotonic seconds; 0 where it has not happened."""

    sequence: Sequence
    facts: Mapping[str, Any]
    text: Completion
    received: float
    deadline: float = math.inf
    facts_sent: bool = False
    prefill_at: float = 0.0  # when its first chunk began
    decode_at: float = 0.0  # when its prompt was done
    first_at: float = 0.0  # its first token in this attempt
    piece: Callable[[int], bytes] = field(default=lambda token: b"")

    @classmethod
    def begin(cls, admit: Admit, piece: Callable[[int], bytes]) -> Run:
        """A run of what was prepared."""
        return cls(
            admit.sequence,
            admit.facts,
            admit.text,
            admit.received,
            admit.deadline,
            piece=piece,
        )

    @property
    def key(self) -> Key:
        return self.sequence.id, self.sequence.attempt

    def take(self, drawn: Drawn, eos: frozenset[int], now: float) -> Delta:
        """One drawn token: the delta it makes, with the end if it is the last."""
        sequence = self.sequence
        self.first_at = self.first_at or now
        if drawn.token in eos and not sequence.options.ignore_eos:
            return self.delta("", (), end=self.end("stop", now))
        position = len(sequence.ids)
        sequence.ids.append(drawn.token)
        text = self.text.push(drawn.token)
        reason = self.over()
        end = None if reason is None else self.end(reason, now)
        return self.delta(text, (drawn.token,), position, self._logprobs(drawn), end)

    def over(self) -> str | None:
        """Why the completion is complete, judged from its ids alone; None when it is not."""
        if self.text.stopped:
            return "stop"
        if len(self.sequence.ids) >= self.sequence.max_tokens:
            return "length"
        return None

    def too_late(self) -> DeadlineExceeded:
        """The error of a run whose deadline has passed."""
        return DeadlineExceeded(
            f"not finished {self.deadline - self.received:.3f} s after it reached the worker"
            f" (deadline_ms), {len(self.sequence.ids)} tokens done"
        )

    def delta(
        self,
        text: str,
        ids: tuple[int, ...],
        pos: int | None = None,
        logprobs: list[Any] | None = None,
        end: dict[str, Any] | None = None,
    ) -> Delta:
        """An entry of `deltas`; the first of a run carries the facts."""
        facts = None if self.facts_sent else dict(self.facts)
        self.facts_sent = True
        at = len(self.sequence.ids) if pos is None else pos
        return Delta(*self.key, at, text, pack_ids(ids), logprobs, facts, end)

    def _logprobs(self, drawn: Drawn) -> list[Any] | None:
        found = drawn.logprob
        if found is None:
            return None
        top = [self._named(token, value) for token, value in found.top]
        return [{**self._named(drawn.token, found.logprob), "top": top}]

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.piece(token).decode("utf-8", "replace")
        return {"id": token, "token": text, "logprob": logprob}

    def end(self, reason: str, now: float) -> dict[str, Any]:
        """The body of `done`."""
        self.sequence.phase = Phase.FINISHED
        rest = "" if reason == "cancelled" else self.text.finish()
        return {
            "text": rest,
            "reason": reason,
            "usage": {
                "prompt_tokens": len(self.sequence.prompt),
                "cached_tokens": min(self.sequence.cached, len(self.sequence.prompt)),
                "completion_tokens": len(self.sequence.ids),
            },
            "timings_ms": {
                "prefill": _ms(self.prefill_at, self.decode_at),
                "decode": _ms(self.decode_at, now),
            },
        }


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1000, 3) if start and end else 0.0
