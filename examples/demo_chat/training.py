"""The settings of a training run of demo-chat, with MLX or PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_chat.batches import Batch
from demo_chat.weights import Shape, Weights

DECAY, BETAS, CLIP = 0.02, (0.9, 0.95), 1.0  # weight decay of AdamW; norms have no decay


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a training run."""

    steps: int = 4500
    end: int = 0  # the last step of this run; 0: `steps`
    tokens: int = 3072  # tokens of a step, padding included
    longest: int = 1000  # the most tokens of a conversation
    peak: float = 1.5e-3  # highest learning rate
    warmup: int = 60
    seed: int = 0

    @property
    def last(self) -> int:
        """The number of the last step of the run."""
        return self.end or self.steps

    def rate(self, step: int) -> float:
        """Returns a step's learning rate, from step 1: linear warm-up, then half a cosine to 0."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.peak * (0.5 + 0.5 * math.cos(math.pi * done))


Watch = Callable[[int, float, Callable[[], Weights]], None]  # step, loss in nats, getter of weights
Train = Callable[[Weights, Shape, Plan, Iterator[Batch], Watch], Weights]
