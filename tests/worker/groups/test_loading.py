"""A rank loads its part of the weights and never holds the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from support.worker_checkpoints import write_checkpoint

# Prints the peak memory of loading one rank's part, in KiB; `sys.argv[2]` is the number of ranks.
PEAK = """
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx

from mlxpool.worker.groups.divisions import part_of
from mlxpool.worker.groups.part_layers import PartLayerBuilder
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load

def peak():
    return int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1])

folder, ranks = inspect(Path(sys.argv[1])), int(sys.argv[2])
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
before = peak()
if ranks == 1:
    loaded = load(folder)
else:
    part = part_of(folder, ranks - 1, ranks)
    builder = partial(PartLayerBuilder, part, SimpleNamespace())
    loaded = load(part.folder, cuts=part.cuts, make_builder=builder)
print(peak() - before, loaded.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_of_a_rank_is_its_part(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=6144,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    whole_peak, whole = _peak(folder, 1)
    peak, part = _peak(folder, 4)
    assert 0.24 < part / whole < 0.26
    assert whole < 1024 * whole_peak
    assert peak < 0.45 * whole_peak, "the part, a layer of it and a buffer"


def _peak(folder: Path, ranks: int) -> tuple[int, int]:
    """Returns the KiB that a load takes, and the bytes of the weights."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(ranks)],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, weights = process.stdout.split()
    return int(peak), int(weights)
