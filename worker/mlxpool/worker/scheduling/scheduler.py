"""Chooses the spans of the next step, admissions and preemptions. Pure.

A step is one forward pass over spans: the next input of every decoding sequence, and as many chunks
of prompts as fit into a bound of predicted additional time. Every function takes the sequences in
the order of their arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from math import isqrt
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.media.spans import touches_images
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.spans import Span, Step
from mlxpool.worker.scheduling.step_cost import Load

FULL_CHUNK_CONTEXT = 2048  # the most tokens of context for a chunk of full length
MIN_CHUNK = 64  # tokens; smaller chunks are not worth their cost
MAX_RUN_LINES = 64  # additional unread completion tokens of a pass, besides one per sequence
NO_DRAFTS: Mapping[Sequence, tuple[int, ...]] = {}
NO_TURNS: Mapping[str, int] = {}

# (sequence, tokens) -> length of the next chunk: at most `tokens`, or an indivisible group of an
# image's inputs; 0: the next input belongs to an image that is not encoded yet
Clip = Callable[[Sequence, int], int]
Predict = Callable[[Load], float]  # load of a pass -> its seconds


class StepLimits(Struct, frozen=True):
    """The bounds of one pass.

    `lines`: the most inputs. `prompts`: the most chunks (0: no bound). `pairs`: the most query-key
    pairs of chunks. `seconds`: the most time that chunks may add for decoding sequences (0: no
    bound). `ahead`: passes that may be in flight while the pass is submitted. `sizes`: the numbers
    of inputs for which passes are compiled; empty: a pass may have any number. `run_lines`: the
    most inputs of decode steps if several inputs of one sequence are read together (0: no bound).
    `drafts`: the most checked drafts of a sequence (0: no bound). A pass without decoding sequences
    has `prefill_lines` and `prefill_pairs` in place of `lines` and `pairs` (0: its bound is the
    same as with decoding sequences).
    """

    lines: int
    pairs: int
    context: int
    seconds: float = 0.0
    prompts: int = 0
    ahead: int = 0
    sizes: tuple[int, ...] = ()
    run_lines: int = 0
    drafts: int = 0
    prefill_lines: int = 0
    prefill_pairs: int = 0

    @property
    def of_prefill(self) -> Self:
        """Returns the bounds of a pass without decoding sequences."""
        lines, pairs = self.prefill_lines or self.lines, self.prefill_pairs or self.pairs
        return replace(self, lines=lines, pairs=pairs)


def schedule(
    live: Many[Sequence],
    limits: StepLimits,
    predict: Predict,
    clip: Clip,
    *,
    alone: bool = True,
    drafts: Mapping[Sequence, tuple[int, ...]] = NO_DRAFTS,
    turns: Mapping[str, int] = NO_TURNS,
) -> Step:
    """Returns the next step, which may be empty.

    Omits a sequence whose next input belongs to an image that is not encoded, see
    compute/image_jobs. `alone`: a prompt that failed before may be read now, in a step of its own;
    otherwise the prompt waits while other sequences decode. `drafts`: the drafts of each sequence
    that the step checks; they are possible only while no pass is in flight. `turns`: for each
    owner, the number of the last pass that read a prompt of the owner.
    """
    rows, prompts, runs = _rows_and_prompts(live, limits, clip)
    prompts = _in_turn(prompts, turns)
    if drafts:
        rows = [_with_drafts(span, drafts.get(span.sequence, ())) for span in rows]
    lines = _inputs(rows) if drafts else len(rows)
    rows += _run_spans(runs, _spare_lines(lines + len(runs), limits), clip)
    if not prompts:
        return Step(tuple(rows), len(rows))
    if prompts[0].read_alone and (alone or not rows):
        chunk = _first_chunk(prompts[0], limits, clip)
        if chunk.count:
            return Step((chunk,), alone=True)
        return Step(tuple(rows), len(rows))
    chunks = _chunks(prompts, rows, limits, predict, clip)
    return Step((*rows, *_filled(chunks, _inputs(rows), limits.sizes)), len(rows))


def pair_budget(chunk: int) -> int:
    """Returns the most query-key pairs of a step; `chunk`: the engine's chunk size."""
    return chunk * FULL_CHUNK_CONTEXT


def longest_chunk(start: int, pairs: int) -> int:
    """Returns the length of the longest chunk at `start` with at most `pairs` query-key pairs.

    If `pairs` is positive, the chunk has at least MIN_CHUNK tokens, so prompts of any length
    progress.
    """
    if pairs <= 0:
        return 0
    return max(MIN_CHUNK, (isqrt(start * start + 4 * pairs) - start) // 2)


def _rows_and_prompts(
    live: Many[Sequence], limits: StepLimits, clip: Clip
) -> tuple[list[Span], list[Sequence], list[Sequence]]:
    """Returns the spans of decoding sequences, and two lists of other sequences.

    The first list has sequences with unread prompts, the second sequences with a few unread
    completion tokens. A sequence decodes if its next input is known, or if a pass in flight draws
    this input and the sequence continues after it. A sequence whose image was evicted waits until
    the image is encoded again.
    """
    rows: list[Span] = []
    prompts: list[Sequence] = []
    runs: list[Sequence] = []
    running, context, ahead = Phase.RUNNING, limits.context, limits.ahead
    for seq in live:  # this loop runs in every step, so it makes few calls
        if seq.phase is not running or seq.held:
            continue
        awaited, submitted = seq.awaited, seq.submitted
        ids = len(seq.ids) + awaited
        length = len(seq.prompt) + ids - seq.discarded
        if awaited:
            bound = context if seq.shift is None else seq.shift.context
            goes_on = awaited <= ahead and ids < seq.max_tokens and length < bound
            if goes_on and (not seq.media or clip(seq, 1)):
                rows.append(Span(seq, submitted, 1, 1))
        elif length - submitted > 1:
            (runs if seq.reads_run else prompts).append(seq)
        elif length - submitted == 1 and (not seq.media or clip(seq, 1)):
            rows.append(Span(seq, submitted, 1, 1))
    return rows, prompts, runs


def _in_turn(prompts: list[Sequence], turns: Mapping[str, int]) -> list[Sequence]:
    """Returns the prompts in the order of their owners' last passes, the oldest pass first.

    The prompts of an owner stay in their order. So a prompt waits for one pass of each other owner,
    however many prompts that owner has.
    """
    if len(prompts) < 2 or not turns:
        return prompts
    return sorted(prompts, key=lambda prompt: turns.get(prompt.owner, 0))


def _with_drafts(span: Span, drafts: tuple[int, ...]) -> Span:
    return Span.check(span.sequence, drafts) if drafts and not span.sequence.awaited else span


def _spare_lines(rows: int, limits: StepLimits) -> int:
    """Returns how many inputs a pass may have for unread completion tokens.

    The first token of each row is not counted. The number is small, so that these inputs hardly
    delay prompts and other sequences.
    """
    spare = min(MAX_RUN_LINES, max(0, limits.lines - rows) // 2)
    return min(spare, max(0, limits.run_lines - rows)) if limits.run_lines else spare


def _run_spans(runs: Many[Sequence], spare: int, clip: Clip) -> list[Span]:
    """Returns a span of unread completion tokens for each sequence of `runs`.

    A span has one token or more. Together the spans have at most `spare` tokens beyond the first
    token of each span.
    """
    spans: list[Span] = []
    for seq in runs:
        count = clip(seq, min(seq.unread, 1 + spare))
        if count:
            spans.append(_chunk(seq, count))
            spare -= count - 1
    return spans


def _inputs(spans: Many[Span]) -> int:
    return sum(span.count for span in spans)


def _chunk(sequence: Sequence, count: int) -> Span:
    start = sequence.submitted
    end = start + count
    if sequence.reports_after(start, end):
        return Span(sequence, start, count, draws=0, hidden=True)
    return Span(sequence, start, count, draws=int(end == sequence.length))


def _first_chunk(prompt: Sequence, limits: StepLimits, clip: Clip) -> Span:
    most = min(prompt.unread, limits.lines, longest_chunk(prompt.submitted, limits.pairs))
    return _chunk(prompt, clip(prompt, most))


def _chunks(
    prompts: Many[Sequence], rows: Many[Span], limits: StepLimits, predict: Predict, clip: Clip
) -> list[Span]:
    """Returns chunks of prompts in order, until a bound of the pass is reached."""
    if not rows:
        limits = limits.of_prefill
    load = Load.of(rows)
    bound = limits.seconds and predict(load) + limits.seconds
    lines, pairs = limits.lines - _inputs(rows), limits.pairs
    chunks: list[Span] = []
    for prompt in prompts:
        if prompt.read_alone or (limits.prompts and len(chunks) == limits.prompts):
            break
        most = min(prompt.unread, lines, longest_chunk(prompt.submitted, pairs))
        if rows and bound:
            least = 0 if chunks else min(most, MIN_CHUNK)
            most = max(least, _tokens_within(bound, prompt, most, load, predict))
        if most <= 0:
            break
        count = clip(prompt, most)
        if not count:
            continue  # other prompts need not wait for this prompt's image
        if chunks and count > lines:
            break  # the next pass begins with this prompt
        span = _chunk(prompt, count)
        chunks.append(span)
        load = load.with_span(span)
        lines, pairs = lines - span.count, pairs - span.count * span.end
        if most < prompt.unread and span.count == most:
            break  # the chunk ends at a bound, not at a restore point
    return chunks


def _tokens_within(bound: float, prompt: Sequence, most: int, load: Load, predict: Predict) -> int:
    """Returns how many tokens, at most `most`, a chunk may have in a pass of `bound` seconds."""

    def takes(count: int) -> float:
        return predict(load.with_span(_chunk(prompt, count)))

    return bisect_right(range(1, most + 1), bound, key=takes)


def _filled(chunks: list[Span], beside: int, sizes: Many[int]) -> list[Span]:
    """Shortens the last chunk so that the pass has one of `sizes` inputs; returns all chunks.

    `beside`: the inputs of decode steps in this pass. A chunk that reads its prompt to the end is
    not shortened, because padding is cheaper than another pass.
    """
    if not chunks or not sizes or chunks[-1].end == chunks[-1].sequence.length:
        return chunks
    last = chunks[-1]
    if touches_images(last.sequence.media, last.start, last.end):
        return chunks  # not shortened; passes of other sizes are not compiled
    lines = beside + _inputs(chunks)
    fitting = bisect_right(sizes, lines)
    spare = lines - sizes[fitting - 1] if fitting else 0
    if spare >= last.count:
        return chunks
    return [*chunks[:-1], replace(last, count=last.count - spare)]


def next_admissions(
    live: Many[Sequence], slots: int, waits: Callable[[Sequence], bool] = lambda _: False
) -> Iterator[Sequence]:
    """Yields the waiting sequences to admit next, at most one for each free slot.

    Sequences of the owners with the fewest running sequences come first; of one owner, preempted
    sequences come first. A sequence is omitted if `waits` returns True; `waits` is called after the
    sequences before it were admitted.
    """
    order = waiting(live)
    rows = Counter(seq.owner for seq in running(live)) if order else Counter()
    free = slots - rows.total()
    for seq in sorted(order, key=lambda s: (rows[s.owner], not s.preempted)):
        if free <= 0:
            return
        if not waits(seq):
            free -= 1
            yield seq


def waiting(live: Many[Sequence]) -> list[Sequence]:
    """Returns the sequences that wait for admission."""
    phase = Phase.WAITING
    return [s for s in live if s.phase is phase]


def running(live: Many[Sequence]) -> list[Sequence]:
    """Returns the admitted sequences."""
    phase = Phase.RUNNING
    return [s for s in live if s.phase is phase]


def preemption_victim(live: Many[Sequence]) -> Sequence | None:
    """Returns the newest running sequence of the owner with the most running sequences.

    None if only one sequence runs.
    """
    rows = running(live)
    if len(rows) < 2:
        return None
    counts = Counter(seq.owner for seq in rows)
    most = max(counts.values())
    return next(seq for seq in reversed(rows) if counts[seq.owner] == most)


def victim_for(sequence: Sequence, live: Many[Sequence]) -> Sequence | None:
    """Returns the running sequence to preempt for a waiting sequence of another owner, or None.

    It is the newest sequence of the owner with the most running sequences, if this owner has at
    least two more than the owner of the waiting sequence. The broker uses the same rule when it
    distributes runs among workers.
    """
    victim = preemption_victim(live)
    if victim is None:
        return None
    counts = Counter(seq.owner for seq in running(live))
    return victim if counts[victim.owner] >= counts[sequence.owner] + 2 else None
