"""Measures running streams and first tokens while the worker prepares other requests.

    python bench/inter_token_gaps.py [--rounds 7] [--tokens 400] [--json FILE]

Eight streams of the embedded model decode in one worker, behind a broker. Meanwhile another process
has large texts tokenised, sends chats whose template never ends, or many small prompts. The gaps
are those between two deltas of a stream at its client; p99, in pairs with a quiet round. There are
two controls. One does not use the pool and loads the processor as the preparing processes may. The
other sends as many bytes as token ids, which need no tokenizer.

The second table is the time to the first token of a short request, alone and beside eight texts of
4 MiB that are tokenised, in pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mlxpool.bench import report
from mlxpool.client import Client
from mlxpool.common.errors import PoolError
from mlxpool.worker.preparation.fork_server import NICENESS
from mlxpool.worker.weights.locate import DEMO_FOLDER as DEMO
from peer_process import gaps_between, running

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.pool import Pool

ENDLESS_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CONFIG = '[models.m]\npath = "{path}"\nsequences = 12\nprefix_cache = "off"\n'
LARGE_PROMPT = 256 * 1024  # characters
LARGEST_PROMPT = 4 * 2**20 - 1024  # characters; a message holds 4 MiB
AT_ONCE = 8  # of the largest prompts
FIRST_TOKENS = 100  # short requests in a round
SMALL_INTERVAL = 60 / 10_000  # seconds between two small prompts
STREAMS = 8
PAUSE = 0.2  # seconds between two large prompts
GOAL = 1.2


def large_text(rng: random.Random, size: int = LARGE_PROMPT) -> str:
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(5000)]
    return " ".join(rng.choices(words, k=size // 4))[:size]


def large_texts(client: Client) -> None:
    """Calls of `tokenize`: a prompt that is too long for the context would not be tokenised."""
    text = large_text(random.Random(0))
    while True:
        client.tokenize("m", text)
        time.sleep(PAUSE)


def largest_texts(client: Client) -> None:
    text = large_text(random.Random(0), LARGEST_PROMPT)

    def tokenise() -> None:
        while True:
            with contextlib.suppress(PoolError):  # more ids than an answer holds
                client.tokenize("m", text)

    for _ in range(AT_ONCE - 1):
        threading.Thread(target=tokenise, daemon=True).start()
    tokenise()


def small_prompts(client: Client) -> None:
    """Calls of `tokenize`, so that no prompt is computed."""
    due = time.monotonic()
    while True:
        client.tokenize("m", "a small prompt of a few words")
        due += SMALL_INTERVAL
        time.sleep(max(0.0, due - time.monotonic()))


def large_ids(client: Client) -> None:
    """As many bytes as ids, which need no tokenizer: the cost of transport alone."""
    while True:
        with contextlib.suppress(PoolError):
            client.generate("m", tokens=[1] * (LARGE_PROMPT // 4), max_tokens=1)
        time.sleep(PAUSE)


def endless_templates(client: Client) -> None:
    while True:
        with contextlib.suppress(PoolError):
            client.generate("m", messages=[{"role": "user", "content": "x"}], max_tokens=1)


def busy_neighbour(client: Client) -> None:
    os.nice(NICENESS)
    while True:
        pass


PEERS: dict[str, Callable[[Client], None]] = {
    "control: a busy process of the same niceness": busy_neighbour,
    "control: 256 KiB of ids": large_ids,
    "texts of 256 KiB": large_texts,
    "eight texts of 4 MiB at once": largest_texts,
    "a template that never ends": endless_templates,
    "10,000 small prompts a minute": small_prompts,
}


def peer(name: str, run_dir: Path) -> AbstractContextManager[None]:
    return running(name, [sys.executable, __file__, "--play", name, "--run-dir", str(run_dir)])


def gaps_of(client: Client, tokens: int, number: int) -> list[float]:
    """Milliseconds between the deltas of one stream."""
    prompt = [number + 1] * 100
    with client.stream(
        "m", tokens=prompt, max_tokens=tokens, temperature=0, ignore_eos=True
    ) as stream:
        return gaps_between(stream)


def p99(client: Client, tokens: int) -> float:
    """The 99th percentile of the gaps of all streams, in milliseconds."""
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda n=n: found.extend(gaps_of(client, tokens, n)[10:]))
        for n in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.quantiles(found, n=100)[98]


def wait_until_idle(pool: Pool) -> None:
    """Wait for two beats of an idle worker: calls of a client that was killed go on for a while."""
    for _ in range(2):
        time.sleep(1.1)
        pool.in_state("m/0", phase="idle")


def first_token_p99(client: Client) -> float:
    """The 99th percentile of the time to the first token of short requests, in milliseconds."""
    found = []
    for _ in range(FIRST_TOKENS):
        start = time.perf_counter()
        with client.stream("m", "a short request", max_tokens=1) as stream:
            stream.read()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.quantiles(found, n=100)[98]


def measure_first_tokens(pool: Pool, rounds: int) -> dict[str, list[float]]:
    pairs = []
    with pool.client() as client:
        first_token_p99(client)
        for _ in range(rounds):
            wait_until_idle(pool)
            alone = first_token_p99(client)
            with peer("eight texts of 4 MiB at once", pool.run_dir):
                pairs.append((alone, first_token_p99(client)))
    return {
        "alone_ms": [alone for alone, _ in pairs],
        "beside_ms": [beside for _, beside in pairs],
        "ratio": [beside / alone for alone, beside in pairs],
    }


def measure(pool: Pool, rounds: int, tokens: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with pool.client() as client:
        p99(client, 50)
        for name in PEERS:
            pairs = []
            for _ in range(rounds):
                wait_until_idle(pool)
                quiet = p99(client, tokens)
                with peer(name, pool.run_dir):
                    pairs.append((quiet, p99(client, tokens)))
            figures[name] = {
                "quiet_ms": [quiet for quiet, _ in pairs],
                "beside_ms": [loud for _, loud in pairs],
                "ratio": [loud / quiet for quiet, loud in pairs],
            }
            print(f"{name}: {report.spread(figures[name]['ratio'], 2)}", file=sys.stderr)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        with Client(options.run_dir) as client:
            PEERS[options.play](client)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(ENDLESS_TEMPLATE)
        with Pool(Path(root), CONFIG.format(path=folder)) as pool:
            figures = measure(pool, options.rounds, options.tokens)
            first = measure_first_tokens(pool, options.rounds)
    print(f"{report.versions()}; {report.machine()}")
    print(f"{options.tokens} tokens, {options.rounds} rounds: median (minimum - maximum)\n")
    head = ("other work", "quiet, p99 ms", "with it, p99 ms", f"ratio, goal {GOAL}")
    rows = [
        (name, *(report.spread(found[key], 2) for key in ("quiet_ms", "beside_ms", "ratio")))
        for name, found in figures.items()
    ]
    print(report.table(head, rows))
    print()
    head = (
        "first token of a short request",
        "alone, p99 ms",
        "beside it, p99 ms",
        "ratio, goal 1.5",
    )
    row = (report.spread(first[key], 2) for key in ("alone_ms", "beside_ms", "ratio"))
    print(report.table(head, [("eight texts of 4 MiB at once", *row)]))
    report.save(options.json, {**figures, "first token": first})


if __name__ == "__main__":
    main()
