"""Compiled passes, as many as are worth their memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")

MOST = 16  # passes of a model; each keeps 0.7 to 1.5 MB of six layers and eight rows


class Compiled(Generic[P, R]):
    """A function compiled by MLX once for each kind of arguments.

    MLX itself forgets none of them; here all are forgotten when there are `most`.
    """

    def __init__(self, function: Callable[P, R], *, most: int = MOST) -> None:
        self._function, self._most = function, most
        self._pass = mx.compile(function)
        self._seen: set[Hashable] = set()

    def __call__(self, kind: Hashable, *args: P.args, **kwargs: P.kwargs) -> R:
        """`kind` says which arguments are compiled alike: constants and shapes."""
        if kind not in self._seen and len(self._seen) == self._most:
            self._seen.clear()
            self._pass = mx.compile(self._function)
        self._seen.add(kind)
        return self._pass(*args, **kwargs)
