"""The digest that decides whether two submissions with one key are one job. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from msgspec import NODEFAULT
from msgspec.structs import fields

from mlxpool.common.protocol.decisions import DECIDE, DecideCall
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.frames import pack
from mlxpool.common.protocol.from_client import ModelCall
from mlxpool.common.protocol.kept.job_work import Work

DIGEST_BYTES = 16
DEFAULTS = {
    call: {
        member.name: member.default for member in fields(call) if member.default is not NODEFAULT
    }
    for call in (EncoderCall, DecideCall)
}
PLAIN = (str, int, bool, bytes)  # types whose values are already canonical, as most values are
MAX_EXACT = 2**53  # a larger float may equal several whole numbers after rounding


def job_digest(work: Work) -> bytes:
    """Returns a digest of 16 bytes; submissions with equal digests are one job.

    It is computed from the request after its checks. So it does not matter whether a key with its
    default value is sent, in which order keys come, or whether a number is written 1 or 1.0.
    Deadlines, priority and the time to keep the result are left out: they do not change the answer.
    """
    return hashlib.sha256(pack(_meaning(work))).digest()[:DIGEST_BYTES]


def _meaning(work: Work) -> dict[str, Any]:
    if isinstance(work, ModelCall):
        return {
            "model": work.model,
            "call": work.kind,
            "fields": canonical(_without_defaults(work)),
            "blobs": [hashlib.sha256(blob).digest() for blob in work.packed],
        }
    return {
        "model": work.model,
        "prompt": canonical(work.prompt.body()),
        "blobs": [hashlib.sha256(blob).digest() for blob in work.prompt.blobs()],
        "options": canonical(work.options.to_wire()),
    }


def _without_defaults(call: ModelCall) -> dict[str, Any]:
    """Returns the keys of a call whose values differ from their defaults."""
    defaults = DEFAULTS[DecideCall if call.kind == DECIDE else EncoderCall]
    return {
        key: value
        for key, value in call.fields.items()
        if key not in defaults or value != defaults[key]
    }


def canonical(value: Any) -> Any:
    """Returns one form for all equal values: maps are sorted and lack None, and 1 replaces 1.0."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        entries = ((str(key), entry) for key, entry in value.items() if entry is not None)
        return [[key, canonical(entry)] for key, entry in sorted(entries, key=lambda pair: pair[0])]
    if isinstance(value, list | tuple):
        return [canonical(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        return int(value)
    return value
