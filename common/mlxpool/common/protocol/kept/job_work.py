"""The work of a job: a `generate`, whose output is a stream, or a call, which has one answer.

A model computes the calls `embed`, `rerank`, `classify` and `decide`. The job of a call has no
token ids: one run computes the whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeAlias

import msgpack

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.decisions import DECIDE, DecideCall
from mlxpool.common.protocol.encoder_calls import NUMBER_BYTES, TASKS, EncoderCall, check_keys
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.from_client import Generate, ModelCall

Work: TypeAlias = Generate | ModelCall

KIND = "kind"  # the key of the kind in a `submit`, and in a line of a batch
CALLS = (*TASKS, DECIDE)  # kinds of jobs that are calls
KINDS = (Generate.kind, *CALLS)
OF_POOL = ("owner", "alone", "first")  # keys of calls that a job cannot have
INPUTS = ("inputs", "documents", "tokens")  # a call has one of these keys
MAX_NUMBERS = 4096  # assumed number of dimensions of a vector, for the bound of an answer
_NOT_FIELDS = (KIND, "deadline_ms")  # keys of a job that do not belong to its call


def kind_of(body: Mapping[str, Any]) -> str:
    """Returns the kind of a job. Raises BadRequest unless it is one of KINDS."""
    kind = body.get(KIND)
    if kind is None:
        return Generate.kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadRequest(f"kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
    return kind


def parse_work(body: Mapping[str, Any], blobs: Sequence[bytes], owner: str = "") -> Work:
    """Checks a request as a worker checks it. `owner` is the owner of a call.

    Raises BadRequest and TooLarge naming the key, its value and its bound.
    """
    kind = kind_of(body)
    request = {key: value for key, value in body.items() if key != KIND}
    if kind == Generate.kind:
        return Generate.parse(request, blobs)
    request = {key: value for key, value in request.items() if value is not None}
    for key in OF_POOL:
        if key in request:
            raise BadRequest(f"{key} is only for calls, not for jobs")
    fields = {key: value for key, value in request.items() if key not in _NOT_FIELDS}
    task = next((name for name in TASKS if name == kind), None)
    if task is not None:
        # Before the check of the blobs, because each of these keys has one blob.
        check_keys(task, fields)
    if len(blobs) > 1 or any(len(blob) > MAX_BLOB for blob in blobs):
        sizes = ", ".join(str(len(blob)) for blob in blobs)
        raise TooLarge(f"{kind} takes one blob of at most {MAX_BLOB} bytes, got {sizes} bytes")
    if not request.get("model"):
        raise BadRequest(f"model must be a name, got {shown(request.get('model'))}")
    if task is None:
        DecideCall.parse(fields, blobs)
    else:
        EncoderCall.parse(task, fields, blobs)
    return ModelCall.parse(kind, request, blobs, owner)


def seed_of(work: Work, drawn: int) -> int:
    """Returns the seed of a job: the request's seed, else `drawn`; 0 for a call."""
    if isinstance(work, ModelCall):
        return 0
    return drawn if work.options.seed < 0 else work.options.seed


def answer_bound(work: Work) -> int:
    """Returns an approximate bound of the bytes of an answer's blobs; 0 if they are small.

    A vector's number of dimensions is unknown before the model answers: MAX_NUMBERS is assumed.
    """
    if not isinstance(work, ModelCall) or work.kind not in TASKS:
        return 0
    numbers = 1 if work.kind == "rerank" else work.fields.get("dimensions") or MAX_NUMBERS
    return min(MAX_BLOB, _inputs(work) * numbers * NUMBER_BYTES)


def _inputs(call: ModelCall) -> int:
    inputs = next((call.fields[key] for key in INPUTS if key in call.fields), ())
    if inputs is True:
        return int(msgpack.Unpacker(BytesIO(call.packed[0])).read_array_header())
    return len(inputs)


def warnings_of(work: Work) -> tuple[str, ...]:
    """Returns the warnings about ignored keys of a request; a call has no warnings."""
    return () if isinstance(work, ModelCall) else work.warnings
