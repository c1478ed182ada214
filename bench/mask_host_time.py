"""Measures the processor time that formats take in a step of the compute thread, without a model.

    python bench/mask_host_time.py [--rows 8 32 128] [--steps 200] [--rounds 5] [--done]

The steps and generations of a worker run on an engine that computes nothing: it draws a token that
the row's mask allows, and its own time is left out. Its vocabulary has as many tokens as Llama 3's.
Batches without a format, with one in all rows and with one in one row take turns. Printed are the
microseconds of a step, median (minimum - maximum) of the rounds: of the thread that runs the steps,
and of all threads. With `--done` the device has computed a pass when the next one begins, as where
the thread that runs the steps is what is waited for; otherwise it has not. `--forward-ms`: in which
a pass is handed over, with Python's lock free.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlxpool.bench import checkpoint, report
from mlxpool.bench.engine_stub import EngineStub
from mlxpool.bench.formats import FORMAT
from mlxpool.common.options import Options
from mlxpool.common.process import private_temp
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.__main__ import SWITCH_INTERVAL
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.constraints import masks
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.mask_table import only_token
from mlxpool.worker.constraints.vocabulary import load_vocabulary
from mlxpool.worker.engine.engine import Engine, StepResult
from mlxpool.worker.prompt.detokenizer import Detokenizer, WholeTexts
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.inspect import inspect

VOCABULARY = 128_256
RUN_LINES = 128  # of a compiled pass of a GPU, see StepLimits
WARM_UP = 40  # steps that are not measured
KINDS = ("none", "all", "one")


class DrawingEngine(EngineStub):
    """Draws tokens that masks allow; a pass is done at once, or when it is collected."""

    context = 1 << 20
    vocab_size = VOCABULARY
    eos = frozenset((VOCABULARY - 1,))
    prefix = disk = None
    limits = StepLimits(
        2048, pair_budget(2048), context, seconds=0.04, ahead=1, run_lines=RUN_LINES
    )

    def __init__(self, *, done: bool, forward_ms: float) -> None:
        super().__init__()
        self._done, self._forward = done, forward_ms / 1000
        self.encoded: dict[Any, Any] = {}
        self._random = np.random.default_rng(1)
        self._flights: deque[list[Sequence]] = deque()
        self._drawn: deque[list[SampledToken]] = deque()

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        built()
        began = time.thread_time()
        for span in spans:
            one = span.sequence
            one.submitted, one.awaited = span.start + span.count, one.awaited + span.draws
        self._flights.append([span.sequence for span in spans if span.draws])
        if self._forward:
            time.sleep(self._forward)
        self.spent += time.thread_time() - began
        return False

    def submit(self, spans: Many[Span]) -> bool:
        self.forward(spans)
        self.draw(RowMasks())
        return False

    def draw(self, masks: RowMasks) -> None:
        began = time.thread_time()
        self._drawn.append(
            [SampledToken(one, self._token(one, masks)) for one in self._flights[-1]]
        )
        self.spent += time.thread_time() - began

    def _token(self, one: Sequence, masks: RowMasks) -> int:
        line = masks.lines.get(one)
        if line is None:
            return int(self._random.integers(256, VOCABULARY - 2))
        token = only_token(line)
        if token is not None:
            return token
        assert masks.table is not None
        words = masks.table.masks[line]
        places = np.flatnonzero(words)
        place = int(self._random.choice(places))
        bits = [bit for bit in range(32) if int(words[place]) >> bit & 1]
        return 32 * place + int(self._random.choice(bits))

    def drawn(self) -> list[SampledToken] | None:
        return self._drawn[0] if self._done and self._drawn else None

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        self._flights[-1] = [one for one in self._flights[-1] if one is not seq]
        seq.awaited -= 1
        if again:
            seq.submitted -= 1

    def collect(self) -> StepResult:
        self._flights.popleft()
        drawn = self._drawn.popleft()
        for one in drawn:
            one.sequence.awaited -= 1
        return StepResult([one for one in drawn if one.sequence.phase is Phase.RUNNING], [])


class Bench:
    """The vocabulary and its grammars; runs batches."""

    def __init__(self, folder: Path) -> None:
        found = inspect(checkpoint.write(folder, "tiny", vocabulary=VOCABULARY))
        text = ChatTokenizer.from_folder(found)
        self.table = text.table(VOCABULARY)
        load = partial(load_vocabulary, text.source, self.table.pieces, found.eos_ids)
        self.compiler = Compiler(load, "", found.eos_ids, VOCABULARY)
        self.compiler.load()
        self.texts = WholeTexts(self.table.piece, self.table.pieces)

    def step_us(
        self, rows: int, steps: int, kind: str, *, done: bool, forward_ms: float
    ) -> tuple[float, float]:
        """Returns the microseconds of a step: of this thread, and of all."""
        engine = DrawingEngine(done=done, forward_ms=forward_ms)
        generations = Generations(cast("Engine", engine))
        run = Steps(cast("Engine", engine), generations, Progress(lambda: None))
        for number in range(rows):
            constrained = kind == "all" or (kind == "one" and not number)
            self._admit(number, generations, run, constrained=constrained)
        for _ in range(WARM_UP):
            run.run()
        gc.collect()
        before = time.thread_time() - engine.spent, time.process_time() - engine.spent
        for _ in range(steps):
            run.run()
        after = time.thread_time() - engine.spent, time.process_time() - engine.spent
        assert len(generations) == rows, "an answer has ended"
        generations.forget_all()
        here, every = (1e6 * (b - a) / steps for a, b in zip(before, after, strict=True))
        return here, every

    def _admit(
        self, number: int, generations: Generations, run: Steps, *, constrained: bool
    ) -> None:
        raw: dict[str, Any] = {"format": FORMAT} if constrained else {"ignore_eos": True}
        options = Options.parse({**raw, "seed": number})
        row = Sequence(number.to_bytes(16, "big"), 1, (5, 6, 7), options, number, 100_000)
        rule = self.compiler.constraint(FORMAT) if constrained else None
        text = Detokenizer(self.table.piece, (), self.texts)
        admit = Admit(row, Facts(), text, 0.0, constraint=rule)
        generations.add(Generation.begin(admit, self.table.piece))
        run.admit(row)


def main() -> int:
    """Print the figures as a table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--steps", type=int, default=200, help="of a batch that is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--done", action="store_true", help="passes are done when they are begun")
    parser.add_argument("--forward-ms", type=float, default=0.0, help="of handing a pass over")
    options = parser.parse_args()
    private_temp.use()
    sys.setswitchinterval(SWITCH_INTERVAL)
    masks.MAX_WAIT = 10.0  # however busy the machine is, each step has all rows
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "model")
    given = {"done": options.done, "forward_ms": options.forward_ms}
    lines = []
    for rows in options.rows:
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds):
            for kind in KINDS[:: 1 if number % 2 else -1]:
                found[kind].append(bench.step_us(rows, options.steps, kind, **given))
        for kind, every in found.items():
            columns = [report.spread([*one], 0) for one in zip(*every, strict=True)]
            more = statistics.median(
                one[0] - none[0] for one, none in zip(every, found["none"], strict=True)
            )
            lines.append((f"{rows} rows, format: {kind}", *columns, f"{more:.0f}"))
    print(report.machine())
    print(report.table(("us a step", "its thread", "all threads", "more than none"), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
