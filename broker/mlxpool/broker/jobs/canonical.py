"""The digest by which two submissions with one key are the same job or not. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.packing import pack

DIGEST_BYTES = 16
MAX_EXACT = 2**53  # from here on a float need not be a whole number that somebody wrote


def job_digest(message: Generate) -> bytes:
    """What makes two submissions the same request: 16 bytes.

    It is of the checked request with its defaults filled in, so that neither the order of keys nor
    1 in place of 1.0 makes another one. What does not change the answer is left out: deadlines,
    priority, and for how long the result is kept.
    """
    prompt = message.prompt
    meaning = {
        "model": message.model,
        "prompt": canonical(prompt.body()),
        "blobs": [hashlib.sha256(blob).digest() for blob in prompt.blobs()],
        "options": canonical(message.options.to_wire()),
    }
    return hashlib.sha256(pack(meaning)).digest()[:DIGEST_BYTES]


def canonical(value: Any) -> Any:
    """The one form of all values that mean the same: maps sorted and without None, 1 for 1.0."""
    if isinstance(value, Mapping):
        entries = ((str(key), entry) for key, entry in value.items() if entry is not None)
        return [[key, canonical(entry)] for key, entry in sorted(entries, key=lambda pair: pair[0])]
    if isinstance(value, list | tuple):
        return [canonical(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        return int(value)
    return value
