"""Measures the cost of TCP and CURVE: the same streams over ipc, plain tcp, and tcp with CURVE.

Two brokers run, one plain and one with keys. The transports take turns in each round, so that other
load of the machine affects all of them. The workers run `counting` without a pause and compute
nothing, so the time is that of transport, broker and Python client. `first answer` is the time of a
new client: connection, handshake and one request.
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
from support.secure_pool import COUNTING_MODEL, SecurePool

TCP = '[pool]\nfront = ["tcp://127.0.0.1:*"]\n'
MakeClient = Callable[[], Client]


def transports(plain: Pool, secure: SecurePool) -> Mapping[str, MakeClient]:
    """The clients to compare, by name of the transport; the first is the baseline."""
    endpoint = str(plain.ask("ps")["broker"]["endpoints"]["front"][0])
    return {
        "ipc": plain.client,
        "ipc, broker with keys": secure.client,
        "tcp, loopback": lambda: Client(endpoint=endpoint),
        "tcp with CURVE": lambda: secure.dial("alice"),
    }


def tokens_a_second(make: MakeClient, streams: int, tokens: int) -> float:
    """Of all streams together, from the first request to the end of the last stream."""
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


def first_answer_ms(make: MakeClient) -> float:
    """Create a client and cancel an unknown request id; the time until its answer."""
    began = time.perf_counter()
    with make() as client:
        assert client.cancel(bytes(16))["state"] == "unknown"
        return (time.perf_counter() - began) * 1000


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """{transport: {"tokens_s": …, "first_answer_ms": …}}, one value a round."""
    (folder / "plain").mkdir()
    (folder / "secure").mkdir()
    model = COUNTING_MODEL.format(0).replace("path =", f"sequences = {options.streams}\npath =")
    with (
        Pool(folder / "plain", TCP + model) as plain,
        SecurePool(folder / "secure", models=model) as secure,
    ):
        found = transports(plain, secure)
        figures: dict[str, dict[str, list[float]]] = {
            transport: {"tokens_s": [], "first_answer_ms": []} for transport in found
        }
        for number in range(options.rounds + 1):
            for transport, make in found.items():
                rate = tokens_a_second(make, options.streams, options.tokens)
                answer = statistics.median(first_answer_ms(make) for _ in range(5))
                if number:  # the first round warms up
                    figures[transport]["tokens_s"].append(rate)
                    figures[transport]["first_answer_ms"].append(answer)
    return figures


def table(figures: Mapping[str, Mapping[str, list[float]]]) -> str:
    """The table of figures; ratios are between the values of one round."""
    base = next(iter(figures.values()))["tokens_s"]
    rows = []
    for transport, values in figures.items():
        ratios = [a / b for a, b in zip(values["tokens_s"], base, strict=True)]
        rows.append(
            (
                transport,
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
    print(table(figures))
    report.save(options.json, {"curve": figures})


if __name__ == "__main__":
    main()
