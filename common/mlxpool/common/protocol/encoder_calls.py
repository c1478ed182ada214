"""The calls of encoder models, `embed`, `rerank` and `classify`, and their answer `vectors`.

The broker forwards the body; a worker checks it. Texts are in the body, or in one blob, as a
msgpack array. In `classify` each text may be a pair of texts, an array of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgpack
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.checks import did_you_mean, flag, integer, is_integer, shown
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.token_ids import ID_WIDTH

Task: TypeAlias = Literal["embed", "rerank", "classify"]
TASKS: tuple[Task, ...] = ("embed", "rerank", "classify")
VECTORS = "vectors"  # the kind of the answer to these calls
_OF_ALL = frozenset({"model", "owner", "alone", "truncate", "first"})
_OF_BROKER = frozenset({"owner", "alone"})  # keys that the broker adds
KEYS: Mapping[Task, frozenset[str]] = {
    "embed": _OF_ALL | {"inputs", "tokens", "prompt_name", "prompt", "dimensions", "normalise"},
    "rerank": _OF_ALL | {"query", "documents", "prompt"},
    "classify": _OF_ALL | {"inputs", "tokens"},
}
MAX_INPUTS = 256  # the most texts of one call; a client splits a longer list into calls
MAX_FIRST = 1 << 53
NUMBER_BYTES = 4  # bytes of a number in `vectors`, a little-endian float32

Pair: TypeAlias = tuple[str, str]
Texts: TypeAlias = Sequence[str] | Sequence[Pair]


class EncoderCall(Struct, frozen=True):
    """A worker's view of `embed`, `rerank` or `classify`.

    One of `texts`, `pairs` and `ids` has the inputs: texts, pairs of texts, or lists of token ids
    with the special ids. With `truncate` a too long input loses its end; otherwise it is refused.
    `prompt_name` chooses a prompt of the model; `prompt` is a text that is used instead.
    `dimensions` is the number of dimensions to which a vector of `embed` is cut; with 0 it is not
    cut. `normalise` scales vectors to the length 1; if it is None, the model's setting decides.
    `first` is the number that errors give to the first input; it is above 0 if the client has split
    a request into several calls. `alone` is True if the call may have crashed a worker; it is then
    computed without other calls.
    """

    task: Task
    texts: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    truncate: bool = False
    prompt_name: str = ""
    prompt: str | None = None
    dimensions: int = 0
    normalise: bool | None = None
    first: int = 0
    alone: bool = False
    owner: str = ""

    @property
    def count(self) -> int:
        """The number of inputs."""
        return len(self.texts) + len(self.pairs) + len(self.ids)

    @property
    def size(self) -> int:
        """Characters of the texts, and bytes of the ids."""
        texts = sum(map(len, self.texts)) + sum(len(a) + len(b) for a, b in self.pairs)
        return texts + ID_WIDTH * sum(map(len, self.ids))

    @classmethod
    def parse(cls, task: Task, body: Mapping[str, Any], blobs: Sequence[bytes]) -> EncoderCall:
        """Checks a call. Raises BadRequest naming the key, its value and its bound."""
        check_keys(task, body)
        owner = body.get("owner")
        call = cls(
            task,
            truncate=flag(body, "truncate", False),
            prompt_name=_text(body, "prompt_name") or "",
            prompt=_text(body, "prompt"),
            dimensions=_dimensions(body),
            normalise=None if body.get("normalise") is None else flag(body, "normalise", False),
            first=integer(body, "first", 0, MAX_FIRST) or 0,
            alone=body.get("alone") is True,
            owner=owner if isinstance(owner, str) else "",
        )
        return _with_inputs(call, body, blobs)


def check_keys(task: Task, body: Mapping[str, Any]) -> None:
    """Raises BadRequest for an unknown key, or for two keys that exclude each other.

    A key whose value is nil counts as absent.
    """
    unknown = next((key for key in body if key not in KEYS[task] and body[key] is not None), None)
    if unknown is not None:
        hint = did_you_mean(str(unknown), KEYS[task] - _OF_BROKER)
        raise BadRequest(f"{task} has no key {unknown!r:.60}{hint}")
    for key, other in (("inputs", "tokens"), ("prompt", "prompt_name")):
        if body.get(key) is not None and body.get(other) is not None:
            raise BadRequest(f"{task} takes one of {key} and {other}, got both")


def _with_inputs(call: EncoderCall, body: Mapping[str, Any], blobs: Sequence[bytes]) -> EncoderCall:
    if call.task == "rerank":
        query = body.get("query")
        if not isinstance(query, str):
            raise BadRequest(f"query must be a text, got {shown(query)}")
        documents = _texts(body, "documents", blobs, pairs=False)
        return replace(call, pairs=tuple((query, document) for document in documents))
    if body.get("tokens") is not None:
        return replace(call, ids=_ids(body["tokens"], blobs))
    inputs = _texts(body, "inputs", blobs, pairs=call.task == "classify")
    if isinstance(inputs[0], str):
        return replace(call, texts=inputs)
    return replace(call, pairs=inputs)


def _texts(body: Mapping[str, Any], key: str, blobs: Sequence[bytes], *, pairs: bool) -> Any:
    """Returns the texts of a key; or its pairs of texts, if `pairs` are allowed."""
    raw = body.get(key)
    if raw is True:
        raw = _unpacked(key, blobs)
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_INPUTS:
        got = f"{len(raw)}" if isinstance(raw, list) else shown(raw)
        raise BadRequest(
            f"{key} must be a list of 1 to {MAX_INPUTS} texts, or true with a blob; got {got}"
        )
    if pairs and isinstance(raw[0], list):
        return tuple(_pair(f"{key}[{index}]", item) for index, item in enumerate(raw))
    for index, item in enumerate(raw):
        if not isinstance(item, str):
            raise BadRequest(f"{key}[{index}] must be a text, got {shown(item)}")
    return tuple(raw)


def _pair(name: str, raw: object) -> Pair:
    if not isinstance(raw, list) or len(raw) != 2 or not all(isinstance(text, str) for text in raw):
        raise BadRequest(f"{name} must be a pair of texts, as the first input is; got {shown(raw)}")
    return raw[0], raw[1]


def _unpacked(key: str, blobs: Sequence[bytes]) -> object:
    if not blobs:
        raise BadRequest(f"{key} is true, but the message has no blob")
    try:
        return msgpack.unpackb(blobs[0], raw=False, max_array_len=MAX_INPUTS, max_map_len=0)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BadRequest(
            f"the blob of {key} is no msgpack array of at most {MAX_INPUTS} texts: {error!r:.100}"
        ) from None


def _ids(lengths: object, blobs: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    """Returns the lists of ids in a blob; `lengths` are their lengths."""
    if not isinstance(lengths, list) or not 1 <= len(lengths) <= MAX_INPUTS:
        got = f"{len(lengths)}" if isinstance(lengths, list) else shown(lengths)
        raise BadRequest(f"tokens must be a list of 1 to {MAX_INPUTS} lengths, got {got}")
    if not all(is_integer(length) and length > 0 for length in lengths):
        raise BadRequest(f"tokens must have lengths of at least 1, got {shown(lengths)}")
    packed = b"".join(blobs[:1])
    if ID_WIDTH * sum(lengths) != len(packed):
        raise BadRequest(
            f"tokens has lengths of {sum(lengths)} ids in all, the blob has {len(packed)} bytes,"
            f" must have {ID_WIDTH} for each id"
        )
    view, inputs, begin = memoryview(packed).cast("I"), [], 0
    for length in lengths:
        inputs.append(tuple(view[begin : begin + length]))
        begin += length
    return tuple(inputs)


def _dimensions(body: Mapping[str, Any]) -> int:
    """Returns the number of dimensions to which a vector is cut; 0 means that it is not cut."""
    value = body.get("dimensions")
    if value is None:
        return 0
    if not is_integer(value) or value < 1:
        raise BadRequest(f"dimensions must be an integer of at least 1, got {shown(value)}")
    return value


def _text(body: Mapping[str, Any], key: str) -> str | None:
    value = body.get(key)
    if not isinstance(value, str | None):
        raise BadRequest(f"{key} must be a text, got {shown(value)}")
    return value


def pack_texts(texts: Texts) -> bytes:
    """Returns the blob of texts, or of pairs. Raises TooLarge naming its size and the bound."""
    data: bytes = msgpack.packb(list(texts))
    if len(data) > MAX_BLOB:
        raise TooLarge(
            f"the inputs have {len(data)} bytes, a call takes {MAX_BLOB}; give fewer or shorter"
        )
    return data
