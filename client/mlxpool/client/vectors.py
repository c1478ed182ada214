"""The calls of encoder models and their answers: `embed`, `rerank` and `classify`."""

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

MAX_IN_FLIGHT = 16  # the most calls of one `embed` that are open at a time
MAX_CALL_TEXT = 512 * 1024  # the most characters of one call: longer lists of texts are split
# A text or a list of texts; pairs of texts for `classify`; a list of token ids, or several lists.
Inputs = str | Sequence[str] | Sequence[tuple[str, str]] | Sequence[int] | Sequence[Sequence[int]]


class Ranked(Struct, frozen=True):
    """One document of a `rerank`: its index in the request, and its score."""

    index: int  # the index of the document in the request
    score: float  # the score of the document, greater for a better one


class Ranking(list[Ranked]):
    """A list of the ranked documents, best first; `usage`: {prompt_tokens, total_tokens}."""

    def __init__(self, documents: Iterable[Ranked], usage: Mapping[str, int]) -> None:
        super().__init__(documents)
        self.usage = usage


class _SequenceRecord(StructMeta, ABCMeta):
    """The metaclass of records that are also a Sequence."""


class Vectors(Sequence["list[float]"], Struct, frozen=True, metaclass=_SequenceRecord):
    """A sequence of rows of numbers, one for each input: vectors, or probabilities.

    `vectors[0]` is the first row as a list; `numpy.asarray(vectors)` is the array [rows, columns].
    """

    data: bytes  # the numbers of all rows as little-endian float32
    rows: int  # the number of rows
    columns: int  # the number of columns
    labels: tuple[str, ...] = ()  # names of the columns, for `classify`
    usage: Mapping[str, int] = field(default_factory=dict)  # prompt_tokens, total_tokens

    @classmethod
    def of(cls, result: Result) -> Vectors:
        """Returns the vectors of an `embed`, `rerank` or `classify` job.

        Raises ValueError if the result belongs to another kind of job.
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
            return [self[row] for row in range(*index.indices(self.rows))]
        if not -self.rows <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        size = self.columns * NUMBER_BYTES
        begin = index % self.rows * size
        return _numbers(self.data[begin : begin + size]).tolist()

    def tolist(self) -> list[list[float]]:
        """Returns all rows as lists."""
        return list(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        import numpy as np

        rows = np.frombuffer(self.data, "<f4").reshape(self.rows, self.columns)
        return rows.astype(dtype or np.float32, copy=bool(copy))


def _numbers(data: bytes) -> array[float]:
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


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
    """Returns the calls that compute these inputs. Each call has some of the inputs.

    `task` may also be "classify". Raises BadRequest if inputs cannot be sent. The worker checks
    everything else.
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
    items = [inputs] if isinstance(inputs, str) else listed("inputs", inputs)
    if all(map(_is_id, items)):
        items = [items]
    if any(map(_is_list_of_ids, items)):
        return _of_ids(model, task, items, fields, deadline_ms)
    for index, item in enumerate(items):
        _check_texts(f"inputs[{index}]", item)
    return _divided(model, task, fields, "inputs", items, deadline_ms)


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
    """Returns the calls that score documents for a query. Each call has some of the documents.

    `top` is only checked here; `ranked` applies it. Raises BadRequest as `embed` does.
    """
    integer({"top": top}, "top", 1, MAX_FIRST)
    if not isinstance(query, str):
        raise BadRequest(f"query must be a str, got {shown(query)}")
    _check_sizes({"query": query, "prompt": prompt})
    texts = listed("documents", documents)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadRequest(f"documents[{index}] must be a str, got {shown(text)}")
    settings = {"query": query, "truncate": truncate, "prompt": prompt}
    fields = {key: value for key, value in settings.items() if value is not None}
    return _divided(model, "rerank", fields, "documents", texts, deadline_ms)


def listed(name: str, values: Any) -> list[Any]:
    """Returns the values of an argument, which may be any iterable, as a sequence.

    Raises BadRequest if it is not an iterable of texts, or empty.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise BadRequest(f"{name} must be a list of texts, got {shown(values)}")
    items = list(values)
    if not items:
        raise BadRequest(f"{name} is empty, must have at least 1 text")
    return items


def _check_texts(name: str, value: Any) -> None:
    pair = isinstance(value, list | tuple) and len(value) == 2
    if not isinstance(value, str) and not (pair and all(isinstance(text, str) for text in value)):
        raise BadRequest(
            f"{name} must be a str, a pair of them or a list of token ids, got {shown(value)}"
        )


def _check_sizes(texts: Mapping[str, Any]) -> None:
    """Raises TooLarge if a text that is not an input is too long for the body of a call."""
    for name, text in texts.items():
        size = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
        if size > TEXT_AS_BLOB:
            raise TooLarge(
                f"{name} has {size} bytes, at most {TEXT_AS_BLOB} are taken; make it shorter"
            )


def _is_id(value: Any) -> bool:
    """Returns whether a value is an integer, also of NumPy; a boolean is not an integer."""
    if isinstance(value, bool) or _has_items(value):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_list_of_ids(value: Any) -> bool:
    """Returns whether a value is meant as token ids: a list, tuple or array without texts."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not _has_items(value):
        return False
    return len(value) == 0 or not isinstance(value[0], str)


def _has_items(value: Any) -> bool:
    return hasattr(value, "__getitem__") and bool(getattr(value, "shape", True))


def _batches(texts: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the texts or pairs of each call.

    A call has at most MAX_INPUTS texts or pairs, with at most MAX_CALL_TEXT characters together. A
    longer text or pair has a call of its own.
    """
    batch: list[Any] = []
    size = 0
    for text in texts:
        own = len(text) if isinstance(text, str) else sum(map(len, text))
        if batch and (len(batch) == MAX_INPUTS or size + own > MAX_CALL_TEXT):
            yield batch
            batch, size = [], 0
        batch.append(text)
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
    """Returns the calls that send the texts or pairs.

    Each call has the index of its first input in the whole request, which errors name.
    """
    questions, first = [], 0
    for batch in _batches(texts):
        body, blobs = _packed(key, batch)
        call = {**fields, **body, **_begin(first)}
        questions.append(_question(model, task, call, blobs, deadline_ms))
        first += len(batch)
    return questions


def _begin(first: int) -> dict[str, int]:
    """Returns {"first": number of the first input}; {} if this number is 0.

    Pools of older versions do not know the key `first`.
    """
    return {"first": first} if first else {}


def _packed(name: str, batch: Texts) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Returns the texts of a call under the key `name`; long texts are in a blob.

    Raises BadRequest if a text is not Unicode.
    """
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
    lists = [_checked_ids(f"inputs[{index}]", item) for index, item in enumerate(inputs)]
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
    """Returns the token ids of an input. Raises BadRequest naming the first wrong value."""
    if not _is_list_of_ids(value):
        raise BadRequest(f"{name} must be a list of token ids, as others are; got {shown(value)}")
    if len(value) == 0:
        raise BadRequest(f"{name} has no token ids, must have at least 1")
    wrong = next((item for item in value if not _is_id(item) or not 0 <= int(item) < 2**32), None)
    if wrong is not None:
        raise BadRequest(
            f"{name} must have token ids, integers from 0 to {2**32 - 1}, got {shown(wrong)}"
        )
    return [int(item) for item in value]


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
    """Returns the vectors of an answer. Raises ValueError if its blob has a wrong size."""
    data = b"".join(blobs)
    rows, columns = int(body["rows"]), int(body["columns"])
    if len(data) != rows * columns * NUMBER_BYTES:
        raise ValueError(f"{len(data)} bytes for {rows} rows of {columns} numbers")
    return Vectors(data, rows, columns, tuple(body.get("labels") or ()), dict(body["usage"]))


# ---- answers -------------------------------------------------------------------------------------


def joined(parts: Sequence[Vectors]) -> Vectors:
    """Returns the vectors of all calls together. Raises Internal if their widths differ."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(part.columns != first.columns for part in parts):
        widths = sorted({part.columns for part in parts})
        raise Internal(f"the model was changed meanwhile: its vectors have {widths} numbers")
    usage = {key: sum(part.usage.get(key, 0) for part in parts) for key in first.usage}
    data, rows = b"".join(part.data for part in parts), sum(part.rows for part in parts)
    return replace(first, data=data, rows=rows, usage=usage)


def ranked(scores: Vectors, documents: Sequence[str], top: int | None = None) -> Ranking:
    """Returns the documents, best first; with `top` at most `top` documents.

    Documents with equal scores are in the order of the request. Equal documents get the score of
    the first of them: in different batches their computed scores would differ in the last digits.
    """
    computed = _numbers(scores.data)
    first: dict[str, int] = {}
    numbers = [computed[first.setdefault(text, index)] for index, text in enumerate(documents)]
    order = sorted(range(scores.rows), key=lambda index: (-numbers[index], index))
    bound = math.inf if top is None else top
    best = [Ranked(index, numbers[index]) for place, index in enumerate(order) if place < bound]
    return Ranking(best, scores.usage)
