"""Lines that a batch's deadline ended are in the batch's error file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.common.errors import DeadlineExceeded
from mlxpool.gateway.openai.batches.results import result_line

END = {"kind": "error", "body": DeadlineExceeded("late").body()}


@pytest.mark.parametrize("job", [{}, {"job": b"j" * 16, "whole": True}], ids=["no job", "a job"])
def test_a_line_is_expired_whether_it_was_a_job_or_not(job: dict[str, Any]) -> None:
    row = {"line": 3, "id": "l3", "state": "expired", "end": END, **job}
    answered, data = result_line(row, {}, "/v1/chat/completions")
    record = json.loads(data)
    assert not answered and record["custom_id"] == "l3" and record["response"] is None
    assert record["error"]["code"] == "batch_expired"
