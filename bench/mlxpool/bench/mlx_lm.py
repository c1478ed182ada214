"""mlx-lm, with which our engine is compared, called as its own server calls it.

MlxLm runs it in this process, with this process's BLAS. `in_process` runs it in its own process, by
this command:

    python -m mlxpool.bench.mlx_lm FOLDER   # answers as step_server does
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpool.bench.engine_process import EngineProcess
from mlxpool.bench.our_engine import UNLIMITED_TOKENS, Burst, burst, prompt
from mlxpool.bench.step_server import Step, private_output, serve

NAME = "mlx-lm"


def installed() -> bool:
    """Whether mlx-lm is installed."""
    return find_spec("mlx_lm") is not None


def loaded(folder: Path, *, as_stored: bool = False) -> Any:
    """Loads a model. On a CPU its weights become float32, which is faster, unless `as_stored`."""
    from mlx_lm.utils import load_model

    model: Any = load_model(folder)[0]
    if mx.default_device().type == mx.DeviceType.cpu and not as_stored:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


class MlxLm:
    """A model from the function `loaded`, which mlx-lm runs in this process."""

    def __init__(self, folder: Path, *, as_stored: bool = False) -> None:
        self._model = loaded(folder, as_stored=as_stored)
        self._vocabulary = int(self._model.args.vocab_size)

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """Returns functions that time decode steps, by the name of mlx-lm's interface.

        Both interfaces of mlx-lm decode a single prompt; only BatchGenerator decodes several
        prompts.
        """
        return {f"{NAME} {way}": partial(burst, step) for way, step in self.steps(lengths).items()}

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """Returns a function that times prefills of `tokens` tokens, by its interface's name."""
        return {f"{NAME} generate_step": partial(burst, self.prefill(tokens))}

    def steps(self, lengths: Sequence[int]) -> Mapping[str, Step]:
        """Returns functions that decode one token of each row, by the name of mlx-lm's interface.

        `lengths`: tokens of the prompts, one prompt per row.
        """
        prompts = [prompt(n, self._vocabulary, number) for number, n in enumerate(lengths)]
        ways = {"BatchGenerator": self._batch(prompts)}
        if len(prompts) == 1:
            ways["generate_step"] = self._single(prompts[0])
        return ways

    def prefill(self, tokens: int) -> Step:
        """Returns a function that prefills `tokens` random tokens and draws the first token."""
        from mlx_lm.generate import generate_step

        ids = mx.array(prompt(tokens, self._vocabulary))
        once = partial(generate_step, ids, self._model, max_tokens=1)
        return lambda: next(iter(once()))

    def _batch(self, prompts: list[list[int]]) -> Step:
        from mlx_lm.generate import BatchGenerator

        batch: Any = BatchGenerator(
            self._model, max_tokens=UNLIMITED_TOKENS, completion_batch_size=len(prompts)
        )
        batch.insert(prompts)
        while len(batch.next()[1]) < len(prompts):
            pass
        return partial(batch.next)

    def _single(self, ids: list[int]) -> Step:
        from mlx_lm.generate import generate_step

        tokens: Any = generate_step(mx.array(ids), self._model, max_tokens=UNLIMITED_TOKENS)
        next(tokens)
        return partial(next, tokens)


def in_process(folder: Path, *, as_installed: bool = False) -> EngineProcess:
    """Starts mlx-lm in its own process, so that it shares no graphs and buffers with our engine.

    `as_installed`: mlx-lm runs without the OpenBLAS that our engine loads.
    """
    left_out = "LD_PRELOAD" if as_installed else ""
    environment = {key: value for key, value in os.environ.items() if key != left_out}
    name = f"{NAME} as installed" if as_installed else NAME
    command = [sys.executable, "-P", "-m", "mlxpool.bench.mlx_lm", str(folder)]
    return EngineProcess(name, command, environment)


def main() -> None:
    """Runs the process that `in_process` starts: times steps as step_server does.

    The weights keep the type that they have in the files.
    """
    model = MlxLm(Path(sys.argv[1]), as_stored=True)

    def begin(job: Mapping[str, Any]) -> Sequence[Step]:
        if "prefill" in job:
            return [model.prefill(job["prefill"])]
        return [*model.steps(job["decode"]).values()]

    serve(begin, private_output(), mx.synchronize)


if __name__ == "__main__":
    main()
