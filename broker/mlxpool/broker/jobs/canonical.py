"""The digest by which two submissions with one key are the same job or not. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from mlxpool.common.protocol.decisions import DECIDE, DecideCall, Question
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.from_client import ModelCall
from mlxpool.common.protocol.kept.job_work import Work
from mlxpool.common.protocol.packing import pack

DIGEST_BYTES = 16
MAX_EXACT = 2**53  # from here on a float need not be a whole number that somebody wrote


def job_digest(work: Work) -> bytes:
    """What makes two submissions the same request: 16 bytes.

    It is of the checked request, in which a default that is given and one that is left out are the
    same, so that neither that nor the order of keys nor 1 in place of 1.0 makes another one. What
    does not change the answer is left out: deadlines, priority, and for how long the result is
    kept.
    """
    return hashlib.sha256(pack(_meaning(work))).digest()[:DIGEST_BYTES]


def _meaning(work: Work) -> dict[str, Any]:
    if isinstance(work, ModelCall):
        return {
            "model": work.model,
            "call": work.kind,
            "fields": canonical(_given(work)),
            "blobs": [hashlib.sha256(blob).digest() for blob in work.packed],
        }
    return {
        "model": work.model,
        "prompt": canonical(work.prompt.body()),
        "blobs": [hashlib.sha256(blob).digest() for blob in work.prompt.blobs()],
        "options": canonical(work.options.to_wire()),
    }


def _given(call: ModelCall) -> dict[str, Any]:
    """The fields of a call but those that have their default value; questions as they are read.

    Texts stay as they are sent: in the body or as a blob, which clients decide by their size.
    """
    of = DecideCall if call.kind == DECIDE else EncoderCall
    defaults = {one.name: one.default for one in fields(of) if one.default is not MISSING}
    given = {
        key: value
        for key, value in call.fields.items()
        if key not in defaults or value != defaults[key]
    }
    if call.kind == DECIDE:
        given["questions"] = [Question.parse("questions", one).body() for one in given["questions"]]
    return given


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
