"""Tests steps with drafts: how their rows get KV blocks, and which times are not measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import pytest
from msgspec.structs import replace

from support.constrained_answers import Answers, demo
from support.drafting import ClockedSpeculator, EagerSpeculator, OracleDrafter

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import Counting  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.common.protocol.resume import Facts  # noqa: E402
from mlxpool.worker.compute.generations import Generation, Generations  # noqa: E402
from mlxpool.worker.compute.messages import Admit  # noqa: E402
from mlxpool.worker.compute.progress import Progress  # noqa: E402
from mlxpool.worker.compute.steps import DeviceLost, Steps  # noqa: E402
from mlxpool.worker.engine.counting_engine import CountingEngine, piece  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.settings import EngineSettings  # noqa: E402
from mlxpool.worker.prompt.detokenizer import Detokenizer  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for  # noqa: E402
from mlxpool.worker.scheduling.scheduler import StepLimits  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.speculation.drafter import Drafts  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402

REPEATING = "a = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2"
FORCED = "yes, of course, and why not "  # the beginning of an answer
STEP, COPY = 0.01, 5.0  # seconds


class BoundedEngine(ModelEngine):
    """An engine that refuses passes which write beyond the blocks of a sequence."""

    def submit(self, spans: Many[Span]) -> bool:
        self.require_blocks(spans)
        return super().submit(spans)

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        self.require_blocks(spans)
        return super().forward(spans, built)

    def require_blocks(self, spans: Many[Span]) -> None:
        for span in spans:
            given = self.blocks.given(span.sequence)
            assert blocks_for(span.end) <= given, f"{span.end} tokens in {given} blocks"


def test_forced_tokens_get_their_blocks_before_others_check_drafts() -> None:
    """The passes in flight are collected before drafts are made.

    In this test they return forced tokens. A row needs a new block for these tokens before other
    rows check drafts.
    """
    settings = EngineSettings(layout="slabs", lookahead=True, blocks=32, prefix="off")
    engine = BoundedEngine(load(demo()[0]), demo()[1], settings)
    answers = {bytes([name] * 16): [1] * 60 for name in (1, 2)}
    drafter = OracleDrafter(answers, random.Random(1), engine.vocab_size)
    speculator = EagerSpeculator(drafter)
    speculator.waits = True
    batch = Answers(engine, speculator)
    drafting = batch.admit(1, prompt=REPEATING, temperature=0.0, ignore_eos=True)
    batch.step()
    format = {"type": "regex", "pattern": FORCED + "[a-z]{3,9}"}
    forced = batch.admit(2, prompt="x" * 9, temperature=0.0, format=format, max_tokens=40)
    # The prompt of `forced` and its first token just fit into its only block.
    forced.prompt = (*forced.prompt, *[5] * (KV_BLOCK_TOKENS - 3 - len(forced.prompt)))
    engine.blocks.give(forced, 1)
    while forced.awaited == 0:
        batch.step()
    assert not forced.ids and batch.steps.in_flight == 1
    speculator.waits = False
    batch.step()
    assert len(forced.ids) > 4 and engine.blocks.lacks_blocks(forced)
    assert batch.steps.in_flight == 0 and speculator.checks == 0
    batch.run()
    assert batch.answers[2].text.startswith(FORCED)
    assert speculator.checks > 0 and len(drafting.ids) == 60


class CopyingEngine(CountingEngine):
    """An engine that finds all but the last token of each prompt in a cache.

    Copying the found tokens takes COPY seconds.
    """

    def __init__(self, ahead: int, speculator: ClockedSpeculator) -> None:
        super().__init__(Counting(step_us=0, prefill_us=0, joint=8), 1000)
        self._ahead, self._speculator = ahead, speculator

    @property
    def limits(self) -> StepLimits:
        return replace(super().limits, ahead=self._ahead)

    def admit(self, seq: Sequence) -> None:
        super().admit(seq)
        seq.submitted = seq.length - 1
        self._speculator.now += COPY

    def submit(self, spans: Many[Span]) -> bool:
        self._speculator.now += STEP
        return super().submit(spans)


class LosingEngine(CopyingEngine):
    """An engine whose device may be lost."""

    works = True

    def device_works(self) -> bool:
        return self.works


class LosingDrafter(OracleDrafter):
    """Makes no drafts, but records the phase that is shown at each call of `drafts`.

    If `losing` is an engine, the call makes its device fail and raises an error.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__({}, random.Random(1), 256)
        self._progress = progress
        self.losing: LosingEngine | None = None
        self.phases: list[str] = []

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        self.phases.append(self._progress.phase)
        if self.losing is not None:
            self.losing.works = False
            raise RuntimeError("the device is gone")
        return {}


def test_a_device_that_is_lost_or_hangs_while_drafts_are_made_is_found() -> None:
    """Drafts are made in phase "decode", which has a time limit; a lost device is detected.

    The prompt of the only request is in the cache, so even its first step has drafts.
    """
    progress = Progress(lambda: None)
    progress.enter("idle")
    drafter = LosingDrafter(progress)
    engine = LosingEngine(0, ClockedSpeculator())
    generations = Generations(engine)
    steps = Steps(engine, generations, progress, EagerSpeculator(drafter))
    seq = Sequence(b"1" * 16, 1, tuple(b"prompt"), Options(), 1, 50)
    generations.add(Generation.begin(Admit(seq, Facts(), Detokenizer(piece, ()), 0.0), piece))
    engine.blocks.give(seq, 1)
    assert not steps.admit(seq)
    steps.run()
    assert drafter.phases == ["decode"]  # "idle" would have no time limit
    drafter.losing = engine
    count = len(seq.ids)
    with pytest.raises(DeviceLost, match="the device is gone") as lost:
        steps.run()
    assert lost.value.request is None and len(seq.ids) == count


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_copy_of_a_prefix_is_not_in_the_time_of_a_step(ahead: int) -> None:
    speculator = ClockedSpeculator()
    engine = CopyingEngine(ahead, speculator)
    generations = Generations(engine)
    steps = Steps(engine, generations, Progress(lambda: None), speculator)
    for name in range(3):
        seq = Sequence(bytes([name] * 16), 1, tuple(b"prompt"), Options(), name, 50)
        generations.add(Generation.begin(Admit(seq, Facts(), Detokenizer(piece, ()), 0.0), piece))
        assert not steps.admit(seq)
        for _ in range(5):
            steps.run()
    assert len(speculator.seconds) >= 10
    assert max(speculator.seconds) == pytest.approx(STEP)
