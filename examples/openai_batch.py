"""Answer every line of a file as a batch, through the gateway with OpenAI's client.

    python examples/openai_batch.py REQUESTS.jsonl ANSWERS.jsonl [--url http://127.0.0.1:11434]

A line of REQUESTS is a line of OpenAI's batches: custom_id, method, url and body. Lines without an
answer are written to the end of ANSWERS with their error. The batch continues when this program is
interrupted; `--batch ID`, in place of REQUESTS, waits for this batch again. Needs a pool that keeps
jobs (the default) and `pip install openai`.

Exit code 0: every line is answered; 1: some lines are not, or the batch failed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

PAUSE = 0.5  # seconds between two requests for the batch's state
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")


def submit(client: openai.OpenAI, requests: Path, endpoint: str) -> Batch:
    """Sends the file, and makes a batch of it."""
    file = client.files.create(file=requests, purpose="batch")
    settings: Any = {"endpoint": endpoint, "completion_window": "24h"}
    return client.batches.create(input_file_id=file.id, **settings)


def wait(client: openai.OpenAI, batch: Batch) -> Batch:
    """Waits until the batch has ended, with a line of progress on standard error."""
    while batch.status in RUNNING:
        counts = batch.request_counts
        if counts is not None:
            ended = counts.completed + counts.failed
            print(f"\r{batch.id}: {ended} of {counts.total}", end="", file=sys.stderr, flush=True)
        time.sleep(PAUSE)
        batch = client.batches.retrieve(batch.id)
    print(f"\r{batch.id}: {batch.status}", file=sys.stderr)
    return batch


def write(client: openai.OpenAI, batch: Batch, answers: Path) -> None:
    """Writes the lines of the batch's output file, then of its error file, to `answers`."""
    with answers.open("wb") as out:
        for file in (batch.output_file_id, batch.error_file_id):
            if file is not None:
                for data in client.files.content(file).iter_bytes():
                    out.write(data)


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer the lines of a file as a batch.")
    parser.add_argument("requests", type=Path, nargs="?")
    parser.add_argument("answers", type=Path)
    parser.add_argument("--batch", help="wait for this batch, and send no file")
    parser.add_argument("--endpoint", default="/v1/chat/completions")
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the gateway's")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    if (options.requests is None) == (options.batch is None):
        parser.error("give a file of requests, or --batch")
    try:
        with openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
            if options.batch:
                batch = client.batches.retrieve(options.batch)
            else:
                batch = submit(client, options.requests, options.endpoint)
            batch = wait(client, batch)
            for fault in (batch.errors.data or []) if batch.errors else []:
                print(fault.message, file=sys.stderr)
            write(client, batch, options.answers)
    except openai.APIConnectionError:
        print(f"no gateway answers at {options.url}: mlxpool serve --http", file=sys.stderr)
        return 1
    except openai.APIStatusError as error:
        print(error.message, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    counts = batch.request_counts
    all_answered = counts is not None and counts.completed == counts.total
    return 0 if batch.status == "completed" and all_answered else 1


if __name__ == "__main__":
    sys.exit(main())
