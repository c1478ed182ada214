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
    keep: float | None  # seconds for which the result stays after the end
    not_before: float | None  # it does not begin before this time, as of `time.time()`
    notify: str | None  # the URL to which its end is posted
    note: bytes | None  # up to 64 KiB of the program's own, which `submitted` returns


class SubmitOptions(GenerateOptions, JobOptions, total=False):
    """Keyword arguments of `submit`."""


class CallOptions(JobOptions, total=False):
    """Keyword arguments of `submit_call`: those of the job, then the keys of a call."""

    priority: int | str | None  # 0 to 2, 2 goes first; -1 or "idle": when nothing else waits
    deadline_ms: int | None  # milliseconds from acceptance to the end
    inputs: Sequence[str] | Sequence[Sequence[str]] | None  # texts, or pairs of texts
    tokens: Sequence[int] | Sequence[Sequence[int]] | None  # token ids in the place of `inputs`
    query: str | None  # of `rerank`
    documents: Sequence[str] | None  # of `rerank`
    prompt: str | None  # of `embed` and `rerank`, before each text; of `decide`, the text itself
    prompt_name: str | None  # of `embed`: one of the model's prompts
    dimensions: int | None  # of `embed`: numbers of a vector that are kept; 0: all
    normalise: bool | None  # of `embed`: whether vectors get the length 1
    truncate: bool | None  # a longer input loses its end; otherwise it is refused
    questions: Sequence[Mapping[str, Any]] | None  # of `decide`
    temperature: float | None  # of `decide`: divides the logarithms of probabilities


class BatchOptions(GenerateOptions, total=False):
    """Keyword arguments of `submit_batch`: the batch's own; the others hold for its lines."""

    key: str | None  # names the batch; default: a new one is drawn
    keep: float | None  # seconds for which the results stay after the end of the batch
    deadline: float | None  # seconds after which what is not done expires
    metadata: Mapping[str, Any] | None  # a map of your own
    notify: str | None  # the URL to which the end of the batch is posted
    check: bool | None  # false: bad lines are listed as failed; else the first one raises
    on_sent: OnSent | None  # is called with the bytes that were sent so far


OF_JOBS = frozenset(JobOptions.__annotations__)
OF_BATCHES = frozenset(BatchOptions.__annotations__) - frozenset(GenerateOptions.__annotations__)
