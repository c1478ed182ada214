"""The keyword arguments of `submit`, `submit_call` and `submit_batch`, as types.

Everywhere None is the same as not given. An option that is added here is one of the blocking client
and of that for asyncio; jobs.py and batches/settings.py make messages of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from mlxpool.common.options import GenerateOptions

OnSent = Callable[[int], None]  # gets the bytes that were sent so far


class JobOptions(TypedDict, total=False):
    """What is said of a job itself, whatever it computes."""

    key: str | None  # names the job; default: a new one is drawn
    keep: float | None  # seconds that the result stays after the end; default: `job_keep`
    not_before: float | None  # earliest time of its begin, as of `time.time()`
    notify: str | None  # the URL to which its end is posted
    note: bytes | None  # up to 64 KiB that `submitted` returns


class SubmitOptions(GenerateOptions, JobOptions, total=False):
    """Keyword arguments of `submit`."""


class CallOptions(JobOptions, total=False):
    """Keyword arguments of `submit_call`: those of the job, then the keys of a call."""

    priority: int | str | None  # 0 to 2, 2 is first; -1 or "idle": when nothing else waits
    deadline_ms: int | None  # milliseconds from acceptance to the end
    inputs: Sequence[str] | Sequence[Sequence[str]] | None  # texts, or pairs of texts
    tokens: Sequence[int] | Sequence[Sequence[int]] | None  # token ids in the place of `inputs`
    query: str | None  # of `rerank`
    documents: Sequence[str] | None  # of `rerank`
    prompt: str | None  # of `embed` and `rerank`, before each text; of `decide`, the text itself
    prompt_name: str | None  # of `embed`: one of the model's prompts
    dimensions: int | None  # of `embed`: how many numbers of a vector are kept; 0: all
    normalise: bool | None  # of `embed`: vectors of the length 1
    truncate: bool | None  # a longer input loses its end; otherwise it is refused
    questions: Sequence[Mapping[str, Any]] | None  # of `decide`
    temperature: float | None  # of `decide`: divides the logarithms of probabilities


class BatchOptions(GenerateOptions, total=False):
    """Keyword arguments of `submit_batch`: the batch's own; the others hold for its lines."""

    key: str | None  # names the batch; default: a new one is drawn
    keep: float | None  # seconds that the results stay after the end of the batch
    deadline: float | None  # seconds after which unfinished lines expire
    metadata: Mapping[str, Any] | None  # a map of your own
    notify: str | None  # the URL to which the end of the batch is posted
    check: bool | None  # false: invalid lines are listed as failed
    on_sent: OnSent | None  # is called with the number of bytes sent


OF_JOBS = frozenset(JobOptions.__annotations__)
OF_BATCHES = frozenset(BatchOptions.__annotations__) - frozenset(GenerateOptions.__annotations__)
