"""One step of a model: a prefill chunk or one token for every running sequence.

On a GPU decode stays one step ahead: step n+1 is built from the tokens of step n before the host
has read them. A sequence that ends or leaves in between loses its token in flight, and its row is
trimmed to what the sequence really has. On the CPU there is nothing to hide, so no lookahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxpool.common.options import Options
from mlxpool.worker.attention.attention import AnyRow, Span, pairs_at_once
from mlxpool.worker.attention.layouts import Layout, layout_of, named
from mlxpool.worker.attention.row_cache import RowShape
from mlxpool.worker.engine import backend
from mlxpool.worker.engine.base import LEAST_BLOCKS, Chunk, RowEngine
from mlxpool.worker.engine.description import require_deterministic
from mlxpool.worker.engine.interface import Share
from mlxpool.worker.prefix import cache as prefix_cache
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prompt.tokenizer import Text
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import Company
from mlxpool.worker.sampling.draws import drawn, history, last
from mlxpool.worker.sampling.sampler import Sampled
from mlxpool.worker.scheduling.block_manager import BLOCK, blocks_of, transient
from mlxpool.worker.scheduling.scheduler import area_of
from mlxpool.worker.scheduling.sequence import Drawn, Sequence
from mlxpool.worker.weights.load import LoadedModel

CLEAR_EVERY = 256  # decode steps between two clearings of what was freed
EVERY_KIND = Options(
    min_p=0.01,
    repeat_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=True,
    top_logprobs=1,
)
WARM_UP = (64, 256)  # tokens of the chunks that are measured at load
GPU_WARM_UP = (256, 1024)  # more than those that are lines of one pass, see pool.CHUNKS


@dataclass(frozen=True, slots=True)
class _Flight:
    """Tokens that were drawn on the device: one line for each sequence.

    `lengths` are what each sequence has to have for its token to be its next.
    """

    lines: Mapping[Sequence, int]
    lengths: tuple[int, ...]
    sampled: Sampled

    def without(self, seq: Sequence) -> _Flight:
        """Its row is gone: should it come back, the next one does not have the token in flight."""
        lines = {one: line for one, line in self.lines.items() if one is not seq}
        return _Flight(lines, self.lengths, self.sampled)

    def of(self, rows: Many[Sequence]) -> dict[Sequence, int]:
        """The lines of those of `rows` whose next token is here."""
        lines, lengths = self.lines, self.lengths
        return {
            seq: line
            for seq in rows
            if (line := lines.get(seq)) is not None and lengths[line] == seq.length
        }


class ModelEngine(RowEngine[AnyRow]):
    """The Engine (engine/api.py) of a loaded model; lives in one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        text: Text | None = None,
        *,
        context: int | None = None,
        prefix: str = "tree",
        prefix_bytes: int = 0,
        lookahead: bool | None = None,
        layout: str | None = None,
        sequences: int = 8,
        limit: int = 0,
        blocks: int | None = None,
    ) -> None:
        """`context` bounds the model's own; `lookahead` None means: on a GPU; `layout` None means
        what is best here, see layouts.py.

        `limit` is what the process may take, in bytes, see back_end.limit_of; `blocks` None means:
        what it leaves. `prefix_bytes` 0: a quarter of what the weights leave of the limit.
        """
        folder = loaded.folder
        super().__init__(
            folder,
            text,
            weights=loaded.weight_bytes,
            context=context,
            prefix_bytes=prefix_bytes,
            sequences=sequences,
            limit=limit,
            blocks=blocks,
        )
        if loaded.deterministic:
            require_deterministic(folder, on_gpu=backend.on_gpu())
        self._loaded = loaded
        self._model = loaded.model
        shape = RowShape(folder.plan.caches, loaded.dtype, self.context, self.chunk)
        name, shape = named(layout, shape, exact=loaded.deterministic, on_gpu=backend.on_gpu())
        self._keep(shape)
        if layout is None and shape.whole and shape.windowed and not self._holds_a_context():
            # Rows keep no more of a window than it sees.
            name, shape = "rows", replace(shape, whole=False)
            self._keep(shape)
        area = area_of(self.chunk)
        self._area = area if loaded.deterministic else pairs_at_once(shape, area)
        self._asked = name, shape, prefix
        self._layout, self._prefix = self._laid_out()
        self.blocks = self._capacity()
        self._lookahead = backend.on_gpu() if lookahead is None else lookahead
        self._flight: _Flight | None = None
        self._entered: dict[Sequence, mx.array] = {}  # logits of those whose last token is computed
        self._company: tuple[list[Sequence], Company] | None = None
        self._steps = 0

    def _keep(self, shape: RowShape) -> None:
        self._block_bytes = BLOCK * max(shape.token_bytes, 1)
        self._per_row = shape.fixed_bytes

    def _holds_a_context(self) -> bool:
        return (self._fixed or self._room()) >= blocks_of(self.context)

    @property
    def layout(self) -> str:
        """See Engine.layout."""
        return self._layout.name

    def _laid_out(self, blocks: int | None = None) -> tuple[Layout, PrefixCache[AnyRow]]:
        """A pool gets `blocks`; None: what all sequences and prefixes need, if there is room."""
        name, shape, prefix = self._asked
        if blocks is None:
            prefixes = 0 if prefix == "off" else self._prefix_bytes // self._block_bytes
            most = self._sequences * blocks_of(self.context) + prefixes
            blocks = self._fixed if self._fixed is not None else min(most, self._room())
        layout = layout_of(
            name,
            shape,
            self._model,
            max(blocks, LEAST_BLOCKS),
            exact=self._loaded.deterministic,
            on_gpu=backend.on_gpu(),
        )
        return layout, prefix_cache.build(prefix, layout.store, self._prefix_bytes)

    def _compute(self, row: AnyRow, ids: list[int]) -> None:
        tokens = mx.array(ids, dtype=mx.int32)
        self._layout.forward([Span(row, len(ids))], tokens, logits=False)
        mx.eval(row.arrays())

    def _enter(self, seq: Sequence, row: AnyRow, ids: list[int]) -> bool:
        logits = self._layout.enter(row, mx.array(ids, dtype=mx.int32))
        if logits is None:
            return False
        mx.eval(logits, *row.arrays())
        self._entered[seq] = logits
        return True

    def joint(self, shares: Many[Share]) -> int:
        """See Engine.joint."""
        spans = []
        for seq, budget in shares[: self._layout.joins]:
            row = self._rows[seq]
            if seq.suspect or row.offset < seq.prefilled:
                break  # what fails, or is lost, is so for this one alone
            spans.append(Span(row, self._chunk(seq, budget).tokens))
        return max(1, self._layout.fitting(spans))

    def _prefilled(self, chunks: Many[Chunk[AnyRow]]) -> None:
        if len(chunks) < 2:
            super()._prefilled(chunks)
            return
        parts = [(one.row, one.seq.between(one.start, one.start + one.tokens)) for one in chunks]
        enter = [number for number, chunk in enumerate(chunks) if chunk.enters]
        logits = self._layout.enter_all(parts, enter)
        mx.eval(logits, *chunks[0].row.arrays())  # the pool's
        for line, number in enumerate(enter):
            self._entered[chunks[number].seq] = logits[line : line + 1]

    def decode(self, rows: Many[Sequence]) -> list[Drawn]:
        """See Engine.decode. Raises RowFailed when the logits of a row are no numbers."""
        with self._losing(rows):
            flights = self._flights(rows)
            self._flight = self._ahead(flights, rows) if self._lookahead else None
            for flight, _ in flights:
                mx.eval(*flight.sampled.arrays())
        self._clear_sometimes()
        found = [one for flight, lines in flights for one in drawn(flight.sampled, lines)]
        if len(flights) == 1:
            return found
        by_sequence = {one.sequence: one for one in found}
        return [by_sequence[seq] for seq in rows]

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        self._company = None
        self._entered.pop(seq, None)
        if self._flight is not None:
            self._flight = self._flight.without(seq)
        row = self._rows.get(seq)
        if row is not None:
            # A token in flight is nobody's. Of a preempted one that returns the last is drawn from
            # again, and a state that has it already could not be cut back then.
            row.trim(seq.length - 1 if self._layout.store.stateful else seq.length)
        super().release(seq)

    def _left(self) -> int:
        return self._layout.left(self._rows.values(), self.blocks * self._block_bytes)

    def warm_up(self, moved: Callable[[], None] = lambda: None) -> None:
        """See Engine.warm_up. Measures what a prefill chunk needs for a while, too."""
        sizes = [min(n, self.context - 3) for n in (GPU_WARM_UP if backend.on_gpu() else WARM_UP)]
        if backend.on_gpu():  # from there on MLX waits for what it has begun
            mx.set_memory_limit(self._limit)
        pooled = self._layout.holds_tree and self._fixed is None
        if pooled:  # a small one leaves room for what is measured
            self._lay_out_again(blocks_of(sizes[-1] + 3))
        small, large = map(self._measured, sizes)
        moved()
        self._transient = transient(small, large, self.chunk, self._area)
        if pooled:
            self._lay_out_again()
            self._require_some()
        self._warm(moved)
        self._layout.warm(self._sequences, self.context, moved)
        self._settle()

    def _lay_out_again(self, blocks: int | None = None) -> None:
        self._layout.close()
        mx.clear_cache()
        self._layout, self._prefix = self._laid_out(blocks)
        self.blocks = self._capacity()

    def _measured(self, size: int) -> tuple[int, int]:
        """The tokens of a chunk of `size`, and the bytes that it needs for a while."""
        seq = _trial(max(size, 1) + 2)  # the chunk is not its last
        row = self._rows[seq] = self._layout.store.new_row()
        self._layout.reserve(row, seq.length)  # what rows take is no transient
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self.prefill(seq, size)
        peak = mx.get_peak_memory() - before
        self._layout.store.release(self._rows.pop(seq))
        return size, peak

    def _warm(self, moved: Callable[[], None]) -> None:
        """A decode step of each width for which there is room, and one with every option."""
        room = self._layout.blocks if self._layout.holds_tree else self._sequences
        plain = [_trial(1) for _ in range(min(self._sequences, room))]
        for rows in ([_trial(1, EVERY_KIND)], plain):
            for seq in rows:
                self._rows[seq] = self._layout.store.new_row()
            for width in range(1, len(rows) + 1):
                self.decode(rows[:width])
                moved()
            for seq in rows:
                self._layout.store.release(self._rows.pop(seq))
            self._flight = None

    def _capacity(self) -> int:
        if self._fixed is not None:
            return self._fixed
        room = self._room(self._layout.spare)
        return min(room, self._layout.blocks) if self._layout.holds_tree else room

    def _too_little(self, spare: int = 0) -> str:
        return super()._too_little(self._layout.spare)

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return super().yields_cores and not self._loaded.deterministic

    def ahead(self) -> bool:
        """See Engine.ahead."""
        return self._flight is not None

    def close(self) -> None:
        """See Engine.close."""
        self._flight = None
        self._entered.clear()
        super().close()

    def _one_each(self, rows: Many[Sequence], ids: mx.array) -> mx.array:
        """Logits [R, vocabulary] of one token `ids` [R] for each row."""
        return self._layout.decode([self._rows[seq] for seq in rows], ids)

    @contextmanager
    def _losing(self, hit: Many[Sequence]) -> Iterator[None]:
        """A pass that fails half-way leaves nothing that could be read in what it wrote to.

        In some layouts that is every row: those that were not hit find their tokens gone.
        """
        try:
            yield
        except Exception:
            self._flight = None
            for seq in list(self._rows) if self._layout.together else hit:
                self._rows[seq].release()
                self._entered.pop(seq, None)
            if self._layout.together and self._layout.holds_tree:
                self._prefix.clear()
            self._layout.spoil()
            raise

    def _flights(self, rows: Many[Sequence]) -> list[tuple[_Flight, dict[Sequence, int]]]:
        """Where the next token of each row is drawn: in the step ahead, where it entered, else in
        a new step.
        """
        here = {} if self._flight is None else self._flight.of(rows)
        used = [(self._flight, here)] if self._flight is not None and here else []
        if len(here) == len(rows):
            return used
        entered = [seq for seq in rows if seq in self._entered and seq not in here]
        if entered:
            logits = mx.concatenate([self._entered.pop(seq) for seq in entered])
            used.append(_whole(self._draw(entered, logits, ahead=0)))
        fresh = [seq for seq in rows if seq not in here and seq not in entered]
        if fresh:
            used.append(_whole(self._step(fresh)))
        return used

    def _step(self, rows: Many[Sequence]) -> _Flight:
        """One step from what the host knows."""
        for seq in rows:
            self._rows[seq].trim(seq.length - 1)  # a token in flight that was never fetched
            assert self._rows[seq].offset == seq.length - 1, "decode before prefill was done"
        ids = mx.array([last(seq) for seq in rows], dtype=mx.int32)
        return self._draw(rows, self._one_each(rows, ids), ahead=0)

    def _ahead(
        self, flights: Many[tuple[_Flight, dict[Sequence, int]]], rows: Many[Sequence]
    ) -> _Flight | None:
        """The step after `flights`, started on the device; without rows that surely end."""
        going = {seq for seq in rows if self._goes_on(seq)}
        order: list[Sequence] = []
        parts: list[mx.array] = []
        for flight, lines in flights:
            here = [seq for seq in lines if seq in going]
            if here:
                order += here
                parts.append(_taken(flight.sampled.tokens, [lines[seq] for seq in here]))
        if not order:
            return None
        ids = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        logits = self._one_each(order, ids)
        ahead = self._draw(order, logits, ahead=1, pending=ids)
        mx.async_eval(*ahead.sampled.arrays())  # type: ignore[no-untyped-call]
        return ahead

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether a token may follow the one that is being drawn."""
        made = len(seq.ids) + 1
        return made < seq.max_tokens and len(seq.prompt) + made < self.context

    def _draw(
        self, rows: Many[Sequence], logits: mx.array, *, ahead: int, pending: mx.array | None = None
    ) -> _Flight:
        company = self._company_of(rows)
        positions = [len(seq.ids) + ahead for seq in rows] if company.draws else ()
        histories = list(map(history, rows)) if company.penalised else ()
        sampled = sampler.draw(logits, company, positions, histories, pending)
        lengths = tuple([seq.length + ahead for seq in rows])
        return _Flight(dict(zip(rows, range(len(rows)), strict=True)), lengths, sampled)

    def _company_of(self, rows: Many[Sequence]) -> Company:
        """The last one, as long as nobody came or left."""
        if self._company is None or self._company[0] != rows:
            options, seeds = [seq.options for seq in rows], [seq.seed for seq in rows]
            self._company = list(rows), Company(options, seeds, self.vocab_size)
        return self._company[1]

    def _clear_sometimes(self) -> None:
        """MLX's cache of free buffers, and on a CPU the C heap: some 4 ms.

        Passes that were forgotten leave holes in the heap; left there, these take in arrays of
        rows, which would have pages of their own else, and the heap grows for the next passes.
        """
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
            if not backend.on_gpu():
                backend.trim()


def _whole(flight: _Flight) -> tuple[_Flight, dict[Sequence, int]]:
    return flight, dict(flight.lines)


def _taken(tokens: mx.array, lines: list[int]) -> mx.array:
    """tokens [R] of these lines; as they are where these are all."""
    return tokens if lines == list(range(tokens.shape[0])) else tokens[mx.array(lines)]


def _trial(tokens: int, options: Options | None = None) -> Sequence:
    """A sequence nobody asked for."""
    return Sequence(b"", 0, (0,) * tokens, options or Options(), 0, 1)
