"""One step of a model: a prefill chunk or one token for every running sequence.

On a GPU decode stays one step ahead: step n+1 is built from the tokens of step n before the host
has read them. A sequence that ends or leaves in between loses its token in flight, and its row is
trimmed to what the sequence really has. On the CPU there is nothing to hide, so no lookahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import psutil

from mlxpool.common.errors import Internal
from mlxpool.worker import prefix_cache, rules, sampler
from mlxpool.worker.attention import Span, Step
from mlxpool.worker.cache import Row, RowShape
from mlxpool.worker.engine_api import Memory
from mlxpool.worker.load import Loaded
from mlxpool.worker.prefix_cache import PrefixCache
from mlxpool.worker.prefix_kinds import Full
from mlxpool.worker.prefix_rows import RowStore
from mlxpool.worker.sampler import Draw, Sampled
from mlxpool.worker.sequence import Drawn, Logprob, Sequence
from mlxpool.worker.tokenizer import Text

CHUNK = 2048  # tokens
CLEAR_EVERY = 256  # decode steps between two clearings of MLX's cache of free buffers


@dataclass(frozen=True, slots=True)
class _Flight:
    """Tokens that were drawn on the device: one line for each sequence.

    `lengths` are what each sequence has to have for its token to be its next.
    """

    lines: Mapping[Sequence, int]
    lengths: tuple[int, ...]
    sampled: Sampled

    def line(self, seq: Sequence) -> int | None:
        """Where the next token of `seq` is, if it is here."""
        line = self.lines.get(seq)
        return line if line is not None and self.lengths[line] == seq.length else None

    def of(self, rows: Many[Sequence]) -> dict[Sequence, int]:
        """The lines of those of `rows` whose next token is here."""
        lines = ((seq, self.line(seq)) for seq in rows)
        return {seq: line for seq, line in lines if line is not None}


class ModelEngine:
    """The Engine (engine_api.py) of a loaded model; lives in one thread."""

    def __init__(
        self,
        loaded: Loaded,
        text: Text | None = None,
        *,
        context: int | None = None,
        prefix: str = "tree",
        prefix_bytes: int = 0,
        lookahead: bool | None = None,
    ) -> None:
        """`context` bounds the model's own; `lookahead` None means: on a GPU.

        `prefix_bytes` 0: a quarter of what the weights leave of the machine's memory.
        """
        folder, plan = loaded.folder, loaded.folder.plan
        self.context = min(folder.context, context or folder.context)
        self.vocab_size = plan.vocab_size
        self.eos = folder.eos_ids
        self.chunk = min(CHUNK, self.context)
        self.digest = rules.digest_of(folder.digest)
        self._loaded = loaded
        self._model = loaded.model
        self._text = text or Text.from_folder(folder)
        shape = RowShape(plan.layers, plan.kv_heads, plan.head_dim, loaded.dtype, self.context)
        store = RowStore(partial(Row, shape), [Full(layer) for layer in range(plan.layers)])
        machine = int(psutil.virtual_memory().total)
        budget = prefix_bytes or prefix_cache.default_budget(machine, loaded.weight_bytes)
        self._prefix: PrefixCache[Row] = prefix_cache.build(prefix, store, budget)
        self._rows: dict[Sequence, Row] = {}
        self._lookahead = _on_gpu() if lookahead is None else lookahead
        self._flight: _Flight | None = None
        self._steps = 0

    def admit(self, seq: Sequence) -> None:
        """See Engine.admit."""
        self._rows[seq], seq.cached = self._prefix.begin(seq.tokens)
        seq.prefilled = seq.cached

    def prefill(self, seq: Sequence, budget: int) -> int:
        """See Engine.prefill; what is done survives a later failure."""
        count = min(budget, self.chunk, seq.length - 1 - seq.prefilled)
        if count <= 0:
            return 0
        row = self._rows[seq]
        ids = seq.tokens[seq.prefilled : seq.prefilled + count]
        self._forward([Span(row, count)], mx.array(ids, dtype=mx.int32), logits=False)
        mx.eval(row.arrays())
        seq.prefilled += count
        mx.clear_cache()
        return count

    def decode(self, rows: Many[Sequence]) -> list[Drawn]:
        """See Engine.decode. Raises Internal when the logits of a row are no numbers."""
        flights = self._flights(rows)
        self._flight = self._ahead(flights, rows) if self._lookahead else None
        self._clear_sometimes()
        drawn = {line.sequence: line for flight in flights for line in _read(flight, rows)}
        return [drawn[seq] for seq in rows]

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        row = self._rows.pop(seq, None)
        if row is not None:
            self._prefix.close(row, seq.tokens)

    def memory(self) -> Memory:
        """See Engine.memory."""
        return Memory(
            weights=self._loaded.weight_bytes,
            kv=sum(row.nbytes for row in self._rows.values()),
            prefix=self._prefix.nbytes,
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
        )

    def shrink(self) -> int:
        """Gives up the prefix cache; returns the bytes it had."""
        freed = self._prefix.clear()
        mx.clear_cache()
        return freed

    @property
    def prefix(self) -> PrefixCache[Row]:
        """The prefix cache, for its counters."""
        return self._prefix

    def piece(self, token: int) -> bytes:
        """See Engine.piece."""
        return self._text.piece(token)

    def close(self) -> None:
        """See Engine.close."""
        self._flight = None
        self._rows.clear()
        self._prefix.clear()
        mx.synchronize()
        mx.clear_cache()

    def _forward(self, spans: Many[Span], ids: mx.array, *, logits: bool) -> mx.array:
        """Builds one pass; rows are longer from here on, though nothing is computed yet."""
        step = Step(spans, logits=logits)
        out = self._model(ids, step)
        step.done()
        return out

    def _flights(self, rows: Many[Sequence]) -> list[_Flight]:
        """Where the next token of each row is drawn: in the step ahead, else in a new one."""
        ahead = self._flight
        fresh = [seq for seq in rows if ahead is None or ahead.line(seq) is None]
        used = [ahead] if ahead is not None and len(fresh) < len(rows) else []
        return [*used, self._step(fresh)] if fresh else used

    def _step(self, rows: Many[Sequence]) -> _Flight:
        """One step from what the host knows."""
        for seq in rows:
            self._rows[seq].trim(seq.length - 1)  # a token in flight that was never fetched
            assert self._rows[seq].offset == seq.length - 1, "decode before prefill was done"
        ids = mx.array([_last(seq) for seq in rows], dtype=mx.int32)
        logits = self._forward([Span(self._rows[seq], 1) for seq in rows], ids, logits=True)
        return self._draw(rows, logits, ahead=0)

    def _ahead(self, flights: Many[_Flight], rows: Many[Sequence]) -> _Flight | None:
        """The step after `flights`, started on the device; without rows that surely end."""
        going = [seq for seq in rows if self._goes_on(seq)]
        order: list[Sequence] = []
        parts: list[mx.array] = []
        for flight in flights:
            here = flight.of(going)
            order += here
            if here:
                parts.append(flight.sampled.tokens[mx.array(list(here.values()))])
        if not order:
            return None
        ids = mx.concatenate(parts)
        logits = self._forward([Span(self._rows[seq], 1) for seq in order], ids, logits=True)
        ahead = self._draw(order, logits, ahead=1, pending=ids)
        mx.async_eval(*ahead.sampled.arrays())  # type: ignore[no-untyped-call]
        return ahead

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether a token may follow the one that is being drawn."""
        return seq.length + 1 < self.context and len(seq.ids) + 1 < seq.max_tokens

    def _draw(
        self, rows: Many[Sequence], logits: mx.array, *, ahead: int, pending: mx.array | None = None
    ) -> _Flight:
        sampled = sampler.sample(logits, [_draw_of(seq, ahead) for seq in rows], pending)
        lines = {seq: line for line, seq in enumerate(rows)}
        return _Flight(lines, tuple(seq.length + ahead for seq in rows), sampled)

    def _clear_sometimes(self) -> None:
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _last(seq: Sequence) -> int:
    return seq.ids[-1] if seq.ids else seq.prompt[-1]


def _draw_of(seq: Sequence, ahead: int) -> Draw:
    """`ahead` tokens are drawn and not yet in `seq.ids`."""
    history = seq.tokens if sampler.has_penalties(seq.options) else ()
    return Draw(seq.options, seq.seed, len(seq.ids) + ahead, history)


def _read(flight: _Flight, rows: Many[Sequence]) -> list[Drawn]:
    """Waits for the step and reads the lines of `rows`."""
    sampled = flight.sampled
    mx.eval(*sampled.arrays())
    tokens: list[int] = sampled.tokens.tolist()  # type: ignore[assignment]
    here = flight.of(rows)
    for seq, line in here.items():
        if tokens[line] == sampler.NOT_A_TOKEN:
            raise Internal(
                f"the logits after {seq.length} tokens are no numbers: "
                "the weights are damaged or overflow in their dtype"
            )
    return [Drawn(seq, tokens[line], _logprob(sampled, seq, line)) for seq, line in here.items()]


def _logprob(sampled: Sampled, seq: Sequence, line: int) -> Logprob | None:
    if not seq.options.logprobs or sampled.logprobs is None:
        return None
    chosen = float(sampled.logprobs[line].item())  # type: ignore[arg-type]
    wanted = seq.options.top_logprobs
    if not wanted or sampled.top_ids is None or sampled.top_logprobs is None:
        return Logprob(chosen)
    ids: list[int] = sampled.top_ids[line].tolist()  # type: ignore[assignment]
    values: list[float] = sampled.top_logprobs[line].tolist()  # type: ignore[assignment]
    return Logprob(chosen, tuple(zip(ids, values, strict=True))[:wanted])
