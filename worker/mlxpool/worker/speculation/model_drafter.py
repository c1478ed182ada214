"""Drafts of a smaller model with the same tokenizer. Pure.

Every stream with drafts has a KV row of the draft model, over the newest tokens of the stream. The
rows of all streams are computed together, in one pass for each draft. Answers do not depend on
these rows: a row may be dropped at any time, and is computed again when it is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.worker.scheduling.context_policy import ContextShift
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.speculation.drafter import DRAFT, Drafts

# The weight of the newest draft: in the average of a stream, and in the average of all streams.
STREAM_WEIGHT = 0.08
ALL_WEIGHT = 0.02  # larger until the streams have had some drafts
PRIOR_DRAFTS = 8  # number of drafts that the initial assumption counts as
NEW_SECONDS = 0.1  # weight of the newest passes in the average of their seconds
# Drafts have classes, by the distance between the two largest logits; each class has an average.
# BOUNDS: the lower bounds of all classes except the first. FIRST_CHANCES: the initial chance of
# each class. The last class is for random tokens, whose distance is not known.
BOUNDS = (0.25, 0.5, 1.0, 2.0, 4.0)
FIRST_CHANCES = (0.3, 0.4, 0.55, 0.7, 0.85, 0.95, 0.6)
UNKNOWN = len(FIRST_CHANCES) - 1
FIRST_RATE = 0.75  # initial rate of all classes together, so high that drafts are tried
# The number of tokens without drafts before a probe. In a probe, a stream tries drafts again after
# drafts that were not worth their cost. The number doubles if the probe's first draft is wrong.
FIRST_PROBE, LONGEST_PROBE = 128, 8192
PROBE_DRAFTS = 2
# Factor of the predicted reading time for a probe, because further drafts seldom follow a probe.
PROBE_READING = 25.0
UNREAD_TOKENS = 8  # unread tokens that the first pass for drafts always reads


class DraftEngine(Protocol):
    """Computes the draft model; used by the compute thread."""

    @property
    def context(self) -> int:
        """The most tokens of a KV row."""

    @property
    def max_rows(self) -> int:
        """The most KV rows, and the most sequences of a pass."""

    @property
    def max_lines(self) -> int:
        """The most inputs of a pass."""

    def report(self, compiles: Callable[[], None], moved: Callable[[], None]) -> None:
        """Sets functions that are called before compilations and after passes.

        `compiles` is called before a pass that compiles something is built, `moved` after each
        pass.
        """

    def admit(self, seq: Sequence) -> None:
        """Gives a sequence an empty KV row."""

    def holds(self, seq: Sequence) -> bool:
        """Returns whether a sequence has a KV row; the row may be dropped between two calls."""

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Shortens a KV row to its first `count` inputs; returns True."""

    def release(self, seq: Sequence) -> None:
        """Frees the KV row of a sequence; ignores a sequence without a row."""

    def read(self, spans: Many[Span]) -> None:
        """Computes a pass that draws nothing."""

    def propose(self, spans: Many[Span], count: int) -> Mapping[Sequence, Many[SampledToken]]:
        """Proposes `count` next tokens for the sequence of each span, in `count` passes.

        The first pass reads the spans, which draw one token each; each later pass reads the tokens
        drawn last. In place of its log-probability, a token has the distance between the two
        largest logits, or None. A sequence with NaN logits is omitted.
        """

    def seconds(self, rows: int, lines: int) -> float:
        """Predicts the seconds of a pass of `rows` KV rows and `lines` inputs, from the warm-up."""

    @property
    def held_bytes(self) -> int:
        """The bytes reserved for weights, all KV rows and a step."""

    @property
    def used_bytes(self) -> int:
        """The allocated bytes of weights and KV rows."""

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """Computes a pass of each compiled size once."""

    def make_room(self, size: int) -> None:
        """Drops KV rows until `size` bytes are free; the rows are computed again when needed."""

    def close(self) -> None:
        """Frees all KV rows and arrays."""


class _Stream(Struct):
    """A stream with drafts, and the sequence of its KV row in the draft model.

    `proposed`: the newest drafts as pairs (token, class), which come after the first `known` inputs
    of the row. A draft's class is a range of the distance between the two largest logits (BOUNDS).
    """

    row: Sequence
    rate: float  # fraction of right drafts
    chances: list[float]  # fraction of right drafts of each class
    proposed: tuple[tuple[int, int], ...] = ()
    known: int = 0
    idle: int = 0  # tokens since the newest drafts
    next_probe: int = FIRST_PROBE  # number of idle tokens before the next probe
    rate_before_probe: float | None = None  # `rate` before the probe; None: no probe runs


class ModelDrafter(Struct):
    """The Drafter that uses a draft model; `vocab_size` is the main model's."""

    engine: DraftEngine
    vocab_size: int
    clock: Callable[[], float]
    name: str = DRAFT
    rate_of_all: float = FIRST_RATE
    chances_of_all: list[float] = field(default_factory=lambda: [*FIRST_CHANCES])
    streams: dict[Sequence, _Stream] = field(default_factory=dict)
    _learned: int = 0  # checked drafts of all streams
    _ratios: dict[int, float] = field(default_factory=dict)  # measured / predicted seconds

    def follow(self, seq: Sequence) -> bool:
        """Compares a sequence's new tokens with its drafts, and learns from the result.

        Computes no pass. Always returns True: the drafter can draft now.
        """
        stream = self.streams.get(seq)
        if stream is None:
            row = _row_of(seq, self.engine.context)
            self.streams[seq] = _Stream(row, self.rate_of_all, [*self.chances_of_all])
            return True
        row = stream.row
        new = seq.ids[len(row.ids) :]
        if stream.proposed:
            right = self._learn(stream, new)
            row.ids += new
            # The KV row has read every draft except the last. It keeps the right drafts. At least
            # the newest token is read again, with the next drafts.
            kept = min(stream.known + min(right, len(stream.proposed) - 1), row.length - 1)
            if self.engine.holds(row) and kept < row.submitted:
                self.engine.rewind(row, kept)
            stream.proposed = ()
        elif new:
            row.ids += new
            stream.idle += len(new)
            if stream.idle >= stream.next_probe and stream.rate_before_probe is None:
                stream.rate_before_probe, stream.rate = stream.rate, max(stream.rate, FIRST_RATE)
        return True

    def _learn(self, stream: _Stream, new: Many[int]) -> int:
        """Learns whether the newest drafts equal `new`, the stream's tokens at the same positions.

        Returns how many drafts were right.
        """
        count = 0
        for (token, kind), actual in zip(stream.proposed, new, strict=False):
            right = token == actual
            self._learned += 1
            new_of_all = max(ALL_WEIGHT, 1 / (PRIOR_DRAFTS + self._learned))
            for some, weight in (
                (stream.chances, STREAM_WEIGHT),
                (self.chances_of_all, ALL_WEIGHT),
            ):
                some[kind] += weight * (right - some[kind])
            stream.rate += STREAM_WEIGHT * (right - stream.rate)
            self.rate_of_all += new_of_all * (right - self.rate_of_all)
            if not right:
                break
            count += 1
        if new and stream.rate_before_probe is not None:
            if not count:
                stream.rate = stream.rate_before_probe
                stream.next_probe = min(2 * stream.next_probe, LONGEST_PROBE)
            stream.rate_before_probe = None
        stream.idle = 0
        return count

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns the stream's fraction of right drafts, for each of at most `most` next drafts."""
        stream = self.streams.get(seq)
        if stream is None:
            return ()
        most = min(most, self.engine.context // 2)
        return (stream.rate,) * (
            most if stream.rate_before_probe is None else min(most, PROBE_DRAFTS)
        )

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """Returns the chance of each newest draft: the fraction of right drafts of its class.

        The class is the range of BOUNDS in which the distance between the two largest logits is.
        """
        stream = self.streams[seq]
        return tuple(stream.chances[kind] for _, kind in stream.proposed)

    def seconds(self, rows: int, depth: int) -> float:
        """Predicts the seconds of `depth` passes of the draft model over `rows` sequences."""
        ratio = self._ratios.get(rows.bit_length(), 1.0)
        return depth * self.engine.seconds(rows, rows) * ratio

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """Predicts the seconds in which the draft model reads unread tokens; see Drafter."""
        stream = self.streams.get(seq)
        if stream is None:
            return 0.0
        row = stream.row
        unread = row.length - row.submitted
        if row.length + depth > self.engine.context:
            unread = self.engine.context // 2
        elif not self.engine.holds(row):
            unread = row.length
        if unread <= UNREAD_TOKENS:
            return 0.0
        seconds = self.engine.seconds(1, unread)
        return seconds if stream.rate_before_probe is None else PROBE_READING * seconds

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Computes the drafts of sequences with the draft model; see Drafter."""
        if not depths:
            return {}
        most = max(depths.values())
        rows = {seq: self._ready_row(seq, most, depths) for seq in depths}
        self._read(list(rows.values()))
        began = self.clock()
        spans = [Span(row, row.submitted, row.length - row.submitted, 1) for row in rows.values()]
        lengths = {row: row.length for row in rows.values()}
        drawn = self.engine.propose(spans, most)
        self._measure(len(rows), most, self.clock() - began)
        drafts = {}
        for seq, row in rows.items():
            stream = self.streams[seq]
            stream.known = lengths[row]
            stream.proposed = self._classified(drawn.get(row, ()))
            tokens = tuple(token for token, _ in stream.proposed[: depths[seq]])
            if tokens:
                drafts[seq] = tokens
            else:
                self.engine.release(row)
        return drafts

    def _classified(self, drawn: Many[SampledToken]) -> tuple[tuple[int, int], ...]:
        """Returns drafts as pairs (token, class).

        The class is the range of BOUNDS in which the distance between the two largest logits is. If
        the main model's vocabulary lacks a draft, omits this draft and all later drafts.
        """
        classified = []
        for draft in drawn:
            if draft.token >= self.vocab_size:
                break
            gap = draft.logprob
            kind = UNKNOWN if gap is None else bisect_right(BOUNDS, gap.logprob)
            classified.append((draft.token, kind))
        return tuple(classified)

    def _ready_row(self, seq: Sequence, depth: int, others: Mapping[Sequence, int]) -> Sequence:
        """Returns the KV row of a sequence, with room for `depth` drafts.

        To make a new row, may free a row of a sequence that is not in `others`.
        """
        stream = self.streams[seq]
        row = stream.row
        if row.length + depth > self.engine.context:
            self.engine.release(row)
            row = stream.row = _row_of(seq, self.engine.context)
        if not self.engine.holds(row):
            self._make_place(others)
            row.submitted = row.awaited = 0
            self.engine.admit(row)
            row.phase = Phase.RUNNING
        return row

    def _make_place(self, needed: Mapping[Sequence, int]) -> None:
        """If all KV rows are used, frees one, preferably the row of a stream that does not run.

        The rows of the sequences in `needed` stay.
        """
        held = [
            (seq.phase is Phase.RUNNING, number, stream.row)
            for number, (seq, stream) in enumerate(self.streams.items())
            if seq not in needed and self.engine.holds(stream.row)
        ]
        taken = sum(self.engine.holds(self.streams[seq].row) for seq in needed)
        if held and taken + len(held) >= self.engine.max_rows:
            self.engine.release(min(held)[2])

    def _read(self, rows: Many[Sequence]) -> None:
        """Reads KV rows with more than UNREAD_TOKENS unread tokens, in passes of bounded size."""
        lacking = [row for row in rows if row.length - row.submitted > UNREAD_TOKENS]
        while lacking:
            left, spans = self.engine.max_lines, []
            for row in lacking:
                count = min(left, row.length - 1 - row.submitted)
                if count > 0:
                    spans.append(Span(row, row.submitted, count, 0))
                    left -= count
            self.engine.read(spans)
            lacking = [row for row in lacking if row.length - 1 > row.submitted]

    def _measure(self, rows: int, depth: int, seconds: float) -> None:
        """Learns how much longer passes for drafts take than the engine predicts.

        `seconds`: the measured time of `depth` passes of `rows` sequences.
        """
        predicted = depth * self.engine.seconds(rows, rows)
        if predicted <= 0:
            return
        size = rows.bit_length()
        known = self._ratios.get(size, 1.0)
        ratio = min(2 * known, seconds / predicted)  # bounded: other processes may slow passes
        self._ratios[size] = known + NEW_SECONDS * (ratio - known)

    def forget(self, seq: Sequence) -> None:
        """Drops the state and the KV row of a sequence; see Drafter."""
        stream = self.streams.pop(seq, None)
        if stream is not None:
            self.engine.release(stream.row)

    def reset(self) -> None:
        """Drops the state and the KV rows of all sequences; see Drafter."""
        for seq in [*self.streams]:
            self.forget(seq)


def _row_of(seq: Sequence, context: int) -> Sequence:
    """Returns the sequence of a KV row over a stream's newest tokens, at most half of `context`.

    The row samples with the options and the noise of the stream, so that random choices of both
    models agree as often as possible. But it samples without penalties, because these need tokens
    that are not sampled yet.
    """
    size = len(seq.prompt) + len(seq.ids)
    options = replace(
        seq.options,
        repeat_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=True,
        top_logprobs=0,
    )
    return Sequence(
        seq.id,
        seq.run_number,
        seq.prompt,
        options,
        seq.seed,
        seq.max_tokens,
        [*seq.ids],
        shift=ContextShift(context, 0),
        discarded=max(0, size - context // 2),
    )
