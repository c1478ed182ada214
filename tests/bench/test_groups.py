"""Measurements of groups: what they compute of times and tokens, and ranks that run on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.bench.groups.deaths import KINDS, Outcome, Watched, summary  # noqa: E402
from mlxpool.bench.groups.engine import _agreement  # noqa: E402
from mlxpool.bench.groups.rank_processes import run_ranks  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402


def test_the_wait_of_a_stream_is_the_longest_since_the_fault() -> None:
    """What was under way when a rank was lost arrives at once, and ends no wait."""
    stream = Watched(0, times=[1.0, 2.0, 2.5, 9.0, 9.5])
    assert stream.wait_after(2.4) == 6.5
    assert stream.wait_after(3.0) == 6.0
    assert stream.wait_after(9.6) is None


def test_faults_vary_signal_moment_and_rank() -> None:
    assert len(set(KINDS)) == 8


def test_an_outcome_tells_moved_streams_from_wrong_ones() -> None:
    kind = KINDS[0]
    whole = Watched(0, times=[1.0, 1.1], text="1, 2.", attempts=1)
    moved = Watched(1, times=[1.0, 2.5, 2.6], text="1, 2.", attempts=2)
    lost = Watched(2, times=[1.0], text="1,", attempts=2)
    refused = Watched(3, error="Busy: no place")
    found = Outcome.of(kind, "bench/1", [whole, moved, lost, refused], "1, 2.", 1.5)
    assert (found.streams, found.moved, found.waits) == (4, 1, (1.0,))
    assert found.wrong == (f"{kind}: '1,'", f"{kind}: Busy: no place")
    assert str(found) == (
        "SIGKILL of rank 1 in prefill of bench/1: 2 of 4 streams are right, 1 were moved,"
        " longest wait 1.00 s"
    )


def test_a_summary_of_the_faults_so_far_counts_those_that_met_no_stream() -> None:
    met = Outcome(KINDS[0], "bench/0", 8, (), 2, (0.25, 0.5))
    missed = Outcome(KINDS[1], "bench/1", 8, (), 0, ())
    found = summary([met, missed, met])
    assert (found["faults"], found["met_no_stream"], found["streams"], found["moved"]) == (
        3,
        1,
        24,
        4,
    )
    assert found["longest_wait_s"] == {str(KINDS[0]): {"number": 4, "p50": 0.5, "max": 0.5}}
    assert summary([])["faults"] == 0


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    assert _agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5, 6]]) == "3 of 5"


@pytest.mark.skipif(device.on_gpu(), reason="two ranks need two GPUs")
def test_ranks_add_up_on_a_cpu() -> None:
    command = [sys.executable, "-m", "mlxpool.bench.groups.sums", "--rows", "1", "3"]
    sizes = ["--width", "8", "--chain", "2", "--rounds", "1"]
    found = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["1 x 8, 16 bytes", "3 x 8, 48 bytes"]
    assert all("ring" in line and "NOT" not in line for line in lines)


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for ever for a rank that ended before it joined."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    assert run_ranks("support.failing_rank", [], 3) == 7
