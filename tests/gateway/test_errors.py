"""The pool's errors as HTTP responses."""

from __future__ import annotations

import pytest

from mlxpool.common.errors import ContextExceeded, DeadlineExceeded, ModelLoadFailed, OverQuota
from mlxpool.gateway.anthropic.bodies import error_body
from mlxpool.gateway.errors import HttpError, from_pool_error


def test_a_deadline_before_the_model_is_loaded_is_503_with_the_progress() -> None:
    details = {"model": "m", "load_progress": 0.25}
    error = from_pool_error(DeadlineExceeded("still loading", details=details))
    assert (error.status, error.code, error.retry) == (503, "model_loading", True)
    assert error.headers() == {"retry-after": "1"}
    assert error.ollama_body() == {"error": "still loading", "load_progress": 0.25}
    body = error.openai_body()
    assert body["load_progress"] == 0.25 and body["error"]["code"] == "model_loading"


def test_another_deadline_is_504_without_a_progress() -> None:
    error = from_pool_error(DeadlineExceeded("late"))
    assert (error.status, error.retry) == (504, False)
    assert error.ollama_body() == {"error": "late"}
    assert list(error.openai_body()) == ["error"]


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ({"prompt_tokens": 70, "context": 64}, "prompt is too long: 70 tokens > 63 maximum"),
        (
            {"prompt_bytes": 900, "prompt_tokens_at_least": 300, "context": 64},
            "prompt is too long: 300 tokens > 63 maximum",
        ),
        ({}, "too long"),
    ],
)
def test_a_prompt_that_is_too_long_in_each_interfaces_words(
    details: dict[str, int], told: str
) -> None:
    error = from_pool_error(ContextExceeded("too long", details=details), prompt_field="input")
    assert error_body(error)["error"] == {"type": "invalid_request_error", "message": told}
    assert error.ollama_body() == {"error": "too long"}
    openai_error = error.openai_body()["error"]
    assert (openai_error["code"], openai_error["param"]) == ("context_length_exceeded", "input")
    begin = "This model's maximum context length is 64 tokens: " if details else ""
    assert openai_error["message"] == f"{begin}too long"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (408, "invalid_request_error"), (413, "request_too_large"),
        (429, "rate_limit_error"), (500, "api_error"), (501, "api_error"), (502, "api_error"),
        (503, "overloaded_error"), (504, "timeout_error"),
    ],
)  # fmt: skip
def test_the_types_of_anthropics_errors(status: int, kind: str) -> None:
    error = HttpError(status, "no", "code", request_id="r")
    expected = {"type": kind, "message": "no"}
    assert error_body(error) == {"type": "error", "error": expected, "request_id": "r"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/srv/models/demo/config.json: no JSON", "…/config.json: no JSON"),
        ("cannot read '/srv/a model/x y.bin'", "cannot read '…/x y.bin'"),
        ("~/models/demo cannot be read", "…/demo cannot be read"),
        ("path=/home/pool/demo", "path=…/demo"),
    ],
)
def test_clients_are_told_no_folders_of_the_server(said: str, told: str) -> None:
    for error in (ModelLoadFailed(said), OverQuota(said, retry_after_ms=10)):
        assert from_pool_error(error).message == told


@pytest.mark.parametrize(
    "said",
    [
        "delete files (DELETE /v1/files/ID)",
        "use /api/chat or /v1/messages",
        "https://hooks.example.org/a/b was refused",
        "see docs/models.md and/or 3/4",
    ],
)
def test_what_is_no_folder_stays(said: str) -> None:
    assert from_pool_error(ModelLoadFailed(said)).message == said
