"""One stream through broker and worker against the same engine called in-process, in pairs.

    python bench/end_to_end.py [--model FOLDER] [--tokens 400] [--rounds 7] [--json FILE]

Both sides generate the same greedy tokens from the same prompt, in turn, in one run. Tokens/s are
those of the whole call, from the request to the last token, prompt included; the prefix cache is
cold on both sides, because every round has another prompt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import report
from mlxpool.broker.blas import preload
from mlxpool.cli.ops import ask
from mlxpool.client import Client
from mlxpool.common.errors import BrokerLost

PROMPT = "# round {number}\nimport os\n\n\ndef walk(top):\n    "
GREEDY = {"temperature": 0, "ignore_eos": True}
START = 60.0  # seconds


@contextmanager
def pool(run_dir: Path, model: str) -> Iterator[None]:
    """A broker with one model, named `bench`."""
    command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(run_dir), "serve"]
    with (run_dir / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--model", f"bench={model}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_for(run_dir)
        yield
    finally:
        process.terminate()
        process.wait()


def _wait_for(run_dir: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        try:
            ask(run_dir, "ps")
        except BrokerLost:
            continue
        return
    raise SystemExit("the broker did not start; see broker.log in its run directory")


class InProcess:
    """The worker's engine, called straight from here."""

    def __init__(self, model: str) -> None:
        from mlxpool.common.config import ModelConfig
        from mlxpool.worker.catalogue import open_source

        source = open_source(ModelConfig(path=model, prefix_cache="single"))
        self.text = source.opened.text
        self.engine = source.load(lambda tensors, size: None)

    def generate(self, prompt: str, tokens: int) -> list[int]:
        from mlxpool.common.options import Options
        from mlxpool.worker.engine.sequence import Sequence as Job

        ids = tuple(self.text.encode(prompt))
        job = Job(b"", 0, ids, Options.parse(GREEDY), 0, tokens)
        self.engine.admit(job)
        while self.engine.prefill(job, self.engine.chunk):
            pass
        for _ in range(tokens):
            job.ids += [drawn.token for drawn in self.engine.decode([job])]
        self.engine.release(job)
        return job.ids


def measure(model: str, tokens: int, rounds: int, run_dir: Path) -> tuple[list[float], list[float]]:
    """Tokens/s of each round: in-process, end to end."""
    alone, through = [], []
    with pool(run_dir, model), Client(run_dir) as client:
        engine = InProcess(model)
        for number in range(-1, rounds):
            prompt = PROMPT.format(number=number)
            started = time.perf_counter()
            direct = engine.generate(prompt, tokens)
            middle = time.perf_counter()
            result = client.generate("bench", prompt, max_tokens=tokens, **GREEDY)
            ended = time.perf_counter()
            if list(result.ids) != direct:
                raise SystemExit("the two sides generated different tokens")
            if number >= 0:  # the round before the first warms both up
                alone.append(tokens / (middle - started))
                through.append(tokens / (ended - middle))
    return alone, through


def show(alone: Sequence[float], through: Sequence[float], tokens: int) -> float:
    """Print the table; returns the median of the paired ratios."""
    ratios = [b / a for a, b in zip(alone, through, strict=True)]
    print(f"{report.versions()}; {report.machine()}; OpenBLAS {'on' if preload() else 'absent'}")
    print(f"greedy, {tokens} tokens a call, {len(alone)} rounds: median (minimum - maximum)\n")
    head = ("engine in-process, tokens/s", "broker + worker + client, tokens/s", "ratio")
    print(
        report.table(
            head, [(report.spread(alone), report.spread(through), report.spread(ratios, 3))]
        )
    )
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:demo", help="folder (default: the embedded)")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):
        # The workers get OpenBLAS from their supervisor; this process has to start with it.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload()})
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as run_dir:
        alone, through = measure(options.model, options.tokens, options.rounds, Path(run_dir))
    ratio = show(alone, through, options.tokens)
    report.write(options.json, {"in_process": alone, "end_to_end": through, "ratio": ratio})


if __name__ == "__main__":
    main()
