"""What a training run of demo-chat is, whatever library computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_chat.batches import Batch
from demo_chat.weights import Shape, Weights

DECAY, BETAS, CLIP = 0.02, (0.9, 0.95), 1.0  # of AdamW; norms have no decay


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run."""

    steps: int = 4500
    end: int = 0  # the run ends after this step; 0: after the last
    tokens: int = 3072  # of a step, padding included
    longest: int = 1000  # tokens of a conversation
    peak: float = 1.5e-3  # highest learning rate
    warmup: int = 60
    seed: int = 0

    @property
    def last(self) -> int:
        """The step after which the run ends."""
        return self.end or self.steps

    def rate(self, step: int) -> float:
        """The learning rate of a step from 1: linear warm-up, then half a cosine to zero."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.peak * (0.5 + 0.5 * math.cos(math.pi * done))


Watch = Callable[[int, float, Callable[[], Weights]], None]  # step, loss in nats, the weights
Train = Callable[[Weights, Shape, Plan, Iterator[Batch], Watch], Weights]
