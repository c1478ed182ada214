"""Makes body and blobs of a message from a request in JSON.

Three parts of a request become blobs: long text; the token ids in `tokens`, which is a list of ids,
or a list of such lists in a call; and the files in `images`, in base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from mlxpool.common.checks import is_integer, shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol import images
from mlxpool.common.protocol.decisions import DECIDE
from mlxpool.common.protocol.encoder_calls import pack_texts
from mlxpool.common.protocol.frames import TEXT_AS_BLOB
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.kept.job_work import kind_of
from mlxpool.common.protocol.token_ids import pack_ids

MAX_ID = 2**32 - 1  # the largest token id
TEXTS = ("inputs", "documents")  # keys of calls that are lists of texts

Packed = tuple[dict[str, Any], tuple[bytes, ...]]


def packed_request(request: Mapping[str, Any]) -> Packed:
    """Returns body and blobs of a `generate`, or of the call that `kind` names.

    Raises BadRequest and TooLarge if no message can contain the request. `job_work.parse_work`
    makes the other checks.
    """
    if any(request.get(key) is True for key in ("prompt", "tokens", *TEXTS)):
        raise BadRequest("a request in JSON has no blobs: give texts, and lists of ids")
    kind = kind_of(request)
    return _generate(request) if kind == Generate.kind else _call(kind, request)


def _generate(request: Mapping[str, Any]) -> Packed:
    body, blobs = dict(request), list[bytes]()
    if (packed := _packed_text(body.get("prompt"))) is not None:
        body["prompt"] = True
        blobs.append(packed)
    if (tokens := body.get("tokens")) is not None:
        body["tokens"] = True
        blobs.append(_ids(tokens))
    if (files := body.get(images.KEY)) is not None:
        decoded = _files(files)
        body[images.KEY] = len(decoded)
        blobs += decoded
    return body, tuple(blobs)


def _call(kind: str, request: Mapping[str, Any]) -> Packed:
    body, blobs = dict(request), list[bytes]()
    if kind == DECIDE and (packed := _packed_text(body.get("prompt"))) is not None:
        body["prompt"] = True
        blobs.append(packed)
    for key in TEXTS:
        value = body.get(key)
        if isinstance(value, str):
            body[key] = value = [value]
        if (data := _packed_texts(key, value)) is not None:
            body[key] = True
            blobs.append(data)
    if (tokens := body.get("tokens")) is not None:
        several = isinstance(tokens, list) and all(isinstance(item, list) for item in tokens)
        lists = tokens if several else [tokens]
        blobs.append(b"".join(map(_ids, lists)))
        body["tokens"] = list(map(len, lists))
    return body, tuple(blobs)


def _packed_text(prompt: object) -> bytes | None:
    """Returns a prompt as bytes if it is too long for a message's body, else None."""
    if not isinstance(prompt, str) or 4 * len(prompt) <= TEXT_AS_BLOB:
        return None
    try:
        encoded = prompt.encode()
    except UnicodeError as error:
        raise BadRequest(f"prompt is not Unicode text: {error}") from None
    return encoded if len(encoded) > TEXT_AS_BLOB else None


def _packed_texts(key: str, texts: object) -> bytes | None:
    """Returns texts or pairs of texts as bytes if they are too long for a body, else None."""
    if not isinstance(texts, list):
        return None
    flat = [part for item in texts for part in (item if isinstance(item, list) else [item])]
    if not all(isinstance(part, str) for part in flat):
        return None
    if 4 * sum(map(len, flat)) <= TEXT_AS_BLOB:
        return None
    try:
        return pack_texts(texts)
    except UnicodeError as error:
        raise BadRequest(f"{key} is not Unicode text: {error}") from None


def _ids(tokens: object) -> bytes:
    if not isinstance(tokens, list) or not tokens:
        raise BadRequest(f"tokens must be a list of ids, got {shown(tokens)}")
    for token in tokens:
        if not is_integer(token) or not 0 <= token <= MAX_ID:
            raise BadRequest(f"tokens has {shown(token)}, must be ids from 0 to {MAX_ID}")
    return pack_ids(tokens)


def _files(files: object) -> list[bytes]:
    if not isinstance(files, list):
        raise BadRequest(f"{images.KEY} must be a list of files in base64, got {shown(files)}")
    decoded = []
    for index, file in enumerate(files):
        try:
            decoded.append(base64.b64decode(file, validate=True))
        except (TypeError, ValueError, binascii.Error) as error:
            raise BadRequest(f"{images.KEY}[{index}] is not base64: {error}") from None
    return decoded
