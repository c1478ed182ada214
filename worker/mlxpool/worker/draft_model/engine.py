"""The engine of a draft model: a second engine of the compute thread, with memory of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import mlx.core as mx

from mlxpool.worker.attention.row_spans import Ids
from mlxpool.worker.draft_model.draws import DraftDraws
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.engine.layout_engine import NO_TOKEN
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.pass_spans import PassSpans
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.scheduling.memory_budget import MIN_BLOCKS
from mlxpool.worker.scheduling.memory_estimate import MAX_DRAFT_CONTEXT
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import Load
from mlxpool.worker.weights.load import LoadedModel

MAX_IN_FLIGHT = 2  # passes: the host's memory of a third is read when the first has ended


class DraftModelEngine(ModelEngine):
    """The DraftEngine of speculation/model_drafter.py; used by one thread.

    Each of `rows` rows may have MAX_DRAFT_CONTEXT tokens, or the context of the draft model.
    """

    def __init__(
        self, loaded: LoadedModel, text: TokenTable, *, rows: int, limit: int, batch: int = 0
    ) -> None:
        """`limit` bounds the bytes of the process, see ModelEngine."""
        context = min(loaded.folder.context, MAX_DRAFT_CONTEXT)
        super().__init__(
            loaded,
            text,
            context=context,
            prefix="off",
            lookahead=True,
            max_sequences=rows,
            limit=limit,
            blocks=max(MIN_BLOCKS, rows * blocks_for(context)),
            batch=batch,
        )
        self.max_rows = rows
        self._embedding_rows = loaded.folder.plan.embedding_rows
        self._draws = DraftDraws(self.vocab_size, self._upload)
        self._moved: Callable[[], None] = lambda: None

    def report(self, compiles: Callable[[], None], moved: Callable[[], None]) -> None:
        """See DraftEngine."""
        self.report_compiles(compiles)
        self._moved = moved

    def collect(self) -> StepResult:
        """See Engine.collect."""
        found = super().collect()
        self._moved()
        return found

    @property
    def held_bytes(self) -> int:
        """See DraftEngine."""
        rows = self.blocks.capacity * self._block_bytes + self.max_rows * self._row_bytes
        return self._weights + rows + self._activation_bytes + self._spare

    @property
    def used_bytes(self) -> int:
        """See DraftEngine."""
        return self._weights + sum(self._kv_bytes())

    @property
    def max_lines(self) -> int:
        """See DraftEngine."""
        return self.chunk

    def holds(self, seq: Sequence) -> bool:
        """See DraftEngine."""
        return seq in self._rows and not self.lost(seq)

    def rewind(self, seq: Sequence, count: int) -> bool:
        """See DraftEngine. What is known of the options of a batch stays."""
        self._rows[seq].trim(count)
        seq.submitted = count
        return True

    def read(self, spans: Many[Span]) -> None:
        """See DraftEngine."""
        self.step(spans)

    def propose(self, spans: Many[Span], count: int) -> Mapping[Sequence, Many[SampledToken]]:
        """See DraftEngine."""
        rows = [span.sequence for span in spans]
        found: dict[Sequence, list[SampledToken]] = {seq: [] for seq in rows}
        for number in range(count):
            if number:
                spans = [Span(seq, seq.submitted, 1, 1) for seq in rows]
            self.submit(spans)
            if self.in_flight == MAX_IN_FLIGHT or number == count - 1:
                self._take(found)
        while self.in_flight:
            self._take(found)
        return {seq: drawn for seq, drawn in found.items() if len(drawn) == count}

    def _take(self, found: Mapping[Sequence, list[SampledToken]]) -> None:
        for one in self.collect().drawn:
            found[one.sequence].append(one)

    def _inputs(self, wants: PassSpans) -> tuple[Ids, mx.array | None]:
        """As that of ModelEngine, with another token in place of one that has no embedding here.

        The model that is served may have more tokens, see opening.require_same_tokens.
        """
        ids, drawn = super()._inputs(wants)
        if isinstance(ids, list):
            ids = [one if one < self._embedding_rows else NO_TOKEN for one in ids]
        return ids, drawn

    def seconds(self, rows: int, lines: int) -> float:
        """See DraftEngine."""
        keys = rows * self.context // 2
        pairs = 0 if rows == lines else lines * self.context // 2
        return self.cost.seconds(Load(lines, keys, pairs, rows))

    def make_room(self, size: int) -> None:
        """See Engine.make_room. Rows are given up: they are read again when they are needed."""
        for seq in [*self._rows]:
            self.release(seq)

    def _clear_buffers(self, *, after_chunk: bool) -> None:
        """Leaves the buffers to the engine of the model, which clears them for both."""
