"""What encoder models are asked, `embed`, `rerank` and `classify`, and what they answer."""

from __future__ import annotations

import math
import operator
import os
import sys
from abc import ABCMeta
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, StructMeta, field
from msgspec.structs import replace

from mlxpool.client.request import Question
from mlxpool.client.stream import Result
from mlxpool.common.checks import integer, shown
from mlxpool.common.errors import BadRequest, Internal, TooLarge
from mlxpool.common.protocol.encoder_calls import (
    MAX_FIRST,
    MAX_INPUTS,
    NUMBER_BYTES,
    VECTORS,
    Task,
    Texts,
    pack_texts,
)
from mlxpool.common.protocol.frames import ID_BYTES, TEXT_AS_BLOB
from mlxpool.common.protocol.from_client import ModelCall
from mlxpool.common.protocol.token_ids import pack_ids

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_IN_FLIGHT = 16  # calls of one `embed` that are open at a time
MAX_CALL_TEXT = 512 * 1024  # characters of one call: more texts are divided among several calls
# A text or a list of texts; pairs of texts for `classify`; a list of token ids, or several of them.
Inputs = str | Sequence[str] | Sequence[tuple[str, str]] | Sequence[int] | Sequence[Sequence[int]]


class Ranked(Struct, frozen=True):
    """One document of `rerank`: its index in the request, and its score."""

    index: int
    score: float


class Ranking(list[Ranked]):
    """A list of the ranked documents, best first; `usage`: {prompt_tokens, total_tokens}."""

    def __init__(self, found: Iterable[Ranked], usage: Mapping[str, int]) -> None:
        super().__init__(found)
        self.usage = usage


class _SequenceRecord(StructMeta, ABCMeta):
    """The metaclass of a record that is a Sequence as well."""


class Vectors(Sequence["list[float]"], Struct, frozen=True, metaclass=_SequenceRecord):
    """A sequence of rows of numbers, one for each input: vectors, or probabilities.

    `vectors[0]` is the first row as a list, `numpy.asarray(vectors)` the array [rows, columns].
    """

    data: bytes  # little-endian float32
    rows: int
    columns: int
    labels: tuple[str, ...] = ()  # names of the columns, of `classify`
    usage: Mapping[str, int] = field(default_factory=dict)  # prompt_tokens, total_tokens

    @classmethod
    def of(cls, result: Result) -> Vectors:
        """The vectors of an `embed`, `rerank` or `classify` job.

        Raises ValueError for another job.
        """
        answer = result.answer
        if answer is None or answer.kind != VECTORS:
            raise ValueError("the result has no vectors: its job is no embed, rerank or classify")
        return _read({**answer.fields, "usage": result.usage}, answer.packed)

    def __repr__(self) -> str:  # without the data
        shape = f"rows={self.rows}, columns={self.columns}"
        return f"Vectors({shape}, labels={self.labels!r}, usage={self.usage!r})"

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self.rows))]
        if not -self.rows <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        size = self.columns * NUMBER_BYTES
        begin = index % self.rows * size
        return _numbers(self.data[begin : begin + size]).tolist()

    def tolist(self) -> list[list[float]]:
        """All rows as lists."""
        return list(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        import numpy as np

        found = np.frombuffer(self.data, "<f4").reshape(self.rows, self.columns)
        return found.astype(dtype or np.float32, copy=bool(copy))


def _numbers(data: bytes) -> array[float]:
    found = array("f", data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


# ---- questions -----------------------------------------------------------------------------------


def embed(
    model: str,
    inputs: Inputs,
    *,
    task: Task = "embed",
    truncate: bool | None = None,
    dimensions: int | None = None,
    normalise: bool | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    deadline_ms: int | None = None,
) -> list[Question[Vectors]]:
    """The calls for these inputs, a batch each; `task` may also be "classify".

    Raises BadRequest for inputs that cannot be sent; the worker checks everything else.
    """
    settings = {
        "truncate": truncate,
        "dimensions": dimensions,
        "normalise": normalise,
        "prompt_name": prompt_name,
        "prompt": prompt,
    }
    fields = {key: value for key, value in settings.items() if value is not None}
    _check_sizes({"prompt": prompt, "prompt_name": prompt_name})
    found = [inputs] if isinstance(inputs, str) else listed("inputs", inputs)
    if all(map(_is_id, found)):
        found = [found]
    if any(map(_is_list_of_ids, found)):
        return _of_ids(model, task, found, fields, deadline_ms)
    for index, one in enumerate(found):
        _check_texts(f"inputs[{index}]", one)
    return _divided(model, task, fields, "inputs", found, deadline_ms)


def rerank(
    model: str,
    query: str,
    documents: Sequence[str],
    *,
    top: int | None = None,
    truncate: bool | None = None,
    prompt: str | None = None,
    deadline_ms: int | None = None,
) -> list[Question[Vectors]]:
    """The calls that rate documents for a query, a batch each. Raises BadRequest as `embed`.

    `top` is only checked: `ranked` takes it.
    """
    integer({"top": top}, "top", 1, MAX_FIRST)
    if not isinstance(query, str):
        raise BadRequest(f"query must be a str, got {shown(query)}")
    _check_sizes({"query": query, "prompt": prompt})
    found = listed("documents", documents)
    for index, one in enumerate(found):
        if not isinstance(one, str):
            raise BadRequest(f"documents[{index}] must be a str, got {shown(one)}")
    fields = {"query": query, "truncate": truncate, "prompt": prompt}
    given = {key: value for key, value in fields.items() if value is not None}
    return _divided(model, "rerank", given, "documents", found, deadline_ms)


def listed(name: str, values: Any) -> list[Any]:
    """The values of an argument, which may be any iterable. Raises BadRequest for none."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise BadRequest(f"{name} must be a list of texts, got {shown(values)}")
    found = list(values)
    if not found:
        raise BadRequest(f"{name} is empty, must have at least 1 text")
    return found


def _check_texts(name: str, value: Any) -> None:
    pair = isinstance(value, list | tuple) and len(value) == 2
    if not isinstance(value, str) and not (pair and all(isinstance(one, str) for one in value)):
        raise BadRequest(
            f"{name} must be a str, a pair of them or a list of token ids, got {shown(value)}"
        )


def _check_sizes(texts: Mapping[str, Any]) -> None:
    """Raises TooLarge for a text beside the inputs that is too long for the body of a call."""
    for name, text in texts.items():
        size = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
        if size > TEXT_AS_BLOB:
            raise TooLarge(
                f"{name} has {size} bytes, at most {TEXT_AS_BLOB} are taken; make it shorter"
            )


def _is_id(value: Any) -> bool:
    """Whether a value is an integer, also NumPy's; a boolean is none."""
    if isinstance(value, bool) or _has_items(value):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_list_of_ids(value: Any) -> bool:
    """Whether a value is to be token ids: a list, tuple or array that begins with no text."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not _has_items(value):
        return False
    return len(value) == 0 or not isinstance(value[0], str)


def _has_items(value: Any) -> bool:
    return hasattr(value, "__getitem__") and bool(getattr(value, "shape", True))


def _batches(texts: Sequence[Any]) -> Iterator[list[Any]]:
    """Texts or pairs in batches of a call: at most MAX_INPUTS, about MAX_CALL_TEXT characters."""
    batch: list[Any] = []
    size = 0
    for one in texts:
        own = len(one) if isinstance(one, str) else sum(map(len, one))
        if batch and (len(batch) == MAX_INPUTS or size + own > MAX_CALL_TEXT):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += own
    yield batch


def _divided(
    model: str,
    task: Task,
    fields: Mapping[str, Any],
    key: str,
    texts: Sequence[Any],
    deadline_ms: int | None,
) -> list[Question[Vectors]]:
    """The calls for texts or pairs; each says with which number it begins."""
    questions, first = [], 0
    for batch in _batches(texts):
        body, blobs = _packed(key, batch)
        given = {**fields, **body, **_begin(first)}
        questions.append(_question(model, task, given, blobs, deadline_ms))
        first += len(batch)
    return questions


def _begin(first: int) -> dict[str, int]:
    """The key by which errors count inputs; older pools do not know it."""
    return {"first": first} if first else {}


def _packed(name: str, batch: Texts) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """The key of a batch and its blob. Raises BadRequest for what is no Unicode text."""
    try:
        data = pack_texts(batch)
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} has a text that is not Unicode: {error}") from None
    if len(data) > TEXT_AS_BLOB:
        return {name: True}, (data,)
    return {name: list(batch)}, ()


def _of_ids(
    model: str, task: Task, inputs: Sequence[Any], fields: dict[str, Any], deadline_ms: int | None
) -> list[Question[Vectors]]:
    lists = [_checked_ids(f"inputs[{index}]", one) for index, one in enumerate(inputs)]
    batches = [(at, lists[at : at + MAX_INPUTS]) for at in range(0, len(lists), MAX_INPUTS)]
    return [
        _question(
            model,
            task,
            {**fields, "tokens": [len(ids) for ids in batch], **_begin(first)},
            (b"".join(pack_ids(ids) for ids in batch),),
            deadline_ms,
        )
        for first, batch in batches
    ]


def _checked_ids(name: str, value: Any) -> list[int]:
    """The token ids of one input. Raises BadRequest naming the input and its first wrong value."""
    if not _is_list_of_ids(value):
        raise BadRequest(f"{name} must be a list of token ids, as others are; got {shown(value)}")
    if len(value) == 0:
        raise BadRequest(f"{name} has no token ids, must have at least 1")
    wrong = next((one for one in value if not _is_id(one) or not 0 <= int(one) < 2**32), None)
    if wrong is not None:
        raise BadRequest(
            f"{name} must have token ids, integers from 0 to {2**32 - 1}, got {shown(wrong)}"
        )
    return [int(one) for one in value]


def _question(
    model: str,
    task: Task,
    fields: Mapping[str, Any],
    blobs: tuple[bytes, ...],
    deadline_ms: int | None,
) -> Question[Vectors]:
    call = ModelCall(task, model, fields, blobs, deadline_ms=deadline_ms)
    return Question(os.urandom(ID_BYTES), call, lambda answer: _read(answer.body, answer.blobs))


def _read(body: Mapping[str, Any], blobs: Sequence[bytes]) -> Vectors:
    """Raises ValueError for an answer whose blob has another size than it says."""
    data = b"".join(blobs)
    rows, columns = int(body["rows"]), int(body["columns"])
    if len(data) != rows * columns * NUMBER_BYTES:
        raise ValueError(f"{len(data)} bytes for {rows} rows of {columns} numbers")
    return Vectors(data, rows, columns, tuple(body.get("labels") or ()), dict(body["usage"]))


# ---- answers -------------------------------------------------------------------------------------


def joined(parts: Sequence[Vectors]) -> Vectors:
    """The rows of all batches, one after the other. Raises Internal where their widths differ."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(one.columns != first.columns for one in parts):
        widths = sorted({one.columns for one in parts})
        raise Internal(f"the model was changed meanwhile: its vectors have {widths} numbers")
    usage = {key: sum(one.usage.get(key, 0) for one in parts) for key in first.usage}
    data, rows = b"".join(one.data for one in parts), sum(one.rows for one in parts)
    return replace(first, data=data, rows=rows, usage=usage)


def ranked(scores: Vectors, documents: Sequence[str], top: int | None = None) -> Ranking:
    """The documents, best first; `top`: only so many of them. Ties are in the order of the request.

    Equal documents get the score of the first one: computed beside different others, theirs differ
    in the last digits.
    """
    given = _numbers(scores.data)
    first: dict[str, int] = {}
    numbers = [given[first.setdefault(one, index)] for index, one in enumerate(documents)]
    order = sorted(range(scores.rows), key=lambda index: (-numbers[index], index))
    bound = math.inf if top is None else top
    found = [Ranked(index, numbers[index]) for place, index in enumerate(order) if place < bound]
    return Ranking(found, scores.usage)
