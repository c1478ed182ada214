"""Chooses what prepares the requests of a model."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.process.preparations import MakeService, Product
from mlxpool.worker.process.prepare import Preparer
from mlxpool.worker.process.prepare_inputs import InputPreparer
from mlxpool.worker.prompt.text_model import Opened


def preparer_of(
    opened: Opened | OpenedEncoder, post: Callable[[Product], None], make_service: MakeService
) -> Preparer | InputPreparer:
    """The preparer of a model, by whether it generates text."""
    if isinstance(opened, OpenedEncoder):
        return InputPreparer(opened, post, make_service)
    return Preparer(opened, post, make_service)
