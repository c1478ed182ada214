"""Placeholder until the kernel is merged."""

from typing import Any


def rotate_and_write(*a: Any) -> Any:
    raise NotImplementedError
