"""Makes the constraints of requests with a format, in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlxpool.common.errors import Internal, PoolError
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.vocabulary import load_vocabulary
from mlxpool.worker.preparation.jobs import Result
from mlxpool.worker.prompt.text_model import Opened, TokenTable


class Formats:
    """Makes the constraints of answers with a format, for one model, in a separate thread."""

    def __init__(self, opened: Opened) -> None:
        """`opened`: the model, which must have a tokenizer file."""
        text, source = opened.text, opened.source
        assert source is not None and isinstance(text, TokenTable)
        load = partial(load_vocabulary, source, text.pieces, opened.eos)
        vocabulary = f"{source.sha256} {opened.vocab_size} {sorted(opened.eos)}"
        self._compiler = Compiler(load, vocabulary, opened.eos, opened.vocab_size)
        self._loading: threading.Event | None = None  # set at the end of the load; None: not begun

    def load(self) -> None:
        """Begins to load the vocabulary, if not begun before."""
        if self._loading is not None:
            return
        loading = self._loading = threading.Event()

        def perform() -> None:
            try:
                self._compiler.load()
            finally:  # after a failed load, requests with a format raise the error
                loading.set()

        self._compiler.submit(perform)

    def is_settled(self, again: Callable[[], None]) -> bool:
        """Returns whether no load of the vocabulary is running.

        If one is running, calls `again` at its end.
        """
        if self._loading is None or self._loading.is_set():
            return True
        self._compiler.submit(again)
        return False

    def knows(self, format: Mapping[str, Any]) -> bool:
        """Returns whether the format is compiled already."""
        return self._compiler.knows(format)

    def constrain(
        self, format: Mapping[str, Any], finish: Callable[..., None], result: Result
    ) -> None:
        """Makes the constraint of a format, in the separate thread.

        Then calls `finish` with `result` and the constraint, or with `result` and the error of the
        constraint. `result` is the result of the job that prepared the prompt. If it is an error,
        calls `finish(result)` immediately.
        """
        if isinstance(result, PoolError):
            finish(result)
            return

        def perform() -> None:
            constraint: Constraint | PoolError
            try:
                constraint = self._compiler.constraint(format)
            except PoolError as error:
                constraint = error
            except Exception as error:
                constraint = Internal(f"the format could not be prepared: {error!r}")
            finish(result, constraint)

        self._compiler.submit(perform)
