"""The errors of requests whose preparation ended early."""

from __future__ import annotations

import signal

from mlxpool.common.errors import BadRequest, DeadlineExceeded, Internal, OutOfMemory, PoolError
from mlxpool.worker.preparation.limits import (
    ENCODE_MEMORY,
    GRAMMAR_MEMORY,
    GRAMMAR_SECONDS,
    IMAGE_SECONDS,
    Limits,
)

CANCELLED = Internal("the request was cancelled")


def late(size: int) -> DeadlineExceeded:
    """The deadline of a request of `size` bytes has passed."""
    return DeadlineExceeded(
        f"the deadline passed while a prompt of {size} bytes was prepared (deadline_ms)"
    )


def too_much_memory(size: int, own: int, total: int, limit: int) -> OutOfMemory:
    """A lane takes `own` bytes, and with it the worker takes `total`, which is over `limit`."""
    return OutOfMemory(
        f"preparing the prompt of {size} bytes takes {own} bytes of memory, the worker with it"
        f" {total}, and memory_limit is {limit}; shorten the prompt, or raise the limit",
        details={"prompt_bytes": size, "value": total, "bound": limit},
    )


def error_of_exit(
    code: int, size: int, limits: Limits, *, checks_format: bool = False
) -> PoolError | None:
    """What the exit code of a lane means for its job; None: it was ended from outside."""
    if checks_format and code in (-signal.SIGVTALRM, -signal.SIGABRT):
        return BadRequest(
            f"format: it was not compiled with {GRAMMAR_SECONDS:g} s of processor time and"
            f" {GRAMMAR_MEMORY} bytes of memory: make it simpler"
        )
    if code == -signal.SIGALRM:
        return BadRequest(
            f"the chat template was not done after {limits.render:g} s: it was stopped"
        )
    if code == -signal.SIGPROF:
        return BadRequest(
            f"the tokenizer was not done with {size} bytes after {limits.encoding(size):g} s of"
            " processor time (prepare_limit): it was stopped"
        )
    if code == -signal.SIGVTALRM:
        return BadRequest(
            f"an image was not decoded after {IMAGE_SECONDS:g} s of processor time: it was stopped;"
            " make it smaller"
        )
    if code == -signal.SIGABRT:
        return BadRequest(
            f"the tokenizer takes more than {ENCODE_MEMORY} bytes of memory for {size} bytes of"
            " text: it was stopped"
        )
    return None


def ended_too_often(tries: int, code: int) -> BadRequest:
    """Each lane that had the job was ended from outside, or by a fault of the job."""
    return BadRequest(f"preparing the request ended its process {tries} times, with code {code}")
