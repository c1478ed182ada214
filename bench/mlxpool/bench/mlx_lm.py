"""mlx-lm, used as its own server uses it: the peer of the engine.

It runs in this process with its BLAS, or in one of its own (`MlxLmProcess`, `AsInstalled`):

    python -m mlxpool.bench.mlx_lm FOLDER   # in: a job as JSON a line; out: mean seconds a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from mlxpool.bench.our_engine import UNLIMITED_TOKENS, Burst, burst, prompt

NAME = "mlx-lm"


def installed() -> bool:
    """Whether mlx-lm is installed."""
    return find_spec("mlx_lm") is not None


def loaded(folder: Path, *, as_stored: bool = False) -> Any:
    """The model; in float32 on a CPU, where that is faster for both, unless `as_stored`."""
    from mlx_lm.utils import load_model

    model: Any = load_model(folder)[0]
    if mx.default_device().type == mx.DeviceType.cpu and not as_stored:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


class MlxLm:
    """A model in this process, see `loaded`."""

    def __init__(self, folder: Path, *, as_stored: bool = False) -> None:
        self._model = loaded(folder, as_stored=as_stored)
        self._vocabulary = int(self._model.args.vocab_size)

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """See engine.Peer; for one row with both of mlx-lm's interfaces."""
        prompts = [prompt(n, self._vocabulary, number) for number, n in enumerate(lengths)]
        found = {"BatchGenerator": self._batch(prompts)}
        if len(prompts) == 1:
            found["generate_step"] = self._single(prompts[0])
        return {f"{NAME} {way}": partial(burst, step) for way, step in found.items()}

    def _batch(self, prompts: list[list[int]]) -> Callable[[], object]:
        from mlx_lm.generate import BatchGenerator

        batch: Any = BatchGenerator(
            self._model, max_tokens=UNLIMITED_TOKENS, completion_batch_size=len(prompts)
        )
        batch.insert(prompts)
        while len(batch.next()[1]) < len(prompts):
            pass
        return partial(batch.next)

    def _single(self, ids: list[int]) -> Callable[[], object]:
        from mlx_lm.generate import generate_step

        tokens: Any = generate_step(mx.array(ids), self._model, max_tokens=UNLIMITED_TOKENS)
        next(tokens)
        return partial(next, tokens)

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """See engine.Peer."""
        from mlx_lm.generate import generate_step

        ids = mx.array(prompt(tokens, self._vocabulary))
        once = partial(generate_step, ids, self._model, max_tokens=1)
        return {f"{NAME} generate_step": partial(burst, lambda: next(iter(once())))}


class MlxLmProcess:
    """mlx-lm in a process of its own, so that neither side shares graphs and buffers."""

    NAME: ClassVar[str] = NAME

    def __init__(self, folder: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlxpool.bench.mlx_lm", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )
        weakref.finalize(self, _end, self._child)

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """See engine.Peer."""
        return {self.NAME: partial(self._burst, {"decode": list(lengths)})}

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """See engine.Peer."""
        return {self.NAME: partial(self._burst, {"prefill": tokens})}

    def _burst(self, job: Mapping[str, Any], steps: int) -> float:
        assert self._child.stdin is not None and self._child.stdout is not None
        print(json.dumps({**job, "steps": steps}), file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.NAME} ended by itself; see above")
        return float(answer)


class AsInstalled(MlxLmProcess):
    """Without preloaded OpenBLAS, in the dtype of the files."""

    NAME = f"{NAME} as installed"

    def environment(self) -> dict[str, str]:
        return {key: value for key, value in super().environment().items() if key != "LD_PRELOAD"}


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def main() -> None:
    """The child process of MlxLmProcess. A job that repeats continues its sequences.

    With more than one interface the faster one counts.
    """
    model = MlxLm(Path(sys.argv[1]), as_stored=True)
    begun: dict[str, Sequence[Burst]] = {}
    for line in sys.stdin:
        job = json.loads(line)
        steps = job.pop("steps")
        name = json.dumps(job)
        if name not in begun:
            ways = model.decodes(job["decode"]) if "decode" in job else None
            begun = {name: list((ways or model.prefills(job["prefill"])).values())}
        print(min(work(steps) for work in begun[name]), flush=True)


if __name__ == "__main__":
    main()
