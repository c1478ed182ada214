"""The keyword arguments of submissions: equal in both clients, and sent in messages."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from mlxpool.client import jobs
from mlxpool.client.aio.jobs import AsyncJobMethods
from mlxpool.client.jobs import (
    OF_BATCHES,
    OF_JOBS,
    BatchOptions,
    CallOptions,
    JobOptions,
    SubmitOptions,
)
from mlxpool.client.sync.jobs import JobMethods
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol import decisions, encoder_calls
from mlxpool.common.protocol.kept.job_messages import IDLE, JOB_KEYS
from mlxpool.common.protocol.kept.job_work import OF_POOL


def submitted(**options: Any) -> dict[str, Any]:
    """Returns the body of the `submit` message for a completion with these options."""
    question = jobs.submit("m", "a", None, None, (), cast(SubmitOptions, options))
    return question.content.body() or {}


def called(**options: Any) -> dict[str, Any]:
    """Returns the body of the `submit` message for a call (`embed`) with these options."""
    return jobs.submit_call("embed", "m", cast(CallOptions, options)).content.body() or {}


def test_options_of_calls_are_the_keys_of_all_kinds() -> None:
    keys = set(decisions.KEYS).union(*encoder_calls.KEYS.values()) - {"model", *OF_POOL}
    own = set(CallOptions.__annotations__) - OF_JOBS
    assert own == keys | {"priority", "deadline_ms"}


def test_options_of_jobs_and_batches_are_no_options_of_requests() -> None:
    others = set(GenerateOptions.__annotations__)
    assert not OF_JOBS & others and not OF_BATCHES & others
    assert set(SubmitOptions.__annotations__) == OF_JOBS | others
    assert set(BatchOptions.__annotations__) == OF_BATCHES | others
    for kind in (JobOptions, SubmitOptions, CallOptions, BatchOptions):
        assert not kind.__required_keys__


def test_each_option_of_a_job_is_in_its_message() -> None:
    """In messages the options have the protocol's names, for jobs of any kind."""
    given: dict[str, Any] = {
        "key": "k",
        "keep": 1.5,
        "not_before": 7,
        "notify": "https://h/",
        "note": b"n",
    }
    assert set(given) == OF_JOBS
    for body in (submitted(**given), called(**given, inputs=["a"])):
        assert {name: body[name] for name in JOB_KEYS - {"priority"} if name in body} == {
            "key": "k",
            "keep_ms": 1500,
            "not_before": 7,
            "notify": {"url": "https://h/"},
            "note": b"n",
        }


def test_none_is_not_given() -> None:
    nothing = dict.fromkeys(OF_JOBS)
    whole, plain = submitted(**nothing), submitted()
    assert len(whole.pop("key")) == len(plain.pop("key")) == 2 * jobs.KEY_BYTES
    assert whole == plain
    call, plain = called(**dict.fromkeys(CallOptions.__annotations__)), called()
    assert call.pop("key") != plain.pop("key")
    assert call == plain


@pytest.mark.parametrize("given", ["idle", IDLE])
def test_the_priority_below_all_others_has_a_name(given: str | int) -> None:
    assert submitted(priority=given)["priority"] == IDLE
    assert called(priority=given, inputs=["a"])["priority"] == IDLE


def test_a_kind_that_is_no_call_is_refused() -> None:
    with pytest.raises(BadRequest, match="kind must be one of embed, rerank, classify, decide"):
        jobs.submit_call("generate", "m", {})


@pytest.mark.parametrize("name", [name for name in vars(JobMethods) if not name.startswith("_")])
def test_both_clients_have_the_same_arguments(name: str) -> None:
    ours, others = (
        inspect.signature(getattr(methods, name)) for methods in (JobMethods, AsyncJobMethods)
    )
    assert str(ours.replace(return_annotation="")) == str(others.replace(return_annotation=""))
