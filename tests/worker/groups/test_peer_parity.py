"""Two ranks that add up by our kernels, each in a process, give the tokens of one device.

The kernels run on simulated GPUs that write each other's memory; all else is MLX on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine.engine import Engine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from support.engine_steps import decode, drain, enter  # noqa: E402
from support.rank_pair import RankPair, single  # noqa: E402
from support.worker_checkpoints import write_checkpoint  # noqa: E402

pytestmark = pytest.mark.skipif(device.on_gpu(), reason="two ranks need two GPUs")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    with RankPair(tmp_path_factory.mktemp("kernels")) as made:
        yield made


def tokens(engine: Engine) -> list[list[int]]:
    """Greedy and drawn tokens behind a long and a short prompt."""
    rows = []
    for number, size in enumerate((90, 5)):
        prompt = tuple((7 * number + 11 * n) % 250 for n in range(size))
        options: dict[str, Any] = {"ignore_eos": True, "temperature": float(number)}
        rows.append(Sequence(bytes([number]), 0, prompt, Options.parse(options), number, 40))
        enter(engine, rows[-1])
    decode(engine, rows, 5)
    for row in rows:
        engine.release(row)
    drain(engine)
    return [list(row.ids) for row in rows]


@pytest.mark.parametrize("ahead", [False, True])
def test_it_draws_the_tokens_of_one_device(pair: RankPair, tmp_path: Path, ahead: bool) -> None:
    """`ahead`: a pass begins before rank 0 has read the tokens of the last, as on a GPU."""
    folder = write_checkpoint(tmp_path)
    pair.kernels.clear()
    with pair.engine(folder, lookahead=ahead) as group:
        found = tokens(group)
    assert pair.kernels >= {"peer_sum", "peer_sum_large"}
    whole = single(folder, lookahead=ahead)
    assert found == tokens(whole)
    whole.close()
