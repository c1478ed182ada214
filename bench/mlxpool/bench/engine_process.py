"""Runs the engines that ours is compared with, each in its own process.

They are mlx-lm, llama.cpp, and the engine of another checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlxpool.bench import llama_cpp, step_server
from mlxpool.bench.our_engine import GREEDY, Burst

ROOTS = ("broker", "worker", "common", "client", "gateway", "bench")  # folders of a checkout
HERE = Path(__file__).resolve().parents[3]  # this checkout
# A BLAS thread that waits for others uses processor time as well.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


class EngineProcess:
    """An engine in its own process, which obeys the protocol of step_server.

    `processor`: steps are timed in processor seconds instead of clock seconds, because other
    programs disturb processor time less.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        processor: bool = False,
    ) -> None:
        self._name, self._which = name, int(processor)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )
        weakref.finalize(self, _end, self._child)

    def decodes(
        self, lengths: Sequence[int], options: Mapping[str, Any] = GREEDY
    ) -> Mapping[str, Burst]:
        """Returns a function that times decode steps in the process, by the name of the engine.

        `lengths`: tokens of the prompts, one prompt per row. `options`: the sampling options.
        """
        job = {"decode": list(lengths), "options": dict(options)}
        return {self._name: partial(self._burst, job)}

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """Returns a function that times prefills of `tokens` tokens, by the name of the engine."""
        return {self._name: partial(self._burst, {"prefill": tokens})}

    def _burst(self, job: Mapping[str, Any], steps: int) -> float:
        """Returns the mean seconds of a step. Raises SystemExit if the process has ended."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; the next read shows it
            print(json.dumps({**job, "steps": steps}), file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._name} ended by itself; see above")
        return float(json.loads(answer)[self._which])


def of_checkout(name: str, checkout: Path, folder: Path, *, processor: bool) -> EngineProcess:
    """Starts the engine of a checkout with the model of a folder.

    Raises ValueError if `checkout` is not a checkout.
    """
    if not (checkout / "worker" / "mlxpool").is_dir():
        raise ValueError(f"{checkout} is not a checkout of mlxpool")
    # -S: an editable installation of this checkout would come before PYTHONPATH.
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    path = os.pathsep.join([*(str(checkout / root) for root in ROOTS), *packages])
    command = [sys.executable, "-S", "-P", str(step_server.__file__), str(folder.resolve())]
    environment = {**ONE_THREAD, **os.environ, "PYTHONPATH": path}
    return EngineProcess(name, command, environment, processor=processor)


def of_llama_cpp(python: Path, file: Path, *, processor: bool) -> EngineProcess:
    """Starts llama.cpp with a GGUF file; `python`: an interpreter that has llama-cpp-python.

    Raises ValueError if `file` is not a file.
    """
    if not file.is_file():
        raise ValueError(f"{file} is not a GGUF file, and llama.cpp reads nothing else")
    command = [str(python), "-P", "-m", str(llama_cpp.__name__), str(file)]
    path = str(Path(llama_cpp.__file__).parents[2])
    environment = {**ONE_THREAD, **os.environ, "PYTHONPATH": path}
    environment.pop("LD_PRELOAD", None)
    return EngineProcess(llama_cpp.NAME, command, environment, processor=processor)


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()
