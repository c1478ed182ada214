"""Writes mlx-lm's answers to prompts. Runs as its own process: importing it lowers RLIMIT_NOFILE.

cd tests; python -m support.mlx_lm_peer  # {paths, prompts, steps} on stdin; writes peer.npz
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def ask(job: Mapping[str, Any], program: str = "support.mlx_lm_peer") -> None:
    """Runs a peer program, given by its module; skips the test where mlx-lm is not installed."""
    import pytest

    done = subprocess.run(
        [sys.executable, "-m", program],
        cwd=Path(__file__).parents[1],
        input=json.dumps(job),
        text=True,
        capture_output=True,
    )
    if done.returncode and "No module named 'mlx_lm'" in done.stderr:
        pytest.skip("mlx-lm is not installed")
    assert done.returncode == 0, done.stderr


def write_answers(path: Path, model: Any, prompts: Sequence[Sequence[int]], steps: int) -> None:
    """Writes for each prompt the logits and ids of `steps` greedy steps."""
    import numpy as np

    logits, ids = zip(*(_answer(model, prompt, steps) for prompt in prompts), strict=True)
    np.savez(path / "peer.npz", logits=np.stack(logits), ids=np.array(ids))


def _answer(model: Any, prompt: Sequence[int], steps: int) -> tuple[Any, list[int]]:
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    cache, ids, rows = make_prompt_cache(model), list[int](), []
    logits = model(mx.array([list(prompt)]), cache=cache)
    for _ in range(steps):
        rows.append(np.array(logits[0, -1]))
        ids.append(int(mx.argmax(logits[0, -1]).item()))  # type: ignore[arg-type]
        logits = model(mx.array([[ids[-1]]]), cache=cache)
    return np.stack(rows), ids


def main() -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)  # MLX itself fails on other devices for some small heads
    job = json.load(sys.stdin)
    for path in map(Path, job["paths"]):
        model: Any = load_model(path)[0]
        model.set_dtype(mx.float32)
        write_answers(path, model, job["prompts"], job["steps"])


if __name__ == "__main__":
    main()
