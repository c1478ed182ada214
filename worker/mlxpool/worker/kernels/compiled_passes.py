"""A bounded cache of functions that MLX compiled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")

MAX_PASSES = 16  # of a model; each takes 0.7 to 1.5 MB for six layers and eight rows


class CompiledPasses(Generic[P, R]):
    """A function that MLX compiles once for each kind of arguments.

    MLX itself never frees one; here the least recently used is freed when there are `max_passes`,
    just before another is compiled, which gets its memory: the process does not grow.
    """

    def __init__(self, function: Callable[P, R], *, max_passes: int = MAX_PASSES) -> None:
        self._function, self._max_passes = function, max_passes
        self._passes: OrderedDict[Hashable, Callable[P, R]] = OrderedDict()
        self.compiled = False  # whether the newest call was the first of its kind

    def __contains__(self, kind: Hashable) -> bool:
        """Whether the function is compiled for this kind."""
        return kind in self._passes

    def __call__(self, kind: Hashable, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; `kind` are the constants and shapes for which it is compiled."""
        self.compiled = kind not in self._passes
        if self.compiled:
            if len(self._passes) == self._max_passes:
                self._passes.popitem(last=False)
            # MLX identifies a function by its object, so each kind has an object of its own.
            self._passes[kind] = mx.compile(partial(self._function))
        self._passes.move_to_end(kind)
        try:
            return self._passes[kind](*args, **kwargs)
        except BaseException:
            del self._passes[kind]  # the next call compiles it anew, and is the first of its kind
            raise
