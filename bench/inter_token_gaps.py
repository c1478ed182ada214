"""Measures the gaps between tokens of running streams while the worker prepares other requests.

    python bench/inter_token_gaps.py [--rounds 7] [--tokens 400] [--json FILE]

Eight streams of the embedded model decode in one worker, behind a broker. Meanwhile another process
sends prompts of 256 KiB, one after the other, or chats whose template never ends. The gaps are
those between two deltas of a stream at its client; p99, in pairs with a quiet round. There are two
controls. One does not use the pool and loads the processor as the tokenizer's threads and the
template process may. The other sends as many bytes as token ids, which need no tokenizer.
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
from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.system.idle_thread import LONG_WORK_NICENESS
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import DEMO_FOLDER as DEMO
from peer_process import gaps_between, running

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.pool import Pool

ENDLESS_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CONFIG = '[models.m]\npath = "{path}"\nsequences = 12\nprefix_cache = "off"\n'
LARGE_PROMPT = 256 * 1024  # characters
STREAMS = 8
PAUSE = 0.2  # seconds between two large prompts
GOAL = 1.2


def large_text(rng: random.Random) -> str:
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(5000)]
    return " ".join(rng.choices(words, k=60_000))[:LARGE_PROMPT]


def large_prompts(client: Client) -> None:
    rng = random.Random(0)
    text = large_text(rng)
    while True:
        with contextlib.suppress(PoolError):  # larger than the context
            client.generate("m", f"{rng.random()} {text}"[:LARGE_PROMPT], max_tokens=1)
        time.sleep(PAUSE)


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
    os.nice(LONG_WORK_NICENESS)
    while True:
        pass


PEERS: dict[str, Callable[[Client], None]] = {
    "control: a busy process of the same niceness": busy_neighbour,
    "control: 256 KiB of ids": large_ids,
    "prompts of 256 KiB": large_prompts,
    "a template that never ends": endless_templates,
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


def measure(pool: Pool, rounds: int, tokens: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with pool.client() as client:
        p99(client, 50)
        for name in PEERS:
            pairs = []
            for _ in range(rounds):
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


def reject(size: int) -> None:
    raise BadRequest(f"{size} ids")


def preparation_times(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of processor time of the preparing thread for a large prompt.

    Other threads and the template process do the rest without the interpreter lock.
    """
    text = ChatTokenizer.from_folder(inspect(folder_files(DEMO)))
    text.warm_up()
    large = large_text(random.Random(0))
    chat = [{"role": "user", "content": large}]
    cases: dict[str, Callable[[], object]] = {
        "text that does not fit": lambda: text.encode(large, reject),
        "text": lambda: text.encode(large),
        "a chat": lambda: text.chat(chat, None, 0.0),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.thread_time()
            with contextlib.suppress(BadRequest):
                case()
            found[name].append(1000 * (time.thread_time() - start))
    return found


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
    print(f"{report.versions()}; {report.machine()}")
    print(f"{options.tokens} tokens, {options.rounds} rounds: median (minimum - maximum)\n")
    head = ("other work", "quiet, p99 ms", "with it, p99 ms", f"ratio, goal {GOAL}")
    rows = [
        (name, *(report.spread(found[key], 2) for key in ("quiet_ms", "beside_ms", "ratio")))
        for name, found in figures.items()
    ]
    print(report.table(head, rows))
    cost = preparation_times(options.rounds)
    lines = [(name, report.spread(values, 2)) for name, values in cost.items()]
    print()
    print(report.table(("256 KiB of", "the preparing thread's processor time, ms"), lines))
    report.save(options.json, {**figures, "held_ms": cost})


if __name__ == "__main__":
    main()
