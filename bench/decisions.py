"""Measures questions per second of `decide`: together in one call, and one call for each.

    python bench/decisions.py [--model builtin:demo] [--tokens 500 1800] [--questions 64]
                              [--rounds 5] [--out FOLDER]

One client of a pool asks the same questions about a text, by turns: all in one call, and one after
the other in calls of their own. The latter have the text read once, by the prefix cache, or each,
where that is off. A text is a new one in each turn, or one that was asked about before. Questions
have three choices and are short.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from mlxpool.bench import report
from mlxpool.bench.measurement import OURS, Figures, Measurement, in_turn
from mlxpool.bench.pools import serving
from mlxpool.broker.processes.blas import preload
from mlxpool.client import Client, Decision

OTHER = "one by one"
CHOICES = ["to the harbour", "to the market", "nowhere"]
SENTENCE = "The ship {} left the harbour at noon and its captain sold {} barrels at the market. "
CONFIG = """
[models.cached]
path = "{model}"
[models.uncached]
path = "{model}"
prefix_cache = "off"
"""
CLOSE = 1e-3  # between probabilities of one question alone and among others


class Bench:
    """Asks questions about texts of about `tokens` tokens, each text once."""

    def __init__(self, client: Client, tokens: int, questions: int) -> None:
        self._client = client
        self._numbers = count()
        self._asked: list[Any] = [(f"Where did ship {n} go?", CHOICES) for n in range(questions)]
        self._sentences = 1
        while (size := len(client.tokenize("cached", self.text()))) < tokens:
            self._sentences += max(1, self._sentences * (tokens - size) // (2 * size))
        self.size = size

    def text(self) -> str:
        """A text that nobody has asked about."""
        begin = next(self._numbers)
        return "".join(SENTENCE.format(begin + n, begin * 7 + n) for n in range(self._sentences))

    def together(self, model: str, text: str) -> list[Decision]:
        return self._client.decide_all(model, text, self._asked)

    def one_by_one(self, model: str, text: str) -> list[Decision]:
        return [self._client.decide_all(model, text, [one])[0] for one in self._asked]

    def rate(self, ask: Callable[[str], list[Decision]], *, known: bool = False) -> float:
        """Questions per second about a new text, or one that is `known` to the prefix cache."""
        text = self.text()
        if known:
            self._client.decide("cached", text)
        begin = time.perf_counter()
        found = ask(text)
        return len(found) / (time.perf_counter() - begin)

    def check(self) -> None:
        """Exits unless all ways give the same probabilities."""
        text = self.text()
        every = [self.together("cached", text), self.one_by_one("cached", text)]
        every.append(self.one_by_one("uncached", text))
        for answers in zip(*every, strict=True):
            for label, share in answers[0].probabilities.items():
                if any(abs(one.probabilities[label] - share) > CLOSE for one in answers):
                    raise SystemExit(f"the ways to ask differ: {answers}")

    def measured(self, rounds: int) -> list[Measurement]:
        together = partial(self.together, "cached")
        cached, uncached = (partial(self.one_by_one, name) for name in ("cached", "uncached"))
        kinds = (
            ("a new text, no prefix cache", uncached, False),
            ("a new text", cached, False),
            ("a known text", cached, True),
        )
        return [
            Measurement(
                f"{len(self._asked)} questions",
                f"{name} of {self.size} tokens",
                "questions/s",
                in_turn(
                    {
                        OURS: partial(self.rate, together, known=known),
                        OTHER: partial(self.rate, other, known=known),
                    },
                    rounds,
                ),
            )
            for name, other, known in kinds
        ]


def measured(options: argparse.Namespace) -> Figures:
    lines: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        with serving(run_dir, CONFIG.format(model=options.model)), Client(run_dir) as client:
            for tokens in options.tokens:
                bench = Bench(client, tokens, options.questions)
                bench.check()
                lines += bench.measured(options.rounds)
    texts = " ".join(map(str, options.tokens))
    return Figures(
        what="decisions",
        command=f"python bench/decisions.py --model {options.model} --tokens {texts}"
        f" --questions {options.questions} --rounds {options.rounds}",
        about="Short questions of three choices, through a broker and a worker, one client.",
        machine=report.machine(),
        date=report.today(),
        versions=report.versions(),
        lines=lines,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:demo", help="a folder or reference")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 1800], help="of a text")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a folder for decisions.json")
    options = parser.parse_args()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):  # as the worker has it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload()})
    figures = measured(options)
    print(report.markdown(figures))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        report.write(options.out / "decisions.json", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
