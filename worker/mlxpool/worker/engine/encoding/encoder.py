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
    """Computes texts with a loaded encoder model. Used by one thread."""

    @property
    def tasks(self) -> frozenset[Task]:
        """What the model can be asked for."""

    @property
    def context(self) -> int:
        """The most tokens of one input."""

    @property
    def dimensions(self) -> int:
        """The numbers of a vector of `embed`; 0: it does not embed."""

    @property
    def normalises(self) -> bool:
        """Whether vectors of `embed` are to have length 1 where a request does not say.

        `encode` returns them as pooled, see encoders.vectors.finished.
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the columns of `classify`; empty: it does not classify."""

    @property
    def digest(self) -> str:
        """Hash of everything that decides which numbers a text gives."""

    @property
    def lines(self) -> int:
        """The tokens of a pass at most; one input may have more and is a pass of its own."""

    @property
    def yields_cores(self) -> bool:
        """Whether a pass may use fewer cores while other processes need them; see Engine."""

    @property
    def divides(self) -> bool:
        """Whether `encode` can divide a pass among threads, each with one BLAS thread."""

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Has `tell` called by this thread before a pass of a new size is built.

        Such a pass may compile something, and take longer.
        """

    def encode(self, inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        """Computes one pass, in any order of lengths; a row of the result is that of its input.

        It is divided among up to `threads` threads where the encoder `divides`.

        embed: vectors [n, dimensions], neither cut nor normalised. rerank: a score [n, 1], with the
        model's activation. classify: probabilities [n, labels].
        """

    def device_works(self) -> bool:
        """Returns whether the device still computes; called after an exception."""

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """Computes passes of the sizes that requests will have, so that none compiles anything.

        Calls `on_progress` after each.
        """

    def memory(self) -> MemoryUse:
        """Returns the memory in use."""

    def close(self) -> None:
        """Frees all arrays."""
