"""The lines of output and error files, from the outcomes of the lines of a batch. Pure."""

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
from mlxpool.gateway.openai.batches.lines import AnswerSettings
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
Line = Mapping[str, Any]  # a line of the pool, see lines.pool_line


def result_line(
    row: Mapping[str, Any],
    line: Mapping[str, Any],
    endpoint: str,
    whole: Result | PoolError | None = None,
) -> tuple[bool, bytes]:
    """Returns whether a line was answered, and the line about it for the output or error file.

    `row`: the outcome. `line`: the line in the pool's form, empty if it is missing. `whole`: the
    result that was read from the job because it is too long for the outcome.
    """
    outcome = line_result(row, whole)
    name = outcome.job.hex() if outcome.job else f"line{row['line']}"
    members: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": row["id"]}
    response: dict[str, Any] | None = None
    fault: dict[str, str] | None = None
    answered = outcome.state == "done" and outcome.result is not None
    if answered and not line and endpoint in CALLS:
        code, message = NO_LINE
        fault = {"code": code, "message": message}
    elif answered:
        assert outcome.result is not None
        body = _answer(row, line, endpoint, name, outcome.result)
        response = {"status_code": 200, "request_id": name, "body": body}
    elif outcome.state in NOT_RUN:
        code, message = NOT_RUN[outcome.state]
        fault = {"code": code, "message": message}
    elif outcome.error is not None:
        error = errors.from_pool_error(outcome.error)
        error.request_id = name
        body = error.openai_body()
        response = {"status_code": error.status, "request_id": name, "body": body}
    else:
        fault = {"code": "result_deleted", "message": "the result of this line was deleted"}
    return answered, encode_in_parts({**members, "response": response, "error": fault}) + b"\n"


def _answer(
    row: Mapping[str, Any], line: Mapping[str, Any], endpoint: str, name: str, result: Result
) -> dict[str, Any]:
    """Returns the body that the endpoint would have sent as the answer to the line's request."""
    settings = AnswerSettings.of(line)
    if endpoint in CALLS:
        return call_body(endpoint, line, settings, name, result)
    thinks = (row.get("facts") or {}).get("thinks") is True
    tools = line.get("tools") or settings.tools
    stops = bool((line.get("options") or {}).get("stop"))
    parser = make_parser(
        settings.chat, tools, thinks=thinks, several_calls=settings.several_calls, stops=stops
    )
    events = (*(parser.push(result.text) if result.text else ()), *parser.finish())
    update = ChoiceUpdate(0, events, result.logprobs, result)
    created, model = int(row["submitted"]), settings.model or str(row["model"])
    if endpoint not in (CHATS, COMPLETIONS):
        output = OutputBlocks(call_ids(name))
        output.push(update)
        frame = ResponseFrame(name, created, settings.echoed or {"model": model}, settings.summary)
        return frame.ended(output.blocks, result, 0)
    collected = WholeChoice()
    collected.add(update)
    if endpoint == CHATS:
        choice = chat_choice(0, collected, call_ids(name), logprobs=settings.logprobs)
        head = {"id": f"chatcmpl-{name}", "object": "chat.completion"}
    else:
        logprobs = TextLogprobs().add(collected.logprobs) if settings.logprobs else None
        choice = text_choice(0, collected.text(Content), logprobs, result.reason)
        head = {"id": f"cmpl-{name}", "object": "text_completion"}
    return {
        **head,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage([result], 1),
    }


def call_body(
    endpoint: str, line: Line, settings: AnswerSettings, name: str, result: Result
) -> dict[str, Any]:
    """Returns the answer of an endpoint of fields.CALLS. `name`: the job's id in hex.

    Raises ValueError for the result of another kind of job.
    """
    return BODIES[endpoint](line, settings, name, result)


def _embeddings(line: Line, settings: AnswerSettings, name: str, result: Result) -> dict[str, Any]:
    request = EmbeddingRequest(settings.model, [], settings.as_base64, {})
    return vectors.embeddings_body(request, Vectors.of(result))


def _rerank(line: Line, settings: AnswerSettings, name: str, result: Result) -> dict[str, Any]:
    documents = list(line["documents"])
    ranking = ranked(Vectors.of(result), documents, settings.top)
    request = RerankRequest(settings.model, line["query"], documents, settings.with_documents, {})
    return vectors.rerank_body(request, ranking, f"rerank-{name}")


def _score(line: Line, settings: AnswerSettings, name: str, result: Result) -> dict[str, Any]:
    ranking = ranked(Vectors.of(result), line["documents"])
    scores = [
        ranked_document.score
        for ranked_document in sorted(ranking, key=lambda ranked_document: ranked_document.index)
    ]
    request = ScoreRequest(settings.model, [], [])
    return vectors.score_body(request, scores, ranking.usage, f"score-{name}")


def _classify(line: Line, settings: AnswerSettings, name: str, result: Result) -> dict[str, Any]:
    request = ClassifyRequest(settings.model, [])
    return vectors.classify_body(request, Vectors.of(result), f"classify-{name}")


def _decisions(line: Line, settings: AnswerSettings, name: str, result: Result) -> dict[str, Any]:
    decided = DecisionList.of(result, line["questions"])
    return decisions.decisions_body(
        DecisionRequest(settings.model, "", [], {}), decided, f"decide-{name}"
    )


BODIES: Mapping[str, Callable[[Line, AnswerSettings, str, Result], dict[str, Any]]] = {
    EMBEDDINGS: _embeddings,
    RERANK: _rerank,
    SCORE: _score,
    CLASSIFY: _classify,
    DECISIONS: _decisions,
}
