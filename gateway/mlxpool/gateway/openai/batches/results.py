"""The lines of output and error files, from what became of the lines of a batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxpool.client import DecisionList, Result, Vectors
from mlxpool.client.batches.outcome import line_result
from mlxpool.client.vectors import ranked
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.formats import make_parser
from mlxpool.gateway.formats.events import Content
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate, call_ids
from mlxpool.gateway.generation.output_blocks import OutputBlocks
from mlxpool.gateway.json_parts import encode_in_parts
from mlxpool.gateway.openai import decisions, vectors
from mlxpool.gateway.openai.batches.fields import (
    CALLS,
    CHATS,
    CLASSIFY,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    RERANK,
    SCORE,
)
from mlxpool.gateway.openai.batches.lines import Asked
from mlxpool.gateway.openai.decisions import DecisionRequest
from mlxpool.gateway.openai.responses import (
    TextLogprobs,
    WholeChoice,
    chat_choice,
    text_choice,
    usage,
)
from mlxpool.gateway.openai.responses_api.bodies import ResponseFrame
from mlxpool.gateway.openai.vectors import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)

NOT_RUN = {  # state of a line that was not answered -> code of its error, and a message
    "expired": (
        "batch_expired",
        "the batch's completion_window was over before this line's answer",
    ),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line's answer"),
}

NO_LINE = (
    "line_missing",
    "the file of the batch's lines is not stored any more, and this line's answer cannot be given"
    " without its documents, questions and format; the job of the line has its numbers",
)
Line = Mapping[str, Any]  # of the pool, see lines.pool_line


def result_line(
    row: Mapping[str, Any],
    line: Mapping[str, Any],
    endpoint: str,
    whole: Result | PoolError | None = None,
) -> tuple[bool, bytes]:
    """Whether a line was answered, and what the output file, or else the error file, has of it.

    `row` is an outcome, `line` the line of the pool (empty if it is missing), `whole` what was
    fetched of a long answer.
    """
    found = line_result(row, whole)
    name = found.job.hex() if found.job else f"line{row['line']}"
    members: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": row["id"]}
    response: dict[str, Any] | None = None
    fault: dict[str, str] | None = None
    answered = found.state == "done" and found.result is not None
    if answered and not line and endpoint in CALLS:
        code, message = NO_LINE
        fault = {"code": code, "message": message}
    elif answered:
        assert found.result is not None
        body = _answer(row, line, endpoint, name, found.result)
        response = {"status_code": 200, "request_id": name, "body": body}
    elif found.state in NOT_RUN:
        code, message = NOT_RUN[found.state]
        fault = {"code": code, "message": message}
    elif found.error is not None:
        error = errors.from_pool_error(found.error)
        error.request_id = name
        body = error.openai_body()
        response = {"status_code": error.status, "request_id": name, "body": body}
    else:
        fault = {"code": "result_deleted", "message": "the result of this line was deleted"}
    return answered, encode_in_parts({**members, "response": response, "error": fault}) + b"\n"


def _answer(
    row: Mapping[str, Any], line: Mapping[str, Any], endpoint: str, name: str, result: Result
) -> dict[str, Any]:
    """The body that the endpoint would have answered."""
    asked = Asked.of(line)
    if endpoint in CALLS:
        return call_body(endpoint, line, asked, name, result)
    thinks = (row.get("facts") or {}).get("thinks") is True
    tools = line.get("tools") or asked.tools
    stops = bool((line.get("options") or {}).get("stop"))
    parser = make_parser(
        asked.chat, tools, thinks=thinks, several_calls=asked.several_calls, stops=stops
    )
    events = (*(parser.push(result.text) if result.text else ()), *parser.finish())
    update = ChoiceUpdate(0, events, result.logprobs, result)
    created, model = int(row["submitted"]), asked.model or str(row["model"])
    if endpoint not in (CHATS, COMPLETIONS):
        output = OutputBlocks(call_ids(name))
        output.push(update)
        frame = ResponseFrame(name, created, asked.echoed or {"model": model}, asked.summary)
        return frame.ended(output.blocks, result, 0)
    whole = WholeChoice()
    whole.add(update)
    if endpoint == CHATS:
        choice = chat_choice(0, whole, call_ids(name), logprobs=asked.logprobs)
        head = {"id": f"chatcmpl-{name}", "object": "chat.completion"}
    else:
        logprobs = TextLogprobs().add(whole.logprobs) if asked.logprobs else None
        choice = text_choice(0, whole.text(Content), logprobs, result.reason)
        head = {"id": f"cmpl-{name}", "object": "text_completion"}
    return {
        **head,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage([result], 1),
    }


def call_body(endpoint: str, line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    """What an endpoint of fields.CALLS answers. `name`: of the job, in hexadecimal digits.

    Raises ValueError for the result of another kind of job.
    """
    return BODIES[endpoint](line, asked, name, result)


def _embeddings(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    request = EmbeddingRequest(asked.model, [], asked.as_base64, {})
    return vectors.embeddings_body(request, Vectors.of(result))


def _rerank(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    documents = list(line["documents"])
    found = ranked(Vectors.of(result), documents, asked.top)
    request = RerankRequest(asked.model, line["query"], documents, asked.with_documents, {})
    return vectors.rerank_body(request, found, f"rerank-{name}")


def _score(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    found = ranked(Vectors.of(result), line["documents"])
    scores = [one.score for one in sorted(found, key=lambda one: one.index)]
    request = ScoreRequest(asked.model, [], [])
    return vectors.score_body(request, scores, found.usage, f"score-{name}")


def _classify(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    request = ClassifyRequest(asked.model, [])
    return vectors.classify_body(request, Vectors.of(result), f"classify-{name}")


def _decisions(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    found = DecisionList.of(result, line["questions"])
    return decisions.decisions_body(
        DecisionRequest(asked.model, "", [], {}), found, f"decide-{name}"
    )


BODIES: Mapping[str, Callable[[Line, Asked, str, Result], dict[str, Any]]] = {
    EMBEDDINGS: _embeddings,
    RERANK: _rerank,
    SCORE: _score,
    CLASSIFY: _classify,
    DECISIONS: _decisions,
}
