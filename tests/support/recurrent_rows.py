"""Requests for engines with recurrent states, in a random order of their steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from mlxpool.common.options import Options
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.scheduling.sequence import Sequence
from support.engine_steps import decode, read_chunk

STEPS = 12
MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 0},
    {"temperature": 0.8, "repeat_penalty": 1.5, "repeat_last_n": 5},
]


def prompt_of(size: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(salt).integers(0, 256, size).tolist())


def sequence(prompt: tuple[int, ...], restore_at: int = 0, **raw: Any) -> Sequence:
    options = Options(**{"temperature": 0.0, **raw})
    return Sequence(b"", 1, prompt, options, 11, STEPS, restore_at=restore_at)


class RandomWorkload:
    """Runs requests with shared prefixes in one engine, in a random order."""

    def __init__(self, engine: ModelEngine, seed: int) -> None:
        self.engine, self.draw = engine, random.Random(seed)
        self.waiting = [self._request(salt) for salt in range(10)]
        self.every = list(self.waiting)
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []

    def _request(self, salt: int) -> Sequence:
        trunk, branch = prompt_of(30), prompt_of(24, salt % 3 + 1)
        cut = self.draw.choice((9, 20, 30))
        prompt = (*trunk[:cut], *branch[: self.draw.randrange(1, 24)])
        return sequence(prompt, restore_at=self.draw.choice((0, 5, 20)), **MIXTURE[salt % 3])

    def step(self) -> None:
        act = self.draw.choice((self._admit, self._prefill, self._prefill, *[self._decode] * 4))
        act()
        if self.draw.random() < 0.15:
            self.draw.choice((self._preempt, self._cancel, self._shrink))()

    def _admit(self) -> None:
        if self.waiting and len(self.prefilling) + len(self.decoding) < 4:
            seq = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            self.engine.admit(seq)
            self.prefilling.append(seq)

    def _prefill(self) -> None:
        if self.prefilling:
            seq = self.draw.choice(self.prefilling)
            if not read_chunk(self.engine, seq, self.draw.choice((1, 5, 2048))):
                self.prefilling.remove(seq)
                self.decoding.append(seq)

    def _decode(self) -> None:
        unended = [seq for seq in self.decoding if len(seq.ids) < STEPS]
        decode(self.engine, [seq for seq in unended if self.draw.random() < 0.9])
        for seq in [seq for seq in self.decoding if len(seq.ids) == STEPS]:
            self.engine.release(seq)
            self.decoding.remove(seq)

    def _preempt(self) -> None:
        running = self.prefilling + self.decoding
        if running:
            self._back(seq := self.draw.choice(running))
            seq.preempt()

    def _cancel(self) -> None:
        """Cancels a request and resumes it with the tokens that it has."""
        running = self.prefilling + self.decoding
        if running:
            self._back(seq := self.draw.choice(running))
            seq.return_to_waiting()

    def _back(self, seq: Sequence) -> None:
        (self.prefilling if seq in self.prefilling else self.decoding).remove(seq)
        self.engine.release(seq)
        self.waiting.append(seq)

    def _shrink(self) -> None:
        self.engine.inspect().memory.shrink(self.draw.choice((1, 100)))
