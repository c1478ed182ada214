"""The interface between the compute thread and an encoder model. No MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlxpool.common.protocol.encoder_calls import Task
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.engine.engine import MemoryUse


class Encoder(Protocol):
    """Computes vectors, scores or labels of texts with a loaded model. Used by one thread."""

    @property
    def tasks(self) -> frozenset[Task]:
        """The tasks of the model."""

    @property
    def context(self) -> int:
        """The most tokens of one input."""

    @property
    def dimensions(self) -> int:
        """The length of a vector of `embed`; 0: the model does not embed."""

    @property
    def normalises(self) -> bool:
        """True if `embed` normalises vectors to length 1 by default.

        `encode` itself does not normalise, see encoders.vectors.finished.
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, in the order of a result's columns; empty: no classifier."""

    @property
    def digest(self) -> str:
        """A hash of everything that decides the results of a text."""

    @property
    def lines(self) -> int:
        """The most tokens of a pass. A longer input has its own pass."""

    @property
    def yields_cores(self) -> bool:
        """True if a pass may use fewer cores while other processes need them; see Engine."""

    @property
    def divides(self) -> bool:
        """True if `encode` can divide a pass among threads, each with one BLAS thread."""

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Sets the function that this thread calls before it builds a pass of a new size.

        Such a pass may compile kernels, and take longer.
        """

    def encode(self, inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        """Computes one pass over inputs in any order; row i of the result belongs to input i.

        The pass is divided among at most `threads` threads if the encoder `divides`.

        The result depends on the task. For embed it has vectors [n, dimensions], neither cut nor
        normalised; for rerank a score of each input [n, 1], with the model's activation; for
        classify probabilities [n, labels].
        """

    def device_works(self) -> bool:
        """Returns True if the device still computes; called after an exception."""

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """Computes passes of the sizes of requests, so that no request waits for compilation.

        Calls `on_progress` after each pass.
        """

    def memory(self) -> MemoryUse:
        """Returns the memory in use."""

    def close(self) -> None:
        """Frees all arrays."""
