"""Requests and responses of /v1/embeddings, /v1/rerank, /v1/score and /v1/classify.

/v1/embeddings is OpenAI's, /v1/rerank Cohere's and Jina's; the other endpoints are vLLM's. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.client import Ranking, Vectors
from mlxpool.common.checks import shown
from mlxpool.common.protocol.encoder_calls import NUMBER_BYTES
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.openai.fields import (
    CLASSIFY,
    CUTS,
    EMBEDDINGS,
    FORMATS,
    MAX_INPUTS,
    MAX_TOP,
    RERANK,
    SCORE,
)

# Groups of equal types of inputs: names in Cohere's, NVIDIA's and Voyage's clients, and names of
# prompts.
SAME_TYPES = (("query", "search_query"), ("document", "passage", "search_document"))


class EmbeddingRequest(Struct, frozen=True):
    """A checked request to /v1/embeddings. `settings`: keyword arguments of the client's `embed`.

    `input_type`: the type of the texts, such as query. It is "" if the request has no type, or
    names a prompt itself.
    """

    model: str
    inputs: list[Any]
    as_base64: bool
    settings: Mapping[str, Any]
    input_type: str = ""


class RerankRequest(Struct, frozen=True):
    """A checked request to /v1/rerank. `settings`: keyword arguments of the client's `rerank`."""

    model: str
    query: str
    documents: list[str]
    with_documents: bool
    settings: Mapping[str, Any]


class ScoreRequest(Struct, frozen=True):
    """A checked request to /v1/score.

    `queries` has one text for all `documents`, or a text for each document.
    """

    model: str
    queries: list[str]
    documents: list[str]
    settings: Mapping[str, Any] = field(default_factory=dict)


class ClassifyRequest(Struct, frozen=True):
    """A checked request to /v1/classify.

    `settings`: keyword arguments of the client's `classify`.
    """

    model: str
    inputs: list[str]
    settings: Mapping[str, Any] = field(default_factory=dict)


# ---- requests --------------------------------------------------------------------------------


def embeddings(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Checks the body of a request to /v1/embeddings. Raises HttpError naming the field."""
    body = EMBEDDINGS.check(body)
    encoding = fields.text(body, "encoding_format", "float")
    if encoding not in FORMATS:
        message = f"'encoding_format' is {shown(encoding)}, must be one of {', '.join(FORMATS)}"
        raise bad_request(message, "encoding_format")
    settings = {
        **_truncate(body),
        "dimensions": fields.integer(body, "dimensions", 1),
        "normalise": _normalise(body),
        "prompt_name": fields.text(body, "prompt_name", "") or None,
    }
    inputs = _inputs(body.get("input"))
    kind = fields.text(body, "input_type", "") if settings["prompt_name"] is None else ""
    return EmbeddingRequest(
        fields.text(body, "model"), inputs, encoding == "base64", settings, kind
    )


def prompt_of_type(input_type: str, prompts: Sequence[str]) -> str | None:
    """Returns the name in `prompts` that is `input_type` or a synonym of it, or None."""
    kind = input_type.lower()
    same = next((group for group in SAME_TYPES if kind in group), ())
    return next((name for name in (kind, *same) if name in prompts), None)


def rerank(body: Mapping[str, Any]) -> RerankRequest:
    """Checks the body of a request to /v1/rerank. Raises HttpError naming the field."""
    body = RERANK.check(body)
    settings = {
        **_truncate(body),
        "top": fields.integer(body, "top_n", 1, MAX_TOP),
        "prompt": fields.text(body, "instruction", "") or None,
    }
    documents = [_document(document) for document in _listed("documents", body.get("documents"))]
    return RerankRequest(
        fields.text(body, "model"),
        fields.text(body, "query"),
        _texts("documents", documents),
        fields.flag(body, "return_documents", True),
        settings,
    )


def score(body: Mapping[str, Any]) -> ScoreRequest:
    """Checks the body of a request to /v1/score. Raises HttpError naming the field."""
    body = SCORE.check(body)
    queries, documents = (
        _texts(name, [raw] if isinstance(raw := body.get(name), str) else _listed(name, raw))
        for name in ("text_1", "text_2")
    )
    if len(queries) not in (1, len(documents)):
        allowed = "1" if len(documents) == 1 else f"1, or {len(documents)} as 'text_2' has"
        message = f"'text_1' has {len(queries)} texts, must have {allowed}"
        raise bad_request(message, "text_1")
    return ScoreRequest(fields.text(body, "model"), queries, documents, _truncate(body))


def classify(body: Mapping[str, Any]) -> ClassifyRequest:
    """Checks the body of a request to /v1/classify. Raises HttpError naming the field."""
    body = CLASSIFY.check(body)
    raw_input = body.get("input")
    inputs = [raw_input] if isinstance(raw_input, str) else _listed("input", raw_input)
    return ClassifyRequest(fields.text(body, "model"), _texts("input", inputs), _truncate(body))


def _normalise(body: Mapping[str, Any]) -> bool | None:
    """Whether vectors get the length 1; None if the model decides."""
    if body.get("normalize") is None:
        return None
    return fields.flag(body, "normalize", True)


def _truncate(body: Mapping[str, Any]) -> dict[str, bool]:
    truncate = body.get("truncate")
    if isinstance(truncate, str):
        if truncate not in CUTS:
            names = ", ".join(CUTS)
            message = f"'truncate' is {shown(truncate)}, must be true, false or one of {names}"
            raise bad_request(f"{message}: texts are cut at their end", "truncate")
        return {"truncate": CUTS[truncate]}
    return {"truncate": fields.flag(body, "truncate", False)}


def _document(document: Any) -> Any:
    """Returns the text of a document, which may be text or a map with `text`."""
    return document.get("text") if isinstance(document, Mapping) else document


def _inputs(raw: Any) -> list[Any]:
    """Returns the inputs as a list: texts, or lists of token ids."""
    if isinstance(raw, str) or _is_ids(raw):
        raw = [raw]
    inputs = _listed("input", raw)
    if all(isinstance(item, str) for item in inputs):
        return _texts("input", inputs)
    if all(_is_ids(item) for item in inputs):
        return inputs
    raise bad_request(
        "'input' must be text, a list of token ids, or a list of either, none of them empty",
        "input",
    )


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(id_) is int and 0 <= id_ < 2**32 for id_ in value)
    )


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        got = f"{len(value)}" if isinstance(value, list) else shown(value)
        raise bad_request(f"{name!r} must be a list of 1 to {MAX_INPUTS} texts, got {got}", name)
    return value


def _texts(name: str, values: Sequence[Any]) -> list[str]:
    for index, text in enumerate(values):
        if not isinstance(text, str) or not text:
            raise bad_request(f"{name}[{index}] must be text, not empty, got {shown(text)}", name)
    return list(values)


# ---- responses -------------------------------------------------------------------------------


def embeddings_body(request: EmbeddingRequest, vectors: Vectors) -> dict[str, Any]:
    """Returns the response of /v1/embeddings."""
    size = vectors.columns * NUMBER_BYTES
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vectors.data[index * size : (index + 1) * size]).decode()
            if request.as_base64
            else vectors[index],
        }
        for index in range(vectors.rows)
    ]
    return {"object": "list", "data": data, "model": request.model, "usage": dict(vectors.usage)}


def rerank_body(request: RerankRequest, ranking: Ranking, name: str) -> dict[str, Any]:
    """Returns the response of /v1/rerank, best first; `name` is its id."""
    results = []
    for ranked in ranking:
        result: dict[str, Any] = {"index": ranked.index, "relevance_score": ranked.score}
        if request.with_documents:
            result["document"] = {"text": request.documents[ranked.index]}
        results.append(result)
    usage = dict(ranking.usage)
    return {"id": name, "model": request.model, "usage": usage, "results": results}


def score_body(
    request: ScoreRequest, scores: Sequence[float], usage: Mapping[str, int], name: str
) -> dict[str, Any]:
    """Returns the response of /v1/score, in the order of the texts."""
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    answer = {"id": name, "object": "list", "model": request.model, "data": data}
    return {**answer, "usage": dict(usage)}


def classify_body(request: ClassifyRequest, vectors: Vectors, name: str) -> dict[str, Any]:
    """Returns the response of /v1/classify: each text's likeliest label and all probabilities."""
    data = []
    for index, row in enumerate(vectors):
        best = max(range(vectors.columns), key=row.__getitem__)
        label = vectors.labels[best]
        data.append({"index": index, "label": label, "probs": row, "num_classes": vectors.columns})
    answer = {"id": name, "object": "list", "model": request.model, "data": data}
    return {**answer, "labels": list(vectors.labels), "usage": dict(vectors.usage)}
