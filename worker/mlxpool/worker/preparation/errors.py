"""The errors of requests whose preparation ended early."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from msgspec import Struct

from mlxpool.common.errors import BadRequest, DeadlineExceeded, Internal, OutOfMemory, PoolError
from mlxpool.worker.preparation.limits import (
    GRAMMAR_MEMORY,
    GRAMMAR_SECONDS,
    IMAGE_SECONDS,
    Limits,
)

RETRY_AFTER_MS = 1000  # retry delay if memory is short because of other requests
CANCELLED = Internal("the request was cancelled")


def late(size: int) -> DeadlineExceeded:
    """Returns the error of a request of `size` bytes whose deadline has passed."""
    return DeadlineExceeded(
        f"the deadline passed while a prompt of {size} bytes was prepared (deadline_ms)"
    )


class MemoryParts(Struct, frozen=True):
    """The memory use of a worker and its preparation processes, in bytes, for the error of a job.

    `limit`: the memory limit that they exceed together. `worker`: the memory of the worker.
    `prepare`: the memory of all processes that prepare requests. `own`: the memory of the job's own
    process. `figures`: the memory figures of a heartbeat. `others`: the number of other jobs.
    """

    limit: int
    worker: int
    prepare: int
    own: int
    figures: Mapping[str, int]
    others: int = 0

    @property
    def passes(self) -> bool:
        """Whether the lack of memory will pass: running requests free memory at their end."""
        return self.others > 0 or self.figures.get("kv_used", 0) > 0


def too_much_memory(size: int, parts: MemoryParts) -> OutOfMemory:
    """Returns the error of a request of `size` bytes whose preparation exceeds the memory limit."""
    figures, total = parts.figures, parts.worker + parts.prepare
    uses = [
        f"{words} {figures[name]}"
        for name, words in (
            ("weights", "weights"),
            ("kv", "running requests"),
            ("prefix", "kept prefixes and images"),
        )
        if figures.get(name)
    ]
    inside = f" ({', '.join(uses)})" if uses else ""
    advice = "send it again when other requests have ended" if parts.passes else "send less"
    return OutOfMemory(
        f"there is no memory to prepare the request of {size} bytes: the worker takes"
        f" {parts.worker} bytes{inside}, the processes that prepare requests {parts.prepare}, of"
        f" which {parts.own} for this one; together {total}, and memory_limit is {parts.limit};"
        f" {advice}, or raise memory_limit",
        details={"prompt_bytes": size, "value": total, "bound": parts.limit},
        retry_after_ms=RETRY_AFTER_MS if parts.passes else None,
    )


def error_of_exit(
    code: int, size: int, limits: Limits, *, checks_format: bool = False
) -> PoolError | None:
    """Returns the error of a job whose lane process ended with the exit code `code`.

    None: the process was ended from outside.
    """
    if checks_format and code in (-signal.SIGVTALRM, -signal.SIGABRT):
        return BadRequest(
            f"format: it was not compiled with {GRAMMAR_SECONDS:g} s of processor time and"
            f" {GRAMMAR_MEMORY} bytes of memory: make it simpler"
        )
    if code == -signal.SIGXCPU:
        return BadRequest(
            f"the chat template was not done after {limits.render:g} s of processor time: it was"
            " stopped"
        )
    if code == -signal.SIGPROF:
        return BadRequest(
            f"the tokenizer was not done with {size} bytes after {limits.encoding(size):g} s of"
            " processor time (prepare_limit): it was stopped"
        )
    if code == -signal.SIGVTALRM:
        return BadRequest(
            f"the images of the request were not decoded after {IMAGE_SECONDS:g} s of processor"
            " time: it was stopped; send smaller images, or fewer"
        )
    if code == -signal.SIGABRT:
        return BadRequest(
            f"the tokenizer takes more than {limits.memory} bytes of memory for {size} bytes of"
            " text: it was stopped"
        )
    return None


def ended_too_often(tries: int, code: int) -> BadRequest:
    """Returns the error of a job during which `tries` lane processes ended.

    `code`: the last exit code.
    """
    return BadRequest(f"preparing the request ended its process {tries} times, with code {code}")
