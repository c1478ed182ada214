"""What tcp and CURVE cost: the same streams over ipc, over plain tcp, and over tcp with CURVE.

Two brokers stand side by side, one plain and one with keys; the ways take turns in each round, so
that what else the machine does falls on all of them. The workers are `counting` without a pause:
nothing is computed, so what is measured is the way of the tokens, broker and Python client
included. `first answer` is a new client's: connection, handshake, one question.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mlxpool.bench import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mlxpool.client import Client
from support.pool import Pool
from support.secure_pool import SLOW, SecurePool

TCP = '[pool]\nfront = ["tcp://127.0.0.1:*"]\n'
Make = Callable[[], Client]


def ways(plain: Pool, secure: SecurePool) -> Mapping[str, Make]:
    """How a client gets to its broker. The first is what the others are compared with."""
    endpoint = str(plain.ask("ps")["broker"]["endpoints"]["front"][0])
    return {
        "ipc": plain.client,
        "ipc, broker with keys": secure.client,
        "tcp, loopback": lambda: Client(endpoint=endpoint),
        "tcp with CURVE": lambda: secure.dial("alice"),
    }


def tokens_a_second(make: Make, streams: int, tokens: int) -> float:
    """Of all streams together, from the first sending to the last end."""
    with make() as client:
        client.generate("counting", "warm", max_tokens=1)
        began = time.perf_counter()
        running = [
            client.stream("counting", "x", max_tokens=tokens, seed=n, batch=True)
            for n in range(streams)
        ]
        got = sum(len(stream.read().ids) for stream in running)
        seconds = time.perf_counter() - began
    assert got == streams * tokens, f"{got} tokens of {streams * tokens}"
    return got / seconds


def first_answer_ms(make: Make) -> float:
    """A client is made, asks after an id that nobody has, and is told so."""
    began = time.perf_counter()
    with make() as client:
        assert client.cancel(bytes(16))["state"] == "unknown"
        return (time.perf_counter() - began) * 1000


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """{way: {"tokens_s": …, "first_answer_ms": …}}, one value a round."""
    (folder / "plain").mkdir()
    (folder / "secure").mkdir()
    model = SLOW.format(0).replace("path =", f"sequences = {options.streams}\npath =")
    with (
        Pool(folder / "plain", TCP + model) as plain,
        SecurePool(folder / "secure", models=model) as secure,
    ):
        found = ways(plain, secure)
        figures: dict[str, dict[str, list[float]]] = {
            way: {"tokens_s": [], "first_answer_ms": []} for way in found
        }
        for number in range(options.rounds + 1):
            for way, make in found.items():
                rate = tokens_a_second(make, options.streams, options.tokens)
                answer = statistics.median(first_answer_ms(make) for _ in range(5))
                if number:  # the first round warms up
                    figures[way]["tokens_s"].append(rate)
                    figures[way]["first_answer_ms"].append(answer)
    return figures


def shown(figures: Mapping[str, Mapping[str, list[float]]]) -> str:
    """The table; ratios are those within a round."""
    base = next(iter(figures.values()))["tokens_s"]
    rows = []
    for way, values in figures.items():
        ratios = [a / b for a, b in zip(values["tokens_s"], base, strict=True)]
        rows.append(
            (
                way,
                report.spread(values["tokens_s"], 0),
                report.spread(ratios, 2),
                report.spread(values["first_answer_ms"]),
            )
        )
    return report.table(("way", "tokens/s", "of ipc", "first answer, ms"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as folder:
        figures = measure(options, Path(folder))
    print(f"{report.versions()}\n{report.machine()}\n")
    print(shown(figures))
    report.save(options.json, {"curve": figures})


if __name__ == "__main__":
    main()
