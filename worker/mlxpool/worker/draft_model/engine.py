"""The engine of a draft model: the compute thread's second engine, with a fixed memory size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

from mlxpool.worker.draft_model.draws import DraftDraws
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.opening import Parts
from mlxpool.worker.engine.pipeline import Pipeline
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.scheduling.memory_budget import MIN_BLOCKS
from mlxpool.worker.scheduling.memory_estimate import MAX_DRAFT_CONTEXT
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import Load
from mlxpool.worker.weights.load import LoadedModel

MAX_IN_FLIGHT = 2  # the most passes in flight; fewer than shared_array.SETS


class DraftModelEngine:
    """The DraftEngine (see speculation/model_drafter.py) of a loaded model; used by one thread.

    Each of `rows` rows may have MAX_DRAFT_CONTEXT tokens, or the draft model's context if shorter.
    """

    def __init__(
        self, loaded: LoadedModel, text: TokenTable, *, rows: int, limit: int, batch: int = 0
    ) -> None:
        """`limit`, `batch`: the most bytes of the process, and the most tokens of a pass.

        See EngineSettings.
        """
        self.max_rows = rows
        self.context = min(loaded.folder.context, MAX_DRAFT_CONTEXT)
        self.engine = ModelEngine(
            loaded,
            text,
            EngineSettings(
                context=self.context,
                prefix="off",
                lookahead=True,
                max_sequences=rows,
                limit=limit,
                blocks=max(MIN_BLOCKS, rows * blocks_for(self.context)),
                batch=batch,
            ),
            make_pipeline=_pipeline_of,
        )
        self._moved: Callable[[], None] = lambda: None

    @property
    def no_drafts(self) -> str:
        """The reason why rows cannot remove wrong drafts; "" if they can."""
        return self.engine.no_drafts

    def report(self, compiles: Callable[[], None], moved: Callable[[], None]) -> None:
        """Sets functions to call before a compilation and after each pass; see DraftEngine."""
        self.engine.report_compiles(compiles)
        self._moved = moved

    @property
    def held_bytes(self) -> int:
        """The bytes reserved for weights, all KV rows and a step; see DraftEngine."""
        budget = self.engine.parts.memory.budget
        rows = self.engine.blocks.capacity * budget.block + self.max_rows * budget.row
        return budget.weights + rows + budget.step + budget.spare

    @property
    def used_bytes(self) -> int:
        """The allocated bytes of weights and KV rows; see DraftEngine."""
        memory = self.engine.parts.memory
        return memory.budget.weights + sum(memory.kv_bytes())

    @property
    def max_lines(self) -> int:
        """The most inputs of a pass; see DraftEngine."""
        return self.engine.limits.lines

    def admit(self, seq: Sequence) -> None:
        """Gives a sequence an empty KV row; see DraftEngine."""
        self.engine.admit(seq)

    def holds(self, seq: Sequence) -> bool:
        """Returns whether a sequence has a KV row; see DraftEngine."""
        return seq in self.engine.parts.memory.rows and not self.engine.lost(seq)

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Shortens a KV row to its first `count` inputs; see DraftEngine.

        Keeps the prepared options of the SamplingBatch, which Pipeline.rewind drops.
        """
        self.engine.parts.memory.rows[seq].trim(count)
        seq.submitted = count
        return True

    def release(self, seq: Sequence) -> None:
        """Frees the KV row of a sequence; see DraftEngine."""
        self.engine.release(seq)

    def read(self, spans: Many[Span]) -> None:
        """Computes a pass that draws nothing; see DraftEngine."""
        self.engine.submit(spans)
        self._collect()

    def propose(self, spans: Many[Span], count: int) -> Mapping[Sequence, Many[SampledToken]]:
        """Proposes the next `count` tokens for the sequence of each span, in `count` passes.

        See DraftEngine.
        """
        rows = [span.sequence for span in spans]
        proposed: dict[Sequence, list[SampledToken]] = {seq: [] for seq in rows}
        for number in range(count):
            if number:
                spans = [Span(seq, seq.submitted, 1, 1) for seq in rows]
            self.engine.submit(spans)
            if self.engine.in_flight == MAX_IN_FLIGHT or number == count - 1:
                self._take(proposed)
        while self.engine.in_flight:
            self._take(proposed)
        return {seq: drawn for seq, drawn in proposed.items() if len(drawn) == count}

    def _take(self, proposed: Mapping[Sequence, list[SampledToken]]) -> None:
        for token in self._collect():
            proposed[token.sequence].append(token)

    def _collect(self) -> list[SampledToken]:
        drawn = self.engine.collect().drawn
        self._moved()
        return drawn

    def seconds(self, rows: int, lines: int) -> float:
        """Predicts the seconds of a pass of `rows` KV rows and `lines` inputs, from the warm-up.

        See DraftEngine.
        """
        keys = rows * self.context // 2
        pairs = 0 if rows == lines else lines * self.context // 2
        return self.engine.cost.seconds(Load(lines, keys, pairs, rows))

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Computes a pass of each compiled size once; see DraftEngine."""
        self.engine.warm_up(on_progress)

    def make_room(self, size: int) -> None:
        """Drops all KV rows, however small `size` is; see DraftEngine."""
        for seq in [*self.engine.parts.memory.rows]:
            self.engine.release(seq)

    def close(self) -> None:
        """Frees all KV rows and arrays; see DraftEngine."""
        self.engine.close()


def _pipeline_of(parts: Parts) -> Pipeline:
    """Makes the pipeline of a draft model.

    The vocabulary may be smaller than the served model's, see opening.require_same_tokens. The
    served model's engine clears the buffers of both engines.
    """
    return Pipeline(
        parts,
        draws=DraftDraws(parts.vocab_size, parts.upload),
        embedding_rows=parts.loaded.folder.plan.embedding_rows,
        clears_buffers=False,
    )
