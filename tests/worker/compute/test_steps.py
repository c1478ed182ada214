"""Tests failing steps, alone or with a step in flight: which requests end or are read again.

The engine is the counting model, whose right tokens are known. The condition `fails` selects the
passes that raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import pairwise

import pytest
from msgspec.structs import replace

from mlxpool.common.config.schema import Counting
from mlxpool.common.options import Options
from mlxpool.common.progress import Block
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import MAX_FAILED_JOINT_STEPS, DeviceLost, Steps
from mlxpool.worker.engine.counting_engine import CountingEngine, piece, token_at
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence, SequenceFailed
from mlxpool.worker.scheduling.spans import Span
from support.counting_checker import expected_ids

Pass = tuple[Span, ...]
CHUNK = 20  # inputs of a pass


class PipelinedEngine(CountingEngine):
    """The counting engine with passes submitted ahead, some of which raise an error.

    `fails`: selects the passes that raise. `at`: the call that raises. `shares`: a failed pass
    loses the rows of all sequences, not only those in the pass.
    """

    def __init__(self, ahead: int, *, shares: bool = False) -> None:
        super().__init__(Counting(step_us=0, prefill_us=0, joint=8), 1000)
        self._ahead, self._shares = ahead, shares
        self.fails: Callable[[Pass], bool] = lambda spans: False
        self.at = "submit"
        self.spoils: set[Sequence] = set()  # sequences whose logits are not numbers
        self.works = True
        self.passes: list[Pass] = []
        self.lost_rows: set[Sequence] = set()

    @property
    def limits(self) -> StepLimits:
        return replace(super().limits, lines=CHUNK, ahead=self._ahead)

    def admit(self, seq: Sequence) -> None:
        assert seq.submitted == seq.awaited == 0 and seq not in self.rows
        super().admit(seq)

    def submit(self, spans: Many[Span]) -> bool:
        for span in spans:
            assert span.sequence in self.rows and span.start == span.sequence.submitted
            assert span.sequence not in self.lost_rows
        self.passes.append(tuple(spans))
        super().submit(spans)
        if self.at == "submit" and self.fails(self.passes[-1]):
            self._lose()
        return False

    def collect(self) -> StepResult:
        if self.at == "collect" and self.fails(self.flights[0]):
            self._lose()
        spoilt = [s.sequence for s in self.flights[0] if s.draws and s.sequence in self.spoils]
        result = super().collect()
        drawn = [token for token in result.drawn if token.sequence not in spoilt]
        return StepResult(drawn, [SequenceFailed(seq, "no numbers") for seq in spoilt])

    def _lose(self) -> None:
        inside = {span.sequence for spans in self.flights for span in spans}
        self.lost_rows |= set(self.rows) if self._shares else inside & set(self.rows)
        self.flights.clear()
        raise RuntimeError("unspecified launch failure")

    def lost(self, seq: Sequence) -> bool:
        return seq in self.lost_rows

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        self.lost_rows.discard(seq)
        self.flights = [
            tuple(span for span in spans if span.sequence is not seq) for spans in self.flights
        ]

    def device_works(self) -> bool:
        return self.works


class CompilingEngine(PipelinedEngine):
    """An engine whose `submit` claims to compile kernels for the passes numbered in `compiles`.

    `looks` has an entry for each call of `submit` or `collect`: the call, the number of the pass,
    and whether the worker's progress (`block`) showed a compilation at that time.
    """

    compiles: tuple[int, ...] = ()
    block: Block

    def __init__(self, ahead: int, *, shares: bool = False) -> None:
        super().__init__(ahead, shares=shares)
        self.looks: list[tuple[str, int, bool]] = []
        self._ended = 0

    def report_compiles(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def _look(self, call: str, number: int) -> None:
        self.looks.append((call, number, self.block.read().fresh))

    def submit(self, spans: Many[Span]) -> bool:
        number = len(self.passes)
        if fresh := number in self.compiles:
            self._tell()
        self._look("submit", number)
        super().submit(spans)
        return fresh

    def collect(self) -> StepResult:
        self._look("collect", self._ended)
        self._ended += 1
        return super().collect()


class DraftingEngine(PipelinedEngine):
    """An engine that gives two tokens of a row in each step, as if it had checked one draft."""

    def collect(self) -> StepResult:
        result = super().collect()
        drawn = []
        for first in result.drawn:
            seq = first.sequence
            second = token_at(seq.prompt, seq.seed, len(seq.ids) + 1, self.vocab_size)
            drawn += [first, SampledToken(seq, second)]
            seq.submitted += 1
        return StepResult(drawn, result.failed)


class Scene:
    """Steps over generations of the counting model, without thread, memory or clock."""

    def __init__(
        self,
        ahead: int = 0,
        *,
        shares: bool = False,
        engine: type[PipelinedEngine] = PipelinedEngine,
    ) -> None:
        self.engine = engine(ahead, shares=shares)
        self.generations = Generations(self.engine)
        self.progress = Progress(lambda: None)
        self.steps = Steps(self.engine, self.generations, self.progress)
        self.prompts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}  # reason or error code

    def admit(self, name: int, prompt: str = "x", count: int = 6) -> Sequence:
        ids = tuple(prompt.encode())
        seq = Sequence(bytes([name] * 16), 1, ids, Options(), name, count)
        admit = Admit(seq, Facts(prompt_tokens=len(ids)), Detokenizer(piece, ()), 0.0, math.inf)
        self.generations.add(Generation.begin(admit, piece))
        self.prompts[name], self.ids[name] = prompt, []
        return seq

    def step(self) -> None:
        """Performs one iteration of the compute loop: admits waiting sequences, runs a step."""
        for seq in self.generations.sequences():
            if seq.phase is Phase.WAITING:
                self._take(self.steps.admit(seq))
        self._take(self.steps.run())

    def run(self) -> None:
        """Runs iterations until every generation has ended and every pass is collected."""
        for _ in range(1000):
            if not self.generations:
                break
            self.step()
        assert not self.generations
        while self.steps.in_flight:
            self._take(self.steps.collect())
        assert not self.engine.rows and not self.engine.flights

    def cancel(self, seq: Sequence) -> None:
        self._take([self.generations.finish(self.generations.of(seq), "cancelled")])

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.id[0] not in self.ends
            self.ids[delta.id[0]] += unpack_ids(delta.ids)
            if delta.end is not None:
                self.ends[delta.id[0]] = str(delta.end.get("code") or delta.end["reason"])

    def complete(self, name: int, count: int = 6) -> bool:
        """Returns whether a stream has all its tokens, each once."""
        right = self.ids[name] == expected_ids(self.prompts[name], name, count)
        return right and self.ends[name] == "length"


def names(spans: Pass) -> list[int]:
    return [span.sequence.id[0] for span in spans]


def chunks(spans: Pass) -> list[int]:
    return [span.sequence.id[0] for span in spans if not span.decodes]


def reads(name: int) -> Callable[[Pass], bool]:
    """Returns the condition that a pass has a chunk of this sequence."""
    return lambda spans: name in chunks(spans)


def once(fails: Callable[[Pass], bool]) -> Callable[[Pass], bool]:
    """Returns a condition that is true only the first time that `fails` is true."""
    left = [True]

    def failing(spans: Pass) -> bool:
        hit = left[0] and fails(spans)
        left[0] = left[0] and not hit
        return hit

    return failing


AHEAD = pytest.mark.parametrize("ahead", [0, 1])
AT = pytest.mark.parametrize("at", ["submit", "collect"])


@AHEAD
def test_streams_of_many_lengths_get_their_tokens(ahead: int) -> None:
    scene = Scene(ahead)
    for name in range(1, 8):
        scene.admit(name, "p" * (11 * name), name)
    scene.run()
    assert all(scene.complete(name, name) for name in range(1, 8))
    assert all(sum(span.count for span in spans) <= CHUNK for spans in scene.engine.passes)


def test_a_step_is_submitted_while_the_one_before_is_computed() -> None:
    scene = Scene(ahead=1)
    scene.admit(1)
    scene.step()
    assert scene.steps.in_flight == 1 and scene.ids[1] == []
    scene.step()
    assert scene.steps.in_flight == 1 and len(scene.ids[1]) == 1
    scene.run()
    assert scene.complete(1)
    assert len(scene.engine.passes) == 6  # no pass for a token after the last


def looks(ahead: int, *compiles: int) -> list[tuple[str, int, bool]]:
    """Runs a stream of four tokens, and returns the `looks` of its CompilingEngine.

    `compiles`: the numbers of the passes that compile something.
    """
    scene = Scene(ahead, engine=CompilingEngine)
    assert isinstance(scene.engine, CompilingEngine)
    scene.engine.compiles, scene.engine.block = compiles, scene.progress.block
    scene.admit(1, count=4)
    scene.run()
    assert scene.complete(1, 4)
    return scene.engine.looks


def test_a_pass_that_compiles_is_shown_before_it_is_built() -> None:
    assert looks(0, 1) == [
        ("submit", 0, False),
        ("collect", 0, False),
        ("submit", 1, True),
        ("collect", 1, True),
        ("submit", 2, False),
        ("collect", 2, False),
        ("submit", 3, False),
        ("collect", 3, False),
    ]


def test_a_pass_that_compiles_behind_another_is_shown_until_it_ends() -> None:
    """The second pass is shown as compiling from its submission to its end.

    This includes the wait for the first pass, which may end while the second is still being built.
    """
    assert looks(1, 1) == [
        ("submit", 0, False),
        ("submit", 1, True),
        ("collect", 0, True),
        ("submit", 2, True),  # the second pass is awaited now
        ("collect", 1, True),
        ("submit", 3, False),
        ("collect", 2, False),
        ("collect", 3, False),
    ]


def test_a_pass_beside_which_another_was_compiled_is_no_measure() -> None:
    scene = Scene(ahead=1, engine=CompilingEngine)
    assert isinstance(scene.engine, CompilingEngine)
    scene.engine.compiles, scene.engine.block = (1,), scene.progress.block
    ended: list[bool] = []
    end = scene.progress.ended

    def noted(*, fresh: bool) -> None:
        ended.append(fresh)
        end(fresh=fresh)

    scene.progress.ended = noted  # type: ignore[method-assign]
    scene.admit(1, count=4)
    scene.run()
    assert ended == [True, True, False, False]


def test_the_progress_shows_the_oldest_step_in_flight() -> None:
    scene = Scene(ahead=1)
    scene.admit(1, "p" * 15)
    scene.step()
    scene.admit(2, "q" * 9)
    look = scene.progress.block.read()
    assert (look.phase, look.request, look.tokens) == ("prefill", bytes([1] * 16), 15)
    scene.step()  # collects the first pass; the second has a decode row and a chunk
    look = scene.progress.block.read()
    assert names(scene.engine.flights[0]) == [1, 2]
    assert (look.phase, look.request, look.tokens) == ("prefill", bytes([2] * 16), 10)
    scene.step()
    look = scene.progress.block.read()
    assert (look.phase, look.request, look.tokens) == ("decode", None, 0)
    scene.run()


@AHEAD
@AT
def test_a_prompt_that_fails_beside_others_is_read_again_alone_and_ends(
    ahead: int, at: str
) -> None:
    scene = Scene(ahead)
    scene.engine.at, scene.engine.fails = at, reads(3)
    for name in (1, 2):
        scene.admit(name, f"row {name}", 12)
    for _ in range(3):
        scene.step()
    for name in (3, 4, 5):
        scene.admit(name, f"prompt {name}")
    scene.run()
    assert scene.ends[3] == "internal" and scene.ids[3] == []
    assert scene.complete(1, 12) and scene.complete(2, 12)
    assert scene.complete(4) and scene.complete(5)
    failed = [spans for spans in scene.engine.passes if 3 in chunks(spans)]
    assert len(failed) == 2 and names(failed[1]) == [3]
    assert scene.progress.preemptions == 0


@AT
def test_a_step_fails_while_another_is_in_flight(at: str) -> None:
    """The rows of both steps are lost, and each prompt is read again alone.

    Only the faulty prompt ends its request.
    """
    scene = Scene(ahead=1)
    scene.engine.at, scene.engine.fails = at, reads(2)
    scene.admit(1, "p" * 18)
    scene.step()
    scene.admit(2, "bad")
    scene.admit(3, "q" * 7)
    scene.run()
    assert scene.complete(1) and scene.complete(3) and scene.ends[2] == "internal"
    first = next(n for n, spans in enumerate(scene.engine.passes) if 2 in chunks(spans))
    after = scene.engine.passes[first + 1 :]
    reading = [names(spans) for spans in after if chunks(spans)]
    if at == "submit":  # the chunk of request 1 was in flight
        assert [name for name in reading if len(name) > 1] == []
    assert [2] in reading


@AHEAD
def test_suspects_are_read_alone_and_not_twice_in_a_row_beside_streams(ahead: int) -> None:
    scene = Scene(ahead)
    scene.admit(1, count=60)
    scene.step()
    scene.engine.fails = once(lambda spans: len(chunks(spans)) == 3)
    for name in (2, 3, 4):
        scene.admit(name, "p" * 6, 30)
    scene.run()
    assert scene.complete(1, 60) and all(scene.complete(name, 30) for name in (2, 3, 4))
    first = next(n for n, spans in enumerate(scene.engine.passes) if len(chunks(spans)) == 3)
    later = scene.engine.passes[first + 1 :]
    alone = [n for n, spans in enumerate(later) if chunks(spans) and names(spans) != [1]]
    assert [names(later[n]) for n in alone] == [[2], [3], [4]]
    assert all(b - a > 1 for a, b in pairwise(alone))


@AHEAD
def test_nothing_is_in_flight_around_a_prompt_that_is_read_alone(ahead: int) -> None:
    scene = Scene(ahead)
    scene.admit(1, count=40)
    scene.step()
    scene.step()
    seq = scene.admit(2, "p" * 50)
    seq.read_alone = True
    while seq.submitted < 50:
        scene.step()
        if chunks(scene.engine.passes[-1]):
            assert scene.steps.in_flight == 0
    scene.run()
    assert scene.complete(1, 40) and scene.complete(2)


@AHEAD
@AT
def test_a_prompt_that_fails_alone_ends(ahead: int, at: str) -> None:
    """A prompt that fails in a pass of its own ends at once.

    Such failures do not count in MAX_FAILED_JOINT_STEPS: prompts may still be read together.
    """
    scene = Scene(ahead)
    scene.engine.at = at
    for name in range(1, MAX_FAILED_JOINT_STEPS + 2):
        scene.engine.fails = reads(name)
        scene.admit(name, "p" * 50).read_alone = name % 2 == 0
        scene.run()
        assert scene.ends[name] == "internal"
    assert (
        sum(1 for spans in scene.engine.passes if chunks(spans)) <= 2 * MAX_FAILED_JOINT_STEPS + 2
    )
    scene.engine.fails = lambda spans: False
    for name in (10, 11):
        scene.admit(name, "p" * 5)
    scene.step()
    assert chunks(scene.engine.passes[-1]) == [10, 11]
    scene.run()


@AHEAD
def test_failures_that_a_prompt_explains_do_not_end_joint_steps(ahead: int) -> None:
    scene = Scene(ahead)
    for name in range(1, 3 * MAX_FAILED_JOINT_STEPS, 2):
        scene.engine.fails = reads(name)
        scene.admit(name, "p" * 5)
        scene.admit(name + 1, "q" * 5)
        scene.run()
        assert scene.ends[name] == "internal" and scene.complete(name + 1)
    scene.engine.fails = lambda spans: False
    for name in (100, 101):
        scene.admit(name, "p" * 5)
    scene.step()
    assert chunks(scene.engine.passes[-1]) == [100, 101]


@AHEAD
def test_prompts_are_read_one_by_one_after_joint_failures_that_none_explains(ahead: int) -> None:
    scene = Scene(ahead)
    scene.engine.fails = lambda spans: len(chunks(spans)) > 1
    for turn in range(MAX_FAILED_JOINT_STEPS + 2):
        pair = 2 * turn + 1, 2 * turn + 2
        for name in pair:
            scene.admit(name, "p" * 5)
        scene.run()
        assert all(scene.complete(name) for name in pair)
    several = [spans for spans in scene.engine.passes if len(chunks(spans)) > 1]
    assert len(several) == MAX_FAILED_JOINT_STEPS


@AHEAD
@AT
def test_a_decode_step_that_fails_ends_its_rows_and_no_other(ahead: int, at: str) -> None:
    """The failure also loses the row of a prompt outside the step; the prompt is read again."""
    scene = Scene(ahead, shares=True)
    scene.engine.at = at
    for name in (1, 2):
        scene.admit(name, count=30)
    for _ in range(4):
        scene.step()
    waiting = scene.admit(3, "p" * 50)
    waiting.read_alone = True
    while waiting.submitted == 0:
        scene.step()
    assert waiting.submitted == CHUNK
    scene.engine.fails = once(lambda spans: not chunks(spans))
    scene.run()
    assert scene.ends[1] == scene.ends[2] == "internal"
    assert scene.ids[1] == expected_ids("x", 1, len(scene.ids[1]))
    assert scene.complete(3)
    starts = [s.start for spans in scene.engine.passes for s in spans if s.sequence is waiting]
    assert starts.count(0) == 2, "it was read again from its beginning"


def test_a_pass_in_flight_ends_with_the_step_of_one_that_is_refused() -> None:
    """If the engine refuses a span, the step fails, and the pass in flight is ended with it.

    Afterwards both streams get their own tokens.
    """

    class RefusingEngine(PipelinedEngine):
        def submit(self, spans: Many[Span]) -> bool:
            if self.fails(tuple(spans)):
                raise ValueError("a span that cannot be computed")
            return super().submit(spans)

    scene = Scene(ahead=1, engine=RefusingEngine)
    scene.admit(1, count=20)
    while len(scene.ids[1]) < 3:
        scene.step()
    scene.admit(2, "bad" * 4)
    scene.engine.fails = once(reads(2))
    while not scene.generations.sequences()[-1].read_alone:
        scene.step()
    assert len(scene.engine.flights) == scene.steps.in_flight == 0
    scene.run()
    assert scene.complete(1, 20) and scene.complete(2)


@AHEAD
def test_rows_that_a_failed_pass_lost_are_read_again(ahead: int) -> None:
    """Streams whose rows were not in the failed pass continue with the right tokens."""
    scene = Scene(ahead, shares=True)
    streams = [scene.admit(name, "s" * name, 25) for name in (1, 2)]
    for _ in range(5):
        scene.step()
    scene.admit(3, "bad" * 4).read_alone = True
    scene.engine.fails = reads(3)
    scene.run()
    assert scene.ends[3] == "internal"
    assert scene.complete(1, 25) and scene.complete(2, 25)
    for seq in streams:
        spans = [s for each in scene.engine.passes for s in each if s.sequence is seq]
        assert sum(span.start == 0 for span in spans) == 2


@AT
def test_a_prompt_that_was_cancelled_ends_no_stream_beside_it(at: str) -> None:
    """A cancelled prompt's chunk fails in flight; the streams beside it are read again."""
    scene = Scene(ahead=1)
    scene.admit(1, count=20)
    for _ in range(3):
        scene.step()
    bad = scene.admit(2, "p" * 60)
    scene.engine.at = at
    while not bad.submitted:
        scene.step()
    scene.cancel(bad)
    scene.engine.fails = once(lambda spans: True)
    scene.run()
    assert scene.complete(1, 20) and scene.ends[2] == "cancelled"


@AHEAD
def test_a_row_whose_logits_are_no_numbers_ends_alone(ahead: int) -> None:
    scene = Scene(ahead)
    first, second = (scene.admit(name, "p" * name, 9) for name in (1, 2))
    while len(scene.ids[1]) < 3:
        scene.step()
    scene.engine.spoils = {first}
    scene.run()
    assert scene.ends[1] == "internal" and scene.ids[1] == expected_ids("p", 1, len(scene.ids[1]))
    assert len(scene.ids[1]) in (3, 4) and scene.complete(2, 9)
    assert not second.read_alone


def test_tokens_in_flight_of_a_stream_that_left_are_dropped() -> None:
    scene = Scene(ahead=1)
    leaving = scene.admit(1, count=20)
    scene.admit(2, count=20)
    while len(scene.ids[1]) < 3:
        scene.step()
    scene.cancel(leaving)
    assert scene.steps.in_flight == 1
    scene.run()
    assert len(scene.ids[1]) == 3 and scene.complete(2, 20)


def lost(scene: Scene) -> DeviceLost:
    scene.engine.works = False
    with pytest.raises(DeviceLost) as caught:
        scene.run()
    assert not scene.ends
    assert scene.progress.block.read().request is None  # only the thread writes the charged request
    return caught.value


@AHEAD
@AT
def test_a_lost_device_is_charged_to_the_only_prompt_that_was_read(ahead: int, at: str) -> None:
    scene = Scene(ahead)
    scene.engine.at, scene.engine.fails = at, reads(2)
    scene.admit(1, count=500)
    scene.step()
    scene.step()
    scene.admit(2, "p" * 50)
    # With a decode step in flight, either step may have failed.
    assert lost(scene).request == (bytes([2] * 16) if not ahead or at == "collect" else None)


@AHEAD
def test_a_lost_device_is_charged_to_nobody_with_several_prompts_or_none(ahead: int) -> None:
    for fails in (lambda spans: len(chunks(spans)) == 2, lambda spans: not chunks(spans)):
        scene = Scene(ahead)
        scene.engine.fails = fails
        for name in (1, 2):
            scene.admit(name, "p" * 9)
        assert lost(scene).request is None


def test_a_failed_submission_leaves_nothing_in_the_progress() -> None:
    scene = Scene()
    scene.engine.fails = once(reads(1))
    scene.admit(1, "p" * 5)
    scene.step()
    look = scene.progress.block.read()
    assert (look.request, look.tokens, look.fresh) == (None, 0, False)
    assert scene.ends[1] == "internal"


def test_a_step_may_give_several_tokens_of_a_row() -> None:
    """The tokens after the end of a completion are dropped."""
    scene = Scene(engine=DraftingEngine)
    for name, count in ((1, 6), (2, 5), (3, 1)):
        scene.admit(name, "x" * name, count)
    scene.run()
    assert [scene.complete(name, count) for name, count in ((1, 6), (2, 5), (3, 1))] == [True] * 3
    assert len(scene.engine.passes) == 3
