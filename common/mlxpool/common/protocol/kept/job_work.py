"""What a job computes: a `generate`, whose output is a stream, or a call, which has one answer.

The kinds of calls are those that a model computes: `embed`, `rerank`, `classify` and `decide`. A
job that is a call has no ids: its end has the answer, all of it from one run.
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

KIND = "kind"  # key of a `submit`, and of a line of a batch
CALLS = (*TASKS, DECIDE)  # kinds of jobs that are calls
KINDS = (Generate.kind, *CALLS)
OF_POOL = ("owner", "alone", "first")  # keys of calls that a job cannot have
INPUTS = ("inputs", "documents", "tokens")  # keys of which a call has one
MAX_NUMBERS = 4096  # of a vector, for the bound of an answer
_NOT_FIELDS = (KIND, "deadline_ms")  # keys of a job that are none of its call


def kind_of(body: Mapping[str, Any]) -> str:
    """The kind of the job that a body asks for. Raises BadRequest."""
    kind = body.get(KIND)
    if kind is None:
        return Generate.kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadRequest(f"kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
    return kind


def parse_work(body: Mapping[str, Any], blobs: Sequence[bytes], owner: str = "") -> Work:
    """Check a request as its worker would. `owner`: whose call it is.

    Raises BadRequest and TooLarge naming the key, its value and its bound.
    """
    kind = kind_of(body)
    request = {key: value for key, value in body.items() if key != KIND}
    if kind == Generate.kind:
        return Generate.parse(request, blobs)
    request = {key: value for key, value in request.items() if value is not None}
    for key in OF_POOL:
        if key in request:
            raise BadRequest(f"{key} is of calls that are sent: a job has none")
    fields = {key: value for key, value in request.items() if key not in _NOT_FIELDS}
    task = next((one for one in TASKS if one == kind), None)
    if task is not None:
        check_keys(task, fields)  # in front of the blobs: each of `inputs` and `tokens` has one
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
    """The seed of a job: its own, or the drawn one; 0 of a call, which draws nothing."""
    if isinstance(work, ModelCall):
        return 0
    return drawn if work.options.seed < 0 else work.options.seed


def answer_bound(work: Work) -> int:
    """Bytes that the blobs of an answer have at most, about; 0 where it has none to speak of.

    The width of a model's vectors is not known before it answers: MAX_NUMBERS is assumed.
    """
    if not isinstance(work, ModelCall) or work.kind not in TASKS:
        return 0
    numbers = 1 if work.kind == "rerank" else work.fields.get("dimensions") or MAX_NUMBERS
    return min(MAX_BLOB, _inputs(work) * numbers * NUMBER_BYTES)


def _inputs(call: ModelCall) -> int:
    given = next((call.fields[key] for key in INPUTS if key in call.fields), ())
    if given is True:
        return int(msgpack.Unpacker(BytesIO(call.packed[0])).read_array_header())
    return len(given)


def warnings_of(work: Work) -> tuple[str, ...]:
    """About keys of a request that are ignored; a call has none."""
    return () if isinstance(work, ModelCall) else work.warnings
