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


class CompileNotice:
    """Tells that a pass compiles something, before it does. `given`: whether it told so.

    The notices of a pass are told apart from those of another one by who begins passes: it sets
    `given` to False. `tell` may be replaced.
    """

    __slots__ = ("given", "tell")

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self.given = False
        self.tell = tell

    def __call__(self) -> None:
        """Tells that something is compiled from now on."""
        self.given = True
        self.tell()


class CompiledPasses(Generic[P, R]):
    """A function that MLX compiles once for each kind of arguments.

    MLX itself never frees one; here the least recently used is freed when there are `max_passes`,
    just before another is compiled, which gets its memory: the process does not grow.
    """

    def __init__(
        self,
        function: Callable[P, R],
        notice: Callable[[], None] = lambda: None,
        *,
        max_passes: int = MAX_PASSES,
    ) -> None:
        """`notice` is called before the function is compiled."""
        self._function, self._notice, self._max_passes = function, notice, max_passes
        self._passes: OrderedDict[Hashable, Callable[P, R]] = OrderedDict()

    def __contains__(self, kind: Hashable) -> bool:
        """Whether the function is compiled for this kind."""
        return kind in self._passes

    def __call__(self, kind: Hashable, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; `kind` are the constants and shapes for which it is compiled."""
        if kind not in self._passes:
            self._notice()
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
