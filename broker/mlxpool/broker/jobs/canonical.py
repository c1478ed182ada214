"""The digest by which two submissions with one key are the same job or not. Pure."""

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
    one: {each.name: each.default for each in fields(one) if each.default is not NODEFAULT}
    for one in (EncoderCall, DecideCall)
}
PLAIN = (str, int, bool, bytes)  # as nearly all values are: they mean what they are
MAX_EXACT = 2**53  # from here on a float need not be a whole number that somebody wrote


def job_digest(work: Work) -> bytes:
    """What makes two submissions the same request: 16 bytes.

    It is of the checked request, in which a key with its default means as much as none, so that
    neither that nor the order of keys nor 1 in place of 1.0 makes another one. What does not change
    the answer is left out: deadlines, priority, and for how long the result is kept.
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
    """The keys of a call that say something else than what a call without them means."""
    defaults = DEFAULTS[DecideCall if call.kind == DECIDE else EncoderCall]
    return {
        key: value
        for key, value in call.fields.items()
        if key not in defaults or value != defaults[key]
    }


def canonical(value: Any) -> Any:
    """The one form of all values that mean the same: maps sorted and without None, 1 for 1.0."""
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
