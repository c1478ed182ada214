"""The pool's errors as HTTP responses."""

from __future__ import annotations

import pytest

from mlxpool.common.errors import ContextExceeded, DeadlineExceeded
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
    found = error.openai_body()["error"]
    assert (found["code"], found["param"]) == ("context_length_exceeded", "input")
    begin = "This model's maximum context length is 64 tokens: " if details else ""
    assert found["message"] == f"{begin}too long"


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
    told = {"type": kind, "message": "no"}
    assert error_body(error) == {"type": "error", "error": told, "request_id": "r"}
