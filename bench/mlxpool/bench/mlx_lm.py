"""mlx-lm in this process, as its own server uses it: the peer of the engine's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpool.bench.ours import FOR_EVER, prompt

NAME = "mlx-lm"


def installed() -> bool:
    """Whether there is such a peer here."""
    return find_spec("mlx_lm") is not None


class Theirs:
    """A loaded model; float32 on a CPU, where that is faster for both."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm.utils import load_model

        self._model: Any = load_model(folder)[0]
        if mx.default_device().type == mx.DeviceType.cpu:
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())
        self._vocabulary = int(self._model.args.vocab_size)

    def steps_by_name(self, lengths: Sequence[int]) -> Mapping[str, Callable[[], object]]:
        """A token for each row with every call; for one row in both of the ways there are."""
        prompts = [prompt(n, self._vocabulary, number) for number, n in enumerate(lengths)]
        found = {"BatchGenerator": self._batch(prompts)}
        if len(prompts) == 1:
            found["generate_step"] = self._single(prompts[0])
        return {f"{NAME} {way}": step for way, step in found.items()}

    def _batch(self, prompts: list[list[int]]) -> Callable[[], object]:
        from mlx_lm.generate import BatchGenerator

        batch: Any = BatchGenerator(
            self._model, max_tokens=FOR_EVER, completion_batch_size=len(prompts)
        )
        batch.insert(prompts)
        while len(batch.next()[1]) < len(prompts):
            pass
        return partial(batch.next)

    def _single(self, ids: list[int]) -> Callable[[], object]:
        from mlx_lm.generate import generate_step

        tokens: Any = generate_step(mx.array(ids), self._model, max_tokens=FOR_EVER)
        next(tokens)
        return partial(next, tokens)

    def prefills(self, tokens: int) -> Mapping[str, Callable[[], object]]:
        """A prompt up to its first token with every call."""
        from mlx_lm.generate import generate_step

        ids = mx.array(prompt(tokens, self._vocabulary))
        once = partial(generate_step, ids, self._model, max_tokens=1)
        return {f"{NAME} generate_step": lambda: next(iter(once()))}
