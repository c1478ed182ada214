"""Tests drafts of a draft model: the tokens that its rows read and drop, and learned chances.

The draft model here proposes the next number. The test texts mostly count upwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence, TokenLogprob
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.speculation.model_drafter import (
    FIRST_PROBE,
    FIRST_RATE,
    PROBE_DRAFTS,
    UNREAD_TOKENS,
    ModelDrafter,
)

SIZE = 1000  # of the vocabulary


class CountingDraft:
    """A DraftEngine that proposes the newest token plus 1, and records the inputs of its rows."""

    context = 32
    max_rows = 3
    max_lines = 12
    held_bytes = used_bytes = 0

    def __init__(self) -> None:
        self.rows: dict[Sequence, list[int]] = {}
        self.passes: list[list[int]] = []  # the inputs of the spans of each pass
        self.sure = 3.0
        self.fails = False

    def report(self, compiles: Callable[[], None], moved: Callable[[], None]) -> None: ...

    def admit(self, seq: Sequence) -> None:
        assert seq not in self.rows and len(self.rows) < self.max_rows
        self.rows[seq] = []

    def holds(self, seq: Sequence) -> bool:
        return seq in self.rows

    def rewind(self, seq: Sequence, count: int) -> bool:
        del self.rows[seq][count:]
        seq.submitted = count
        return True

    def release(self, seq: Sequence) -> None:
        self.rows.pop(seq, None)

    def read(self, spans: Many[Span]) -> None:
        self._pass(spans)
        assert not any(span.draws for span in spans)

    def propose(self, spans: Many[Span], count: int) -> Mapping[Sequence, Many[SampledToken]]:
        if self.fails:
            raise RuntimeError("the draft model fails")
        self._pass(spans)
        proposals = {}
        for span in spans:
            row, seq = self.rows[span.sequence], span.sequence
            tokens = [row[-1] + 1 + number for number in range(count)]
            row += tokens[:-1]
            seq.submitted = len(row)
            sure = TokenLogprob(self.sure)
            proposals[seq] = [SampledToken(seq, token, sure) for token in tokens]
        self.passes += [[1] * len(spans)] * (count - 1)
        return proposals

    def _pass(self, spans: Many[Span]) -> None:
        self.passes.append([span.count for span in spans])
        for span in spans:
            row = self.rows[span.sequence]
            assert span.count > 0 and span.start == len(row) == span.sequence.submitted
            row += span.sequence.token_range(span.start, span.end)
            span.sequence.submitted = len(row)
            assert len(row) <= self.context

    def seconds(self, rows: int, lines: int) -> float:
        return 0.001 * lines

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        pass

    def make_room(self, size: int) -> None:
        self.rows.clear()

    def close(self) -> None:
        pass


class Scene:
    """A ModelDrafter with a CountingDraft as its engine."""

    def __init__(self) -> None:
        self.engine = CountingDraft()
        self.drafter = ModelDrafter(self.engine, SIZE, lambda: 0.0)

    def drafts(self, *rows: Sequence, depth: int = 3) -> list[tuple[int, ...]]:
        assert all(self.drafter.follow(row) for row in rows)
        drafts = self.drafter.drafts(dict.fromkeys(rows, depth))
        return [drafts.get(row, ()) for row in rows]

    def inputs(self, seq: Sequence) -> list[int]:
        """The inputs that the row of a sequence has read."""
        return self.engine.rows[self.drafter.streams[seq].row]


def sequence(first: int = 100, length: int = 5, **fields: Options) -> Sequence:
    prompt = tuple(range(first, first + length))
    options = fields.get("options", Options())
    return Sequence(b"", 1, prompt, options, 7, 500, phase=Phase.RUNNING)


def test_a_row_reads_each_token_once_and_goes_back_behind_wrong_drafts() -> None:
    scene, seq = Scene(), sequence()
    assert scene.drafts(seq) == [(105, 106, 107)]
    assert scene.engine.passes == [[5], [1], [1]]
    seq.ids += [105, 106, 107, 108]  # all drafts were right
    assert scene.drafts(seq) == [(109, 110, 111)]
    assert scene.engine.passes[3:] == [[2], [1], [1]]
    seq.ids += [109, 7]  # the second draft was wrong
    assert scene.drafts(seq) == [(8, 9, 10)]
    assert scene.engine.passes[6:] == [[1], [1], [1]]
    assert scene.inputs(seq) == [*range(100, 110), 7, 8, 9]
    seq.ids += [3]  # the first draft was wrong
    scene.drafts(seq)
    assert scene.inputs(seq) == [*range(100, 110), 7, 3, 4, 5]


def test_what_was_drawn_without_drafts_is_read_with_the_next_ones() -> None:
    scene, seq = Scene(), sequence()
    scene.drafts(seq)
    seq.ids += [9, 8]
    assert scene.drafter.follow(seq)
    seq.ids += [7, 6]
    assert scene.drafts(seq, depth=1) == [(7,)]
    assert scene.engine.passes[3:] == [[4]]


def test_long_prompts_are_read_in_passes_of_bounded_size_and_only_their_end() -> None:
    scene, seq, other = Scene(), sequence(100, 200), sequence(500, 10)
    assert scene.drafts(seq, other, depth=2) == [(300, 301), (510, 511)]
    reads = scene.engine.passes[:-2]
    assert all(sum(counts) <= scene.engine.max_lines for counts in reads)
    assert scene.engine.passes[-2:] == [[1, 1], [1, 1]]
    assert scene.inputs(seq) == [*range(284, 301)]  # the prompt's end: half of the context
    assert scene.drafter.reading_seconds(seq, 3) == 0.0
    assert UNREAD_TOKENS < 10


def test_a_full_row_begins_again_with_the_newest_tokens() -> None:
    scene, seq = Scene(), sequence(100, 20)
    for _ in range(6):
        (drafts,) = scene.drafts(seq, depth=4)
        assert drafts == tuple(range(seq.length + 100, seq.length + 104))
        seq.ids += [*drafts, drafts[-1] + 1]
        assert len(scene.inputs(seq)) <= scene.engine.context
    assert scene.drafter.reading_seconds(seq, 40) > 0


def test_rows_that_were_given_up_are_read_again() -> None:
    scene, seq, other = Scene(), sequence(), sequence(400)
    scene.drafts(seq, other)
    seq.ids.append(105)
    scene.engine.make_room(1)
    assert scene.drafts(seq, other) == [(106, 107, 108), (405, 406, 407)]
    assert scene.inputs(seq) == [*range(100, 108)]


def test_streams_that_do_not_run_give_up_their_rows_first() -> None:
    scene = Scene()
    streams = [sequence(100 * number) for number in range(1, 5)]
    scene.drafts(*streams[:3])
    streams[1].phase = Phase.WAITING
    assert scene.drafts(streams[3]) == [(405, 406, 407)]
    held = [scene.engine.holds(scene.drafter.streams[seq].row) for seq in streams]
    assert held == [True, False, True, True]
    streams[1].phase = Phase.RUNNING
    assert scene.drafts(streams[1], streams[3])[0] == (205, 206, 207)
    assert len(scene.engine.rows) == scene.engine.max_rows


def test_right_drafts_raise_the_chances_and_wrong_ones_lower_them() -> None:
    """Drafts change the chances of their stream and, more slowly, those of all streams.

    Each range of the draft model's probabilities has its own chances.
    """
    scene, seq = Scene(), sequence()
    for _ in range(20):
        (drafts,) = scene.drafts(seq, depth=2)
        seq.ids += [*drafts, drafts[-1] + 1]
        scene.drafter.follow(seq)
    assert scene.drafter.chances(seq, 2)[0] > 0.9 > FIRST_RATE
    beside = sequence(300)
    scene.drafter.follow(beside)
    assert FIRST_RATE < scene.drafter.chances(beside, 1)[0] < scene.drafter.chances(seq, 1)[0]
    for _ in range(60):
        scene.drafts(seq, depth=2)
        seq.ids.append(5)
        scene.drafter.follow(seq)
    assert scene.drafter.chances(seq, 1)[0] < 0.1
    scene.drafts(seq, depth=2)
    surely = scene.drafter.sharper_chances(seq)
    assert len(surely) == 2 and max(surely) < 0.1
    scene.engine.sure = 9.0  # drafts of another class, whose chance is not learned yet
    seq.ids.append(5)
    scene.drafts(seq, depth=2)
    assert min(scene.drafter.sharper_chances(seq)) > max(surely)


def test_a_stream_without_drafts_tries_them_again_ever_more_rarely() -> None:
    scene, seq = Scene(), sequence()
    for _ in range(60):
        scene.drafts(seq, depth=1)
        seq.ids.append(5)
    scene.drafter.follow(seq)
    low = scene.drafter.chances(seq, 9)
    assert len(low) == 9 and low[0] < 0.1
    for wait in (FIRST_PROBE, 2 * FIRST_PROBE):
        seq.ids += [5] * (wait - 1)
        scene.drafter.follow(seq)
        assert scene.drafter.chances(seq, 9) == low
        seq.ids.append(5)
        scene.drafter.follow(seq)
        assert scene.drafter.chances(seq, 9) == (FIRST_RATE,) * PROBE_DRAFTS
        assert scene.drafter.reading_seconds(seq, 2) > 25 * scene.engine.seconds(1, 10)
        scene.drafts(seq, depth=2)
        seq.ids.append(5)
        scene.drafter.follow(seq)
        assert scene.drafter.chances(seq, 9)[0] <= low[0]
    seq.ids += [5] * 4 * FIRST_PROBE
    (drafts,) = scene.drafts(seq, depth=2)
    seq.ids += [*drafts]
    scene.drafter.follow(seq)
    assert len(scene.drafter.chances(seq, 9)) == 9
    assert scene.drafter.chances(seq, 9)[0] > FIRST_RATE


def test_a_token_that_the_model_does_not_have_is_not_proposed() -> None:
    scene, seq = Scene(), sequence(SIZE - 7)
    assert scene.drafts(seq, depth=4) == [(SIZE - 2, SIZE - 1)]


def test_a_row_draws_with_the_options_and_the_noise_of_its_stream() -> None:
    options = Options(temperature=0.7, top_k=3, repeat_penalty=1.3, presence_penalty=0.5)
    scene, seq = Scene(), sequence(options=options)
    scene.drafts(seq)
    row = scene.drafter.streams[seq].row
    assert (row.seed, row.options.temperature, row.options.top_k) == (7, 0.7, 3)
    assert (row.options.repeat_penalty, row.options.presence_penalty) == (1.0, 0.0)
    assert row.options.logprobs and row.discarded == 0


def test_after_a_failure_all_rows_are_read_again() -> None:
    scene, seq = Scene(), sequence()
    scene.drafts(seq)
    scene.engine.fails = True
    with pytest.raises(RuntimeError):
        scene.drafts(seq)
    scene.drafter.reset()
    assert not scene.engine.rows
    scene.engine.fails = False
    assert scene.drafts(seq) == [(105, 106, 107)]


def test_what_is_kept_of_a_sequence_goes_with_it() -> None:
    scene, seq = Scene(), sequence()
    scene.drafts(seq)
    scene.drafter.forget(seq)
    scene.drafter.forget(seq)
    assert not scene.engine.rows and scene.drafter.chances(seq, 3) == ()


@given(seed=st.integers(0, 2**32))
def test_drafts_follow_the_newest_token_of_every_stream(seed: int) -> None:
    """Tests drafts of any number of streams and accepted drafts, also after evictions of rows."""
    draw, scene = random.Random(seed), Scene()
    rows = [sequence(100 * number, draw.randrange(1, 60)) for number in range(1, 6)]
    for _ in range(20):
        some = draw.sample(rows, draw.randint(1, 3))
        depths = {row: draw.randint(1, 5) for row in some}
        for row in some:
            scene.drafter.follow(row)
        proposals = scene.drafter.drafts(depths)
        for row, drafts in proposals.items():
            newest = (row.ids or row.prompt)[-1]
            assert drafts == tuple(range(newest + 1, newest + 1 + depths[row]))[: SIZE - newest - 1]
            right = draw.randint(0, len(drafts))
            row.ids += [*drafts[:right], draw.randrange(1, SIZE - 10)]
        beside = draw.choice(rows)
        beside.ids += [draw.randrange(1, SIZE - 10)] * draw.randrange(3)
        if draw.random() < 0.2:
            scene.engine.make_room(1)
        if draw.random() < 0.2:
            scene.drafter.forget(draw.choice(rows))
