"""Clients of a gateway with the keys of two owners."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai

from support.pool import PATIENCE
from support.secret_file import secret_file

ALICE, BOB = "a-key-of-alice-0123456789", "a-key-of-bob-0123456789ab"


def keys_file(folder: Path) -> Path:
    """Writes a file with the keys of alice and bob."""
    file = secret_file(folder / "keys", f"alice {ALICE}\nbob {BOB}\n")
    return file


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    """Returns OpenAI's client, without retries."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def http_client(url: str, key: str = "none") -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE)
