"""A running compute thread of a worker; the test acts as the main thread."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import partial
from time import monotonic
from typing import Any

from mlxpool.common.config.schema import Counting, ModelConfig, WorkerConfig
from mlxpool.common.options import Options
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.compute.messages import Admit, Drop, Loaded, Outbound, StepDeltas
from mlxpool.worker.compute.model_source import ModelSource
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.thread import Compute
from mlxpool.worker.engine.counting_engine import CountingEngine, piece
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.scheduling.context_policy import ContextShift, kept_tokens
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.testing.faults import Faults
from mlxpool.worker.testing.faulty_engine import begin_with, open_source
from support.pool import PATIENCE


class ComputeHarness:
    """Runs the counting model, or the model that `source` opens."""

    def __init__(
        self,
        sequences: int = 8,
        *,
        release: bool = True,
        engine: type[CountingEngine] = CountingEngine,
        source: Callable[[ModelConfig], ModelSource] | None = None,
        **counting: Any,
    ) -> None:
        self.mail: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
        self.progress = Progress(lambda: None)
        model = ModelConfig(
            path="builtin:counting",
            context=100_000,
            sequences=sequences,
            counting=Counting(**{"step_us": 0, **counting}),
        )
        faults = Faults(model.counting)
        self.compute = Compute(
            WorkerConfig("", "counting/0", "", "counting", model),
            self.progress,
            self.mail.put,
            source or partial(open_source, faults=faults, counting=engine),
            begin_with(faults),
        )
        self.release = release
        self.compute.start()

    def next(self, kind: type[Any]) -> Any:
        mail = self.mail.get(timeout=PATIENCE)
        assert isinstance(mail, kind), mail
        return mail

    def ready(self) -> ComputeHarness:
        self.next(Opened)
        self.next(Loaded)
        return self

    def admit(
        self,
        name: int,
        prompt: str | Many[int] = "x",
        count: int = 5,
        left: float = math.inf,
        **options: Any,
    ) -> None:
        self.resume(name, [], prompt, count, left, **options)

    def resume(
        self,
        name: int,
        ids: list[int],
        prompt: str | Many[int] = "x",
        count: int = 5,
        left: float = math.inf,
        **options: Any,
    ) -> None:
        tokens = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
        shared, owner = options.pop("shared", False), options.pop("owner", "")
        chosen = Options.parse(options)
        sequence = Sequence(bytes([name] * 16), 1, tokens, chosen, name, count, ids, shared=shared)
        sequence.owner = owner
        if chosen.shift:  # `num_ctx` is the context
            keep = kept_tokens(chosen.num_keep, len(tokens), chosen.num_ctx)
            sequence.shift = ContextShift(chosen.num_ctx, keep)
            sequence.discarded = sequence.shift.discarded(len(tokens) + len(ids))
        text = Detokenizer(piece, sequence.options.stop)
        text.replay(ids)
        facts = Facts(prompt_tokens=len(prompt))
        now = monotonic()
        self.compute.send(Admit(sequence, facts, text, now, now + left))

    def drop(self, name: int) -> None:
        """Cancels the sequence of this number."""
        self.compute.send(Drop((bytes([name] * 16), 1)))

    def deltas(self) -> Iterator[Delta]:
        while True:
            yield from self.next(StepDeltas).deltas
            if self.release:
                self.compute.delta_queue.acknowledge()

    def until_ended(self, names: set[int]) -> dict[int, list[Delta]]:
        """Returns all deltas that arrive until these sequences have ended."""
        deltas_by_name: dict[int, list[Delta]] = {}
        left = set(names)
        for delta in self.deltas():
            deltas_by_name.setdefault(delta.id[0], []).append(delta)
            if delta.end is not None:
                left.discard(delta.id[0])
            if not left:
                return deltas_by_name
        raise AssertionError


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in unpack_ids(delta.ids)]


def end_of(deltas: list[Delta]) -> dict[str, Any]:
    assert [delta.end is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].end is not None
    return deltas[-1].end
