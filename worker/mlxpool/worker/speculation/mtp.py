"""Drafts of the model's own head (MTP), by how often those of each depth were right. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import MTP, Drafts

# How likely a draft is right if those before it are, as is assumed at first, by its depth: one head
# is used for all of them, and was trained for the first.
FIRST_CHANCES = (0.75, 0.6, 0.5, 0.45)
NEW_STREAM = 0.12  # weight of the newest draft in the average of a stream
NEW_MODEL = 0.02  # the same of the averages of all streams, with which a new one begins
# Weight of the average of all streams, for each token of a stream that has no drafts, and of what
# was assumed at first in the average of all: wrong drafts do not forbid further ones for ever.
# With these a step checks such drafts for one token in some fifty to a hundred.
RETURN_STREAM = 1 / 256
RETURN_MODEL = 1 / 2**15


class Predictor(Protocol):
    """Computes the model's own head; used by the thread that computes the model."""

    def ready(self, seq: Sequence) -> bool:
        """Whether it has the state of the input before the newest token of a running sequence."""

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns so many likely next tokens of each of these sequences, with no pass in flight.

        Those that are not ready are left out, and all where its pass fails. Raises what the pass
        raised where the device no longer computes.
        """


@dataclass(slots=True)
class _Stream:
    """What is known of one sequence: `drafts` were proposed behind its first `count` ids."""

    chances: list[float]
    count: int
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class MtpDrafter:
    """The Drafter of a model's own head."""

    head: Predictor
    name: str = MTP
    chances_of_all: list[float] = field(default_factory=lambda: [*FIRST_CHANCES])
    _streams: dict[Sequence, _Stream] = field(default_factory=dict)

    def follow(self, seq: Sequence) -> bool:
        """See Drafter."""
        stream = self._streams.get(seq)
        if stream is None:
            stream = _Stream([*self.chances_of_all], len(seq.ids))
            self._streams[seq] = stream
        new = len(seq.ids) - stream.count
        if new > 0:
            if stream.drafts:
                self._learn(stream, seq.ids[stream.count :])
            else:
                self._go_back(stream, new)
            stream.count, stream.drafts = len(seq.ids), ()
        return self.head.ready(seq)

    def _learn(self, stream: _Stream, tokens: list[int]) -> None:
        """Learns whether drafts are as the tokens that came, up to the first wrong one."""
        pairs = zip(stream.drafts, tokens, strict=False)
        for depth, (draft, token) in enumerate(pairs):
            right = draft == token
            for chances, new in ((stream.chances, NEW_STREAM), (self.chances_of_all, NEW_MODEL)):
                chances[depth] += new * (right - chances[depth])
            if not right:
                return

    def _go_back(self, stream: _Stream, tokens: int) -> None:
        """Moves the averages back a little, for so many tokens without drafts."""
        steps = (
            (self.chances_of_all, FIRST_CHANCES, RETURN_MODEL),
            (stream.chances, self.chances_of_all, RETURN_STREAM),
        )
        for chances, target, weight in steps:
            share = 1 - (1 - weight) ** tokens
            for depth, wanted in enumerate(target):
                chances[depth] += share * (wanted - chances[depth])

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """See Drafter."""
        stream = self._streams.get(seq)
        if stream is None or not self.head.ready(seq):
            return ()
        return tuple(stream.chances[:most])

    def seconds(self, rows: int, depth: int) -> float:
        """See Drafter. The passes of the head count as part of the step."""
        return 0.0

    def reading(self, seq: Sequence, depth: int) -> float:
        """See Drafter. What waits for the head is bounded."""
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """See Drafter. They are computed together."""
        found = self.head.drafts(depths)
        for seq in depths:
            stream = self._streams[seq]
            stream.count, stream.drafts = len(seq.ids), found.get(seq, ())
        return found

    def sure(self, seq: Sequence) -> tuple[float, ...]:
        """See Drafter."""
        return ()

    def reset(self) -> None:
        """See Drafter."""
        self._streams.clear()

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._streams.pop(seq, None)
