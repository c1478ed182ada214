"""Generates tokens on two ranks, one process each, with all-reduce kernels on simulated GPUs.

`python -m support.peer_tokens MODEL` prints JSON: the tokens without and with lookahead, and the
kernels that ran in rank 0. A process can join only one group, so this is a separate program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlxpool.common.options import Options
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.sequence import Sequence
from support.engine_steps import decode, drain, enter
from support.rank_pair import RankPair


def tokens(engine: Engine) -> list[list[int]]:
    """Returns greedy and sampled tokens after a long and a short prompt."""
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


def main(model: Path) -> None:
    """Prints the JSON that the module describes."""
    results: list[list[list[int]]] = []
    with RankPair(by_kernels=True) as pair:
        pair.kernels.clear()
        for ahead in (False, True):
            with pair.engine(model, lookahead=ahead) as group:
                results.append(tokens(group))
        print(json.dumps({"tokens": results, "kernels": sorted(pair.kernels)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
