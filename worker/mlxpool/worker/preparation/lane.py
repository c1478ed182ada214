"""A lane: a child process of the fork server that performs jobs, one after the other.

If a job takes too much processor time, the default action of a signal ends the lane, even inside
native code: SIGXCPU for a chat template, SIGPROF for the tokenizer, and SIGVTALRM for a request's
images or its format. If a template or an image needs too much memory, an exception is raised. If a
tokenizer or a format needs too much memory, SIGABRT ends the lane.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxpool.worker.encoders.inputs import EncodeInputs, EncoderInput
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.preparation.jobs import (
    CheckFormat,
    EncoderFunctions,
    pack,
    perform,
    receive,
    unpack,
)
from mlxpool.worker.preparation.limits import (
    GRAMMAR_MEMORY,
    GRAMMAR_SECONDS,
    IMAGE_MEMORY,
    IMAGE_SECONDS,
    SHORT_TEXT,
    SHORT_TIME,
    Limits,
)
from mlxpool.worker.prompt.chat_template.sandbox import MAX_MEMORY
from mlxpool.worker.prompt.text_model import RenderedChat, TextModel

MIN_TIMER = 0.001  # seconds; 0 would set no timer
OOM_SCORE = 500  # if memory runs out, the kernel kills a lane before its worker


def serve(worker: socket.socket, text: TextModel | EncoderFunctions, limits: Limits) -> None:
    """Performs jobs until the worker closes the connection or a job was long.

    After a long job the process ends, to free its memory and because it cannot leave SCHED_IDLE.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    bounds = Bounds(limits)
    bounded = (
        BoundedEncoderText(text, bounds)
        if isinstance(text, EncoderFunctions)
        else BoundedText(text, bounds)
    )
    with contextlib.suppress(ConnectionError):
        for fields in receive(worker):
            bounds.begin_job()
            job = unpack(fields)
            with bounds.grammar() if isinstance(job, CheckFormat) else contextlib.nullcontext():
                result = perform(bounded, job)
            worker.sendall(pack(result))
            if bounds.worn:
                return


def _become_idle_class() -> None:
    """Moves this process irreversibly to SCHED_IDLE, if the system has this class.

    A process with a higher nice value still gets whole time slices of a core now and then, and all
    threads of a matrix product wait for the thread that lost its core. SCHED_IDLE is below every
    nice value. An unprivileged process cannot leave this class again.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Bounds:
    """Limits of time and memory for calls in this process.

    `worn`: a call was long, so the process has to end after its job.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._base = _address_space()
        self._image_seconds = IMAGE_SECONDS  # seconds left for the images of this job
        self.worn = False
        signal.signal(signal.SIGPROF, self._lower_priority)

    def begin_job(self) -> None:
        """Begins a job with the whole time limit for its images."""
        self._image_seconds = IMAGE_SECONDS

    def _lower_priority(self, number: int = 0, frame: object = None) -> None:
        _become_idle_class()
        self.worn = True

    @contextmanager
    def template(self) -> Iterator[None]:
        """Returns a context with the limits of a chat template.

        After SHORT_TIME in the context, the priority is lowered.
        """
        with (
            _memory_limit(self._base + MAX_MEMORY),
            _processor_limit(self._limits.render),
            _timer(signal.ITIMER_PROF, SHORT_TIME),
        ):
            yield

    @contextmanager
    def image(self) -> Iterator[None]:
        """Returns a context with the memory limit of one image.

        The time limit is the job's limit for all its images minus the time of its earlier images.
        """
        with (
            _memory_limit(self._base + IMAGE_MEMORY),
            _timer(signal.ITIMER_PROF, SHORT_TIME),
        ):
            signal.setitimer(signal.ITIMER_VIRTUAL, self._image_seconds)
            try:
                yield
            finally:  # an expired timer would have ended this process
                left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                self._image_seconds = max(left, MIN_TIMER)

    @contextmanager
    def grammar(self) -> Iterator[None]:
        """Returns a context with the limits of the check of a format."""
        with (
            _memory_limit(self._base + GRAMMAR_MEMORY),
            _timer(signal.ITIMER_VIRTUAL, GRAMMAR_SECONDS),
            _timer(signal.ITIMER_PROF, SHORT_TIME),
        ):
            yield

    @contextmanager
    def tokenizer(self, size: int) -> Iterator[None]:
        """Returns a context with the limits of the tokenizer for a text of `size` characters."""
        if size > SHORT_TEXT and not self.worn:
            self._lower_priority()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        try:
            with (
                _memory_limit(self._base + self._limits.memory),
                _timer(signal.ITIMER_PROF, self._limits.encoding(size)),
            ):
                yield
        finally:
            signal.signal(signal.SIGPROF, self._lower_priority)


class BoundedText:
    """A TextModel whose calls have limits of time and memory."""

    def __init__(self, text: TextModel, bounds: Bounds) -> None:
        self._text = text
        self._bounds = bounds
        self.max_bytes_per_token = text.max_bytes_per_token
        self.images = text.images
        self.controls = text.controls

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        now: float,
        think: bool | str | None,
        *,
        continues: bool = False,
    ) -> RenderedChat:
        """Renders a chat within the limits of a chat template; see TextModel."""
        with self._bounds.template():
            return self._text.render(messages, tools, now, think, continues=continues)

    def infill(self, text: str, suffix: str) -> list[int]:
        """Tokenizes a prompt with a gap within the limits of the tokenizer; see TextModel."""
        with self._bounds.tokenizer(len(text) + len(suffix)):
            return self._text.infill(text, suffix)

    def piece(self, token: int) -> bytes:
        """Returns the bytes of a token, without limits."""
        return self._text.piece(token)

    def encode(self, text: str, cuts: Sequence[int] = (), *, begins: bool = True) -> list[int]:
        """Tokenizes a text within the limits of the tokenizer; see TextModel."""
        with self._bounds.tokenizer(len(text)):
            return self._text.encode(text, cuts, begins=begins)

    def read_image(self, data: bytes, index: int) -> PreparedImage:
        """Decodes an image within the limits of images; see TextModel.

        The time limit is for all images of a job together.
        """
        with self._bounds.image():
            return self._text.read_image(data, index)

    def restore_at(self, text: str, messages_end: int, ids: Sequence[int]) -> int:
        """Returns the number of ids before the generation prompt, within the tokenizer's limits."""
        with self._bounds.tokenizer(len(text)):
            return self._text.restore_at(text, messages_end, ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to text within the limits of the tokenizer."""
        with self._bounds.tokenizer(len(ids)):
            return self._text.decode(ids)


class BoundedEncoderText:
    """EncoderFunctions whose calls have limits of time and memory."""

    def __init__(self, text: EncoderFunctions, bounds: Bounds) -> None:
        self._text = text
        self._bounds = bounds

    def encode_inputs(self, job: EncodeInputs) -> Sequence[EncoderInput]:
        """Returns the inputs of texts or pairs, within the limits of the tokenizer."""
        with self._bounds.tokenizer(job.size):
            return self._text.encode_inputs(job)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, within the limits of the tokenizer."""
        with self._bounds.tokenizer(len(text)):
            return self._text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to text within the limits of the tokenizer."""
        with self._bounds.tokenizer(len(ids)):
            return self._text.decode(ids)


@contextmanager
def _timer(which: int, seconds: float) -> Iterator[None]:
    signal.setitimer(which, seconds)
    try:
        yield
    finally:
        signal.setitimer(which, 0)


@contextmanager
def _processor_limit(seconds: float) -> Iterator[None]:
    """Limits the processor time of the `with` block; the limit is rounded up to whole seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(time.process_time() + seconds)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


@contextmanager
def _memory_limit(address_space: int) -> Iterator[None]:
    """Limits the process's address space during the `with` block, except on macOS."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (address_space, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _address_space() -> int:
    """Returns the bytes of this process's address space; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
