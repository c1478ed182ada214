"""Drafts of the model's own head (MTP), by how often those of each depth were right. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct, field

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import MTP, Drafts

# How likely a draft is right if those before it are, as is assumed at first, by its depth: one head
# is used for all of them, and was trained for the first.
FIRST_CHANCES = (0.75, 0.6, 0.5, 0.45)
# Weight of the newest draft in the average of a stream; of the first ones 1 / n, which is more.
STREAM_WEIGHT = 0.12
ALL_WEIGHT = 0.02  # the same of the averages of all streams
PRIOR_DRAFTS = 8  # drafts as which what is assumed at first counts in these
# Drafts of a stream as which the average of all streams counts beside its own: one step with wrong
# drafts of 32 streams tells it of all of them.
ALL_COUNT_AS = 2
MOST_SEEN = 8  # drafts that count of a stream at most
# For each token of a stream without drafts its own drafts count by this share less, and the
# averages of all go back by this share to what was assumed at first: wrong drafts do not forbid
# further ones for ever, and such a stream checks some again after fifty to a hundred tokens.
RETURN_STREAM = 1 / 64
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


class _Average(Struct):
    """The share of the drafts of one depth that were right, and as how many of them it counts."""

    share: float
    seen: float

    def learn(self, *, right: bool, least: float, most: float) -> None:
        """Takes one more draft into account, with a weight of at least `least`."""
        self.seen = min(most, self.seen + 1)
        self.share += max(least, 1 / self.seen) * (right - self.share)


class _Stream(Struct):
    """What is known of one sequence: `drafts` were proposed behind its first `count` ids.

    `own`: of its drafts alone, by depth. `others`: of all streams that choose tokens as it does.
    """

    own: list[_Average]
    others: list[_Average]
    count: int
    drafts: tuple[int, ...] = ()

    def chances(self) -> list[float]:
        """Returns how likely a draft of each depth is right, if those before it are."""
        every = zip(self.own, self.others, strict=True)
        return [
            (own.share * own.seen + others.share * ALL_COUNT_AS) / (own.seen + ALL_COUNT_AS)
            for own, others in every
        ]


def _first_averages() -> list[_Average]:
    return [_Average(share, PRIOR_DRAFTS) for share in FIRST_CHANCES]


class MtpDrafter(Struct):
    """The Drafter of a model's own head."""

    head: Predictor
    name: str = MTP
    # Of all streams that take the likeliest token, and of all that choose at random.
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
        """Learns whether drafts are as the tokens that came, up to the first wrong one."""
        pairs = zip(stream.drafts, tokens, strict=False)
        for own, others, (draft, token) in zip(stream.own, stream.others, pairs, strict=False):
            right = draft == token
            own.learn(right=right, least=STREAM_WEIGHT, most=MOST_SEEN)
            others.learn(right=right, least=ALL_WEIGHT, most=1 / ALL_WEIGHT)
            if not right:
                return

    def _go_back(self, stream: _Stream, tokens: int) -> None:
        """Has what is known count a little less, for so many tokens without drafts."""
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
        """See Drafter. What waits for the head is bounded."""
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """See Drafter. They are computed together."""
        found = self.head.drafts(depths)
        for seq in depths:
            stream = self._streams[seq]
            stream.count, stream.drafts = len(seq.ids), found.get(seq, ())
        return found

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """See Drafter."""
        return ()

    def reset(self) -> None:
        """See Drafter."""
        self._streams.clear()

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._streams.pop(seq, None)
