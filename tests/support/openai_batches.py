"""Files and batches of OpenAI's API: upload, start, wait and results."""

from __future__ import annotations

import json
from typing import Any

import openai

from support.pool import until

COMPLETIONS = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def sent(client: openai.OpenAI, lines: list[Any], name: str = "in.jsonl") -> str:
    """Uploads a file with these lines; returns its id."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    data = "\n".join(texts).encode()
    return client.files.create(file=(name, data), purpose="batch").id


def begin(client: openai.OpenAI, file: str, endpoint: str = COMPLETIONS, **more: Any) -> Any:
    fields: Any = {"endpoint": endpoint, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file, **fields)


def over(client: openai.OpenAI, id: str) -> Any:
    """Waits for the end of a batch; returns the batch."""

    def ended() -> Any:
        batch = client.batches.retrieve(id)
        assert batch.status in (*OVER, "in_progress", "finalizing", "cancelling")
        return batch if batch.status in OVER else None

    return until(ended, "the batch has ended")


def results(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """Returns the lines of a file, by their custom_id."""
    assert file is not None
    text = client.files.content(file).text
    assert client.files.retrieve(file).bytes == len(text.encode())
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}
