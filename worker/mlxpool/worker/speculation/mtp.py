"""Drafts of the model's own head for multi-token prediction (MTP). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct, field

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import MTP, Drafts

# The initial probability of a draft to be right if the drafts before it are right, by depth. One
# head is used for all depths, but was trained for the first depth.
FIRST_CHANCES = (0.75, 0.6, 0.5, 0.45)
# The least weight of the newest draft in a stream's average. At first, draft n has 1 / n.
STREAM_WEIGHT = 0.12
ALL_WEIGHT = 0.02  # the same for the averages of all streams
PRIOR_DRAFTS = 8  # weight of the initial assumption in these averages, in drafts
# Weight of the average of all streams in a stream's chances, in drafts. It is low, because one step
# with wrong drafts of 32 streams changes this average 32 times.
ALL_COUNT_AS = 2
MOST_SEEN = 8  # the largest weight of a stream's own average, in drafts
# For each token that a stream draws without drafts, the averages of this stream lose RETURN_STREAM
# of their weight, and the averages of all streams return by RETURN_MODEL to the initial averages.
# So wrong drafts do not prevent drafts for ever: the stream checks drafts again after fifty to a
# hundred tokens.
RETURN_STREAM = 1 / 64
RETURN_MODEL = 1 / 2**15


class Predictor(Protocol):
    """Computes the model's MTP head; used by the compute thread."""

    def ready(self, seq: Sequence) -> bool:
        """Returns whether the hidden state of the input before the newest token is available."""

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the likeliest next tokens of each sequence, as many as its number in `depths`.

        Call it only while no pass is in flight. Omits sequences that are not ready, and all
        sequences if the head's pass fails. Raises the error of the pass if the device no longer
        computes.
        """


class _Average(Struct):
    """An average over the drafts of one depth: `share` is the fraction of right drafts.

    `seen`: the weight of the average, as a number of drafts.
    """

    share: float
    seen: float

    def learn(self, *, right: bool, least: float, most: float) -> None:
        """Adds a draft to the average.

        The draft's weight is 1 / `seen`, but at least `least`; `seen` grows by 1, up to `most`.
        """
        self.seen = min(most, self.seen + 1)
        self.share += max(least, 1 / self.seen) * (right - self.share)


class _Stream(Struct):
    """The drafter's state of one sequence.

    `drafts` were proposed after the sequence's first `count` ids. `own`: the averages of this
    sequence's drafts, by depth. `others`: the averages over all sequences that choose tokens in the
    same way (greedy or random).
    """

    own: list[_Average]
    others: list[_Average]
    count: int
    drafts: tuple[int, ...] = ()

    def chances(self) -> list[float]:
        """Returns the probability of each depth's draft to be right if earlier drafts are right."""
        averages = zip(self.own, self.others, strict=True)
        return [
            (own.share * own.seen + others.share * ALL_COUNT_AS) / (own.seen + ALL_COUNT_AS)
            for own, others in averages
        ]


def _first_averages() -> list[_Average]:
    return [_Average(share, PRIOR_DRAFTS) for share in FIRST_CHANCES]


class MtpDrafter(Struct):
    """The Drafter that uses a model's MTP head."""

    head: Predictor
    name: str = MTP
    # Averages of all streams with greedy choice, and of all streams with random choice.
    greedy: list[_Average] = field(default_factory=_first_averages)
    random: list[_Average] = field(default_factory=_first_averages)
    _streams: dict[Sequence, _Stream] = field(default_factory=dict)

    def follow(self, seq: Sequence) -> bool:
        """Learns from a sequence's new tokens; returns whether the head can draft now."""
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
        """Moves the averages a little back towards their initial values.

        `tokens`: the number of new tokens that came without drafts. The sequence's own averages
        lose weight; the averages over all sequences move towards FIRST_CHANCES.
        """
        kept, back = (1 - RETURN_STREAM) ** tokens, 1 - (1 - RETURN_MODEL) ** tokens
        for own, others, first in zip(stream.own, stream.others, FIRST_CHANCES, strict=True):
            own.seen *= kept
            others.share += back * (first - others.share)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns the chances of drafts by the averages so far; see Drafter."""
        stream = self._streams.get(seq)
        if stream is None or not self.head.ready(seq):
            return ()
        return tuple(stream.chances()[:most])

    def seconds(self, rows: int, depth: int) -> float:
        """Returns 0: the time of the head's passes is part of the step's time."""
        return 0.0

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """Returns 0: the head only ever has a bounded number of inputs left to read."""
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Computes the drafts of all sequences together; see Drafter."""
        drafts = self.head.drafts(depths)
        for seq in depths:
            stream = self._streams[seq]
            stream.count, stream.drafts = len(seq.ids), drafts.get(seq, ())
        return drafts

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """Returns (): the chances do not change."""
        return ()

    def reset(self) -> None:
        """Drops the state of all sequences, after `drafts` raised an exception; see Drafter."""
        self._streams.clear()

    def forget(self, seq: Sequence) -> None:
        """Drops the state of a sequence; see Drafter."""
        self._streams.pop(seq, None)
