"""Tests the check of a format in a lane (a preparing process), and the end of that process."""

from __future__ import annotations

import signal

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.preparation.errors import error_of_exit
from mlxpool.worker.preparation.jobs import (
    Checked,
    CheckFormat,
    Job,
    Result,
    Unpacker,
    pack,
    perform,
    unpack,
)
from mlxpool.worker.preparation.limits import Limits
from support.constrained_answers import demo

RIGHT = {"type": "regex", "pattern": "a+"}
WRONG = {"type": "regex", "pattern": "("}


def sent(message: Job | Result) -> Job | Result:
    """Returns the message after packing and unpacking, as the other process receives it."""
    (fields,) = Unpacker().feed(pack(message))
    received: Job | Result = unpack(fields)
    return received


def test_a_check_travels_to_a_lane_and_back() -> None:
    job = sent(CheckFormat(RIGHT))
    assert job == CheckFormat(RIGHT)
    assert sent(perform(demo()[1], CheckFormat(RIGHT))) == Checked()
    error = sent(perform(demo()[1], CheckFormat(WRONG)))
    assert isinstance(error, BadRequest) and "unclosed group" in error.message


@pytest.mark.parametrize("number", [signal.SIGVTALRM, signal.SIGABRT])
def test_a_check_over_its_bounds_is_the_formats_fault(number: int) -> None:
    error = error_of_exit(-number, 10, Limits(), checks_format=True)
    assert isinstance(error, BadRequest)
    assert error.message.startswith("format: it was not compiled with 1 s of processor time")
    other = error_of_exit(-number, 10, Limits())
    assert other is not None and "format" not in other.message


def test_a_check_that_was_ended_from_outside_is_tried_again() -> None:
    assert error_of_exit(-signal.SIGKILL, 10, Limits(), checks_format=True) is None
