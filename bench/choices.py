"""Measures several choices of one prompt beside as many different prompts, through a pool.

    python bench/choices.py [--model PATH] [--choices 8 32] [--prompt 512] [--tokens 32]
                            [--rounds 5]

Both kinds run in turn, in pairs, with new prompts of random token ids each time. All requests of a
kind are sent at once to one worker with a row for each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxpool.bench.pools import serving
from mlxpool.client import AsyncClient, Result

FIRST_ID, IDS = 5, 4000  # of prompts: ids without a special meaning


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: the prompt tokens that were computed, and seconds until all had ended."""

    computed: int
    seconds: float


def measured(results: Sequence[Result], began: float) -> Measured:
    """The figures of a run that has just ended."""
    usages = [result.usage for result in results]
    computed = sum(one["prompt_tokens"] - one["cached_tokens"] for one in usages)
    return Measured(computed, time.perf_counter() - began)


async def choices(client: AsyncClient, prompt: list[int], n: int, tokens: int) -> Measured:
    """`n` choices of one prompt."""
    began = time.perf_counter()
    found = await client.generate(
        "model", tokens=prompt, n=n, max_tokens=tokens, ignore_eos=True, seed=1
    )
    return measured(found, began)


async def separate(client: AsyncClient, prompts: list[list[int]], tokens: int) -> Measured:
    """A completion of each of several prompts."""
    began = time.perf_counter()
    asked = [
        client.generate("model", tokens=prompt, max_tokens=tokens, ignore_eos=True, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    return measured(await asyncio.gather(*asked), began)


def prompt_of(size: int, draw: random.Random) -> list[int]:
    """Random ids, so that no prompt begins as another does."""
    return [FIRST_ID + draw.randrange(IDS) for _ in range(size)]


async def pairs(
    run_dir: Path, n: int, size: int, tokens: int, rounds: int
) -> tuple[list[Measured], list[Measured]]:
    """The runs of choices and of separate prompts; a first pair is not counted."""
    draw = random.Random(n)
    shared: list[Measured] = []
    apart: list[Measured] = []
    async with AsyncClient(run_dir) as client:
        for number in range(rounds + 1):
            for kind in (number % 2 == 0, number % 2 == 1):
                if kind:
                    shared.append(await choices(client, prompt_of(size, draw), n, tokens))
                else:
                    prompts = [prompt_of(size, draw) for _ in range(n)]
                    apart.append(await separate(client, prompts, tokens))
    return shared[1:], apart[1:]


def main() -> int:
    """Print the figures as a table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="builtin:demo", help="a folder (default: demo)")
    parser.add_argument("--choices", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each completion")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(
        f"{'n':>3}  {'computed':>8} {'seconds':>8}  {'separate':>8} {'seconds':>8}  ratio of pairs"
    )
    for n in options.choices:
        with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
            settings = f'[models.model]\npath = "{options.model}"\nsequences = {n}\n'
            with serving(Path(folder), settings):
                shared, apart = asyncio.run(
                    pairs(Path(folder), n, options.prompt, options.tokens, options.rounds)
                )
        ratios = sorted(b.seconds / a.seconds for a, b in zip(shared, apart, strict=True))
        figures = [
            f"{statistics.median(one.computed for one in runs):8.0f}"
            f" {statistics.median(one.seconds for one in runs):8.2f}"
            for runs in (shared, apart)
        ]
        ratio = statistics.median(ratios)
        print(
            f"{n:3}  {figures[0]}  {figures[1]}  {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
