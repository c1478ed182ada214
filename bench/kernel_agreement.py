"""Compares greedy tokens of our CUDA kernels with those of MLX's operations.

    python bench/kernel_agreement.py FOLDER [--steps 64] [--json FILE]

Rows of several lengths decode in one batch, in a process with our kernels and in one without. Both
compute in the dtype of the files, so their logits differ in the last bits. The margin is the
difference of the two greatest log-probabilities without our kernels, at the first token of a row
that differs. `mlxpool bench checkpoint` writes random weights of real shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlxpool.bench import report
from mlxpool.broker.processes.blas import preload
from mlxpool.common.process import private_temp

LENGTHS = (5, 40, 128, 200, 256, 300, 700, 1500)
COMPARED_LOGPROBS = 3  # of each token


def decode_rows(folder: Path, steps: int, *, kernels: bool) -> dict[str, Any]:
    """The tokens of each row with their greatest log-probabilities; for a process of its own."""
    from mlxpool.worker.kernels import kernel_builder

    if not kernels:  # before another module of kernels imports the name
        kernel_builder.kernel_works = lambda what, trial: False
    from mlxpool.bench.our_engine import decode, enter
    from mlxpool.common.options import Options
    from mlxpool.worker.engine.model_engine import ModelEngine
    from mlxpool.worker.scheduling.sequence import Sequence
    from mlxpool.worker.weights.inspect import inspect
    from mlxpool.worker.weights.load import load

    loaded = load(inspect(folder))
    context = min(loaded.folder.context, max(LENGTHS) + steps + 8)
    layout = None if kernels else "rows"
    engine = ModelEngine(loaded, layout=layout, context=context, max_sequences=len(LENGTHS))
    draw, options = (
        random.Random(1),
        {"temperature": 0, "logprobs": True, "top_logprobs": COMPARED_LOGPROBS},
    )
    settings = Options.parse({**options, "ignore_eos": True})
    vocabulary = loaded.folder.plan.vocab_size
    rows = []
    for seed, length in enumerate(LENGTHS):
        count = min(length, context - steps - 1)
        prompt = tuple(draw.randrange(vocabulary) for _ in range(count))
        rows.append(Sequence(b"", 0, prompt, settings, seed, steps))
        enter(engine, rows[-1])
    found: list[list[Any]] = [[] for _ in rows]
    for _ in range(steps):
        for one, line in zip(decode(engine, rows), found, strict=True):
            assert one.logprob is not None
            line.append((one.token, one.logprob.top))
    return {"layout": engine.layout, "rows": found}


def compare(ours: list[Any], plain: list[Any]) -> dict[str, Any]:
    """`firsts`: index and margin of the first difference of each row that has one.

    `median` and `most` are of the differences of log-probabilities up to there.
    """
    firsts, differences = [], []
    for one, other in zip(ours, plain, strict=True):
        for index, ((token, top), (wanted, exact)) in enumerate(zip(one, other, strict=True)):
            with_kernels, without = dict(top), dict(exact)
            differences += [
                abs(with_kernels[key] - without[key])
                for key in with_kernels.keys() & without.keys()
            ]
            if token != wanted:
                firsts.append((index, exact[0][1] - exact[1][1]))
                break
    return {
        "rows": len(ours),
        "firsts": firsts,
        "median": statistics.median(differences),
        "most": max(differences),
    }


def run_side(arguments: argparse.Namespace, side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, str(arguments.folder), "--steps", str(arguments.steps)]
    done = subprocess.run([*command, "--side", side], stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def table(figures: dict[str, Any]) -> str:
    head = ["rows", "differ", "first at, margin there", "log-probabilities apart, median", "most"]
    firsts = ", ".join(f"{index} {margin:.4f}" for index, margin in figures["firsts"]) or "-"
    distances = [f"{figures[key]:.4f}" for key in ("median", "most")]
    rows = [[str(figures["rows"]), str(len(figures["firsts"])), firsts, *distances]]
    return report.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("kernels", "plain"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    private_temp.use()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload()})
    if arguments.side:
        kernels = arguments.side == "kernels"
        json.dump(decode_rows(arguments.folder, arguments.steps, kernels=kernels), sys.stdout)
        return
    ours, plain = (run_side(arguments, side) for side in ("kernels", "plain"))
    figures = {**compare(ours["rows"], plain["rows"]), "layout": ours["layout"]}
    print(report.versions(), report.machine(), figures["layout"], sep="; ")
    print(table(figures))
    report.save(arguments.json, figures)


if __name__ == "__main__":
    main()
