"""Complete a file of prompts, several at once, with progress; resumes after an interruption.

    python examples/batch_job.py MODEL PROMPTS.jsonl ANSWERS.jsonl [--run-dir DIR] [--at-once 16]

A line of PROMPTS is {"prompt": "…"}, optionally with options of docs/protocol.md. A line of ANSWERS
is {"line": 0, "text": "…", "reason": "…", "tokens": 12}, or {"line": 0, "error": "…"}. Completions
that end first are written first. A restart computes the lines whose answer is missing or an error.
Line n has the seed SEED + n unless it names a seed, so the answers do not depend on interruptions.

Exit code 0: every line is answered; 1: some lines failed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mlxpool.client import AsyncClient, PoolError

MAX_ATTEMPTS = 5  # attempts for a line that the pool refuses for now
DEFAULT_PAUSE = 1.0  # seconds, if the pool does not ask for a time


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Reads the prompts of the file. Raises SystemExit naming a line that is not a prompt."""
    prompts = []
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
        try:
            prompt = json.loads(line)
            prompt["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f'{path}:{number + 1}: must be {{"prompt": …}}: {error!r}') from None
        prompts.append(prompt)
    return prompts


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Reads the complete answers so far; the last line of a killed job may be incomplete."""
    if not path.exists():
        return []
    complete = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    answers = [json.loads(line) for line in complete]
    return [answer for answer in answers if "error" not in answer]


class Progress:
    """A progress line on standard error: updated on a terminal, else written once at the end."""

    def __init__(self, done: int, total: int) -> None:
        self.before, self.done, self.total = done, done, total
        self.failed = self.tokens = 0
        self.started = time.monotonic()

    def count(self, answer: Mapping[str, Any]) -> None:
        self.done += 1
        self.failed += "error" in answer
        self.tokens += answer.get("tokens", 0)
        if sys.stderr.isatty():
            print(f"\r\x1b[K{self}", end="", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        done = self.done - self.before
        seconds_left = (self.total - self.done) * seconds / done if done else 0.0
        return (
            f"{self.done} of {self.total} lines, {self.failed} failed,"
            f" {self.tokens / seconds:.0f} tokens/s, {seconds_left:.0f} s left"
        )

    def end(self) -> None:
        print(f"\r\x1b[K{self}" if sys.stderr.isatty() else self, file=sys.stderr)


async def answer(
    client: AsyncClient, model: str, number: int, prompt: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Returns the answer to a line. Retries after a temporary refusal."""
    options = {"seed": seed + number, **prompt}
    tries = 0
    while True:
        try:
            result = await client.generate(model, **options)
        except PoolError as error:
            tries += 1
            if not error.retryable or tries == MAX_ATTEMPTS:
                return {"line": number, "error": error.code, "message": error.message}
            wait = error.retry_after_ms
            await asyncio.sleep(DEFAULT_PAUSE if wait is None else wait / 1000)
        else:
            outcome = {"text": result.text, "reason": result.reason, "tokens": len(result.ids)}
            return {"line": number, **outcome}


async def work(
    client: AsyncClient,
    options: argparse.Namespace,
    waiting: list[int],
    out: IO[str],
    show: Progress,
) -> None:
    """Answers lines until no line is left."""
    while waiting:
        number = waiting.pop()
        line = await answer(client, options.model, number, options.lines[number], options.seed)
        out.write(json.dumps(line) + "\n")
        out.flush()  # so that a restart repeats no line
        show.count(line)


async def run(
    options: argparse.Namespace, waiting: list[int], out: IO[str], show: Progress
) -> None:
    async with AsyncClient(options.run_dir) as client, asyncio.TaskGroup() as workers:
        for _ in range(min(options.at_once, len(waiting))):
            workers.create_task(work(client, options, waiting, out, show))


def main() -> int:
    parser = argparse.ArgumentParser(description="Complete a file of prompts.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompts", metavar="PROMPTS", type=Path)
    parser.add_argument("answers", metavar="ANSWERS", type=Path)
    parser.add_argument("--run-dir", metavar="DIR")
    parser.add_argument("--at-once", type=int, default=16, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.lines = read_prompts(options.prompts)
    known = read_answers(options.answers)
    done = {line["line"] for line in known}
    waiting = [number for number in reversed(range(len(options.lines))) if number not in done]
    show = Progress(len(done), len(options.lines))
    # A new file of the answers, without an incomplete last line and without lines of errors.
    fresh = options.answers.with_suffix(".new")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in known), "utf-8")
    fresh.replace(options.answers)
    try:
        with options.answers.open("a", encoding="utf-8") as out:
            asyncio.run(run(options, waiting, out, show))
    except KeyboardInterrupt:
        return 130
    finally:
        show.end()
    return 1 if show.failed else 0


if __name__ == "__main__":
    sys.exit(main())
