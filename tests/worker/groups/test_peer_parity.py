"""Two ranks, each a process that adds up by our kernels, draw the tokens of one device.

The kernels run on simulated GPUs with access to each other's memory. Everything else is MLX on the
CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.worker.kernels import device  # noqa: E402
from support.peer_ranks import NVLINK  # noqa: E402
from support.peer_tokens import tokens  # noqa: E402
from support.rank_pair import single  # noqa: E402
from support.simt import COMPILER  # noqa: E402
from support.worker_checkpoints import write_checkpoint  # noqa: E402


@pytest.mark.skipif(device.on_gpu(), reason="two ranks need two GPUs")
@pytest.mark.skipif(COMPILER is None, reason="a C++ compiler builds the simulated GPUs")
@pytest.mark.parametrize("nvlink", ["yes", "no"])
def test_they_draw_the_tokens_of_one_device(tmp_path: Path, nvlink: str) -> None:
    """As on a GPU, a pass may begin before rank 0 has read the tokens of the previous pass."""
    folder = write_checkpoint(tmp_path / "model")
    command = [sys.executable, "-m", "support.peer_tokens", str(folder)]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, NVLINK: nvlink},
        stdout=subprocess.PIPE,
        check=True,
    )
    report = json.loads(done.stdout)
    expected = {"peer_sum_lines"} if nvlink == "yes" else {"peer_sum", "peer_sum_large"}
    assert {kernel for kernel in report["kernels"] if kernel.startswith("peer_sum")} == expected
    whole = single(folder, lookahead=False)
    assert report["tokens"] == [tokens(whole)] * 2
    whole.close()
