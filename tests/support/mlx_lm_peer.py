"""Writes mlx-lm's answers to prompts, in a separate process.

Importing mlx-lm lowers RLIMIT_NOFILE, so the tests do not import it.

cd tests; python -m support.mlx_lm_peer  # lines {paths, prompts, steps} on stdin; writes peer.npz
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


def ask(job: Mapping[str, Any], program: str = "support.mlx_lm_peer") -> None:
    """Gives a job to a peer program, which is named by its module, and waits for its end.

    The program keeps running for later jobs, because its imports are slow, and ends with this
    process. Skips the test if mlx-lm is not installed.
    """
    import pytest

    error = _peer(program)(job)
    if "No module named 'mlx_lm'" in error:
        pytest.skip("mlx-lm is not installed")
    assert not error, error


@cache
def _peer(program: str) -> Callable[[Mapping[str, Any]], str]:
    """Starts a peer program; returns a function that runs a job in it and returns its error."""
    process = subprocess.Popen(
        [sys.executable, "-m", program],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    inbox, answers = process.stdin, process.stdout

    def end() -> None:
        inbox.close()  # closing stdin ends the program
        process.wait()
        answers.close()

    def do(job: Mapping[str, Any]) -> str:
        print(json.dumps(job), file=inbox, flush=True)
        answer = answers.readline()
        assert answer, f"{program} has ended"
        return str(json.loads(answer))

    atexit.register(end)
    return do


def serve(work: Callable[[Any], None]) -> None:
    """Does the jobs from stdin, one line of JSON per job; prints a job's error, or "", as JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of packages goes to stderr
    for line in sys.stdin:
        try:
            work(json.loads(line))
            error = ""
        except Exception:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


def write_answers(path: Path, model: Any, prompts: Sequence[Sequence[int]], steps: int) -> None:
    """Writes each prompt's perplexity, and the logits and ids of `steps` greedy steps."""
    import numpy as np

    answers = (_answer(model, prompt, steps) for prompt in prompts)
    logits, ids, perplexities = zip(*answers, strict=True)
    np.savez(
        path / "peer.npz",
        logits=np.stack(logits),
        ids=np.array(ids),
        perplexities=np.array(perplexities),
    )


def _answer(model: Any, prompt: Sequence[int], steps: int) -> tuple[Any, list[int], float]:
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    cache, ids, rows = make_prompt_cache(model), list[int](), []
    logits = model(mx.array([list(prompt)]), cache=cache)
    scores = np.array(logits[0, :-1].astype(mx.float32), dtype=np.float64)
    losses = np.logaddexp.reduce(scores, -1) - scores[range(len(prompt) - 1), prompt[1:]]
    for _ in range(steps):
        rows.append(np.array(logits[0, -1]))
        ids.append(int(mx.argmax(logits[0, -1]).item()))  # type: ignore[arg-type]
        logits = model(mx.array([[ids[-1]]]), cache=cache)
    return np.stack(rows), ids, float(np.exp(losses.mean())) if len(losses) else np.nan


def work(job: Any) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)  # MLX itself fails on other devices for some small heads
    for path in map(Path, job["paths"]):
        model: Any = load_model(path)[0]
        model.set_dtype(mx.float32)
        write_answers(path, model, job["prompts"], job["steps"])


if __name__ == "__main__":
    serve(work)
