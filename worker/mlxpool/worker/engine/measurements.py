"""Stores measurements of an engine's warm-up on a CPU, for later loads of the model.

The file's key has everything that decides the measurements: the machine and the libraries of MLX,
our code, the model's files, and the settings of the engine. If any of these changed, the load
measures again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from mlxpool.worker.scheduling.step_cost import Load
from mlxpool.worker.system.kept_files import KeptFile, Key, machine

KIND = "warm-up"
Bytes = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


class Measurement(Struct, frozen=True):
    """The results of the measurements of a warm-up.

    `step`: the bytes of a pass at its peak. `image`: the bytes of the largest image's features.
    `process`: the bytes outside MLX after the warm-up. `passes`: the times of some passes.
    """

    step: Bytes
    image: Bytes
    process: Bytes
    passes: list[tuple[Load, Seconds]]


class KeptMeasurement:
    """The file with the measurements of an engine's warm-up.

    `engine`: the part of the file's key that describes the engine.
    """

    def __init__(self, engine: Key) -> None:
        self.file = KeptFile(KIND, {"machine": machine(), "engine": engine})

    def find(self) -> Measurement | None:
        """Returns the measurement of an earlier load of the model; None: none is valid."""
        content = self.file.read()
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=Measurement)
        except msgspec.DecodeError as error:
            self.file.refuse(str(error))
            return None

    def keep(self, measurement: Measurement) -> None:
        """Stores a measurement for later loads."""
        self.file.write(msgspec.json.encode(measurement))
