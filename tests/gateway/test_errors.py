"""The pool's errors as HTTP responses."""

from __future__ import annotations

from mlxpool.common.errors import DeadlineExceeded
from mlxpool.gateway.errors import from_pool_error


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
