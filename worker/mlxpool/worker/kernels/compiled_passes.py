"""Compiled passes, as many as are worth their memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")

MOST = 16  # passes of a model; each keeps 0.7 to 1.5 MB of six layers and eight rows


class Compiled(Generic[P, R]):
    """A function compiled by MLX once for each kind of arguments.

    MLX itself forgets none of them; here the one that was used least lately goes when there are
    `most`. One at a time: the next one fits where it was, and the process does not grow.
    """

    def __init__(self, function: Callable[P, R], *, most: int = MOST) -> None:
        self._function, self._most = function, most
        self._passes: OrderedDict[Hashable, Callable[P, R]] = OrderedDict()

    def __call__(self, kind: Hashable, *args: P.args, **kwargs: P.kwargs) -> R:
        """`kind` says which arguments are compiled alike: constants and shapes."""
        if kind not in self._passes:
            if len(self._passes) == self._most:
                self._passes.popitem(last=False)
            # MLX knows a function by its object, so each kind has one of its own.
            self._passes[kind] = mx.compile(partial(self._function))
        self._passes.move_to_end(kind)
        return self._passes[kind](*args, **kwargs)
