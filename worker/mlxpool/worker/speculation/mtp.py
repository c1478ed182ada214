"""Drafts of the model's own head (MTP), by the share of right drafts of each depth. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct, field

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import MTP, Drafts

# The initial probability of a draft to be right if the drafts before it are, by its depth. One head
# is used for all depths; it was trained for the first.
FIRST_CHANCES = (0.75, 0.6, 0.5, 0.45)
# Weight of the newest draft in the average of a stream; draft n of the first ones has 1 / n.
STREAM_WEIGHT = 0.12
ALL_WEIGHT = 0.02  # the same weight for the averages of all streams
PRIOR_DRAFTS = 8  # number of drafts that the initial assumption counts as in these averages
# Number of drafts that the average of all streams counts as, beside a stream's own. It is low: one
# step with wrong drafts of 32 streams changes this average by all of them.
ALL_COUNT_AS = 2
MOST_SEEN = 8  # the most drafts of a stream that count
# For each token of a stream without drafts, its own drafts lose RETURN_STREAM of their weight, and
# the averages of all streams go back by RETURN_MODEL to the initial ones. So wrong drafts do not
# forbid further drafts for ever: such a stream checks some after fifty to a hundred tokens.
RETURN_STREAM = 1 / 64
RETURN_MODEL = 1 / 2**15


class Predictor(Protocol):
    """Computes the model's own head; used by the compute thread."""

    def ready(self, seq: Sequence) -> bool:
        """Returns whether the state of the input before a sequence's newest token is there."""

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns `depths` likely next tokens of each sequence, while no pass is in flight.

        Leaves out sequences that are not ready, and all if the head's pass fails. Raises the error
        of the pass if the device no longer computes.
        """


class _Average(Struct):
    """The share of right drafts of one depth; `seen`: the number of drafts that it counts as."""

    share: float
    seen: float

    def learn(self, *, right: bool, least: float, most: float) -> None:
        """Adds a draft to the average, with a weight of at least `least`; `most` bounds `seen`."""
        self.seen = min(most, self.seen + 1)
        self.share += max(least, 1 / self.seen) * (right - self.share)


class _Stream(Struct):
    """The state of one sequence: `drafts` were proposed after its first `count` ids.

    `own`: averages of only its drafts, by depth. `others`: averages of all streams that choose
    tokens in the same way.
    """

    own: list[_Average]
    others: list[_Average]
    count: int
    drafts: tuple[int, ...] = ()

    def chances(self) -> list[float]:
        """Returns the probability of each depth's draft to be right if those before it are."""
        averages = zip(self.own, self.others, strict=True)
        return [
            (own.share * own.seen + others.share * ALL_COUNT_AS) / (own.seen + ALL_COUNT_AS)
            for own, others in averages
        ]


def _first_averages() -> list[_Average]:
    return [_Average(share, PRIOR_DRAFTS) for share in FIRST_CHANCES]


class MtpDrafter(Struct):
    """The Drafter of a model's own head."""

    head: Predictor
    name: str = MTP
    # Averages of all streams that take the likeliest token, and of all that choose at random.
    greedy: list[_Average] = field(default_factory=_first_averages)
    random: list[_Average] = field(default_factory=_first_averages)
    _streams: dict[Sequence, _Stream] = field(default_factory=dict)

    def follow(self, seq: Sequence) -> bool:
        """See Drafter."""
        stream = self._streams.get(seq)
        if stream is None:
            own = [_Average(0.0, 0.0) for _ in FIRST_CHANCES]
            others = self.random if seq.options.temperature else self.greedy
            stream = self._streams[seq] = _Stream(own, others, len(seq.ids))
        new = len(seq.ids) - stream.count
        if new > 0:
            if stream.drafts:
                self._learn(stream, seq.ids[stream.count :])
            else:
                self._go_back(stream, new)
            stream.count, stream.drafts = len(seq.ids), ()
        return self.head.ready(seq)

    def _learn(self, stream: _Stream, tokens: list[int]) -> None:
        """Learns whether drafts equal the tokens of the answer, up to the first wrong draft."""
        pairs = zip(stream.drafts, tokens, strict=False)
        for own, others, (draft, token) in zip(stream.own, stream.others, pairs, strict=False):
            right = draft == token
            own.learn(right=right, least=STREAM_WEIGHT, most=MOST_SEEN)
            others.learn(right=right, least=ALL_WEIGHT, most=1 / ALL_WEIGHT)
            if not right:
                return

    def _go_back(self, stream: _Stream, tokens: int) -> None:
        """Reduces the weight of past drafts a little, after `tokens` without drafts."""
        kept, back = (1 - RETURN_STREAM) ** tokens, 1 - (1 - RETURN_MODEL) ** tokens
        for own, others, first in zip(stream.own, stream.others, FIRST_CHANCES, strict=True):
            own.seen *= kept
            others.share += back * (first - others.share)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """See Drafter."""
        stream = self._streams.get(seq)
        if stream is None or not self.head.ready(seq):
            return ()
        return tuple(stream.chances()[:most])

    def seconds(self, rows: int, depth: int) -> float:
        """See Drafter. The passes of the head count as part of the step."""
        return 0.0

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """See Drafter. The number of inputs that wait for the head is bounded."""
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """See Drafter. Computes the drafts of all sequences together."""
        drafts = self.head.drafts(depths)
        for seq in depths:
            stream = self._streams[seq]
            stream.count, stream.drafts = len(seq.ids), drafts.get(seq, ())
        return drafts

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """See Drafter."""
        return ()

    def reset(self) -> None:
        """See Drafter."""
        self._streams.clear()

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._streams.pop(seq, None)
