"""A bounded cache of functions compiled by MLX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")

MAX_PASSES = 16  # compiled functions of a model; 0.7 to 1.5 MB each for six layers and eight rows


class CompileNotice:
    """A callable for code that is about to compile something; calls the function `tell`.

    `given`: the notice was called during the current pass; the code that begins a pass sets `given`
    to False. `tell` may be replaced.
    """

    __slots__ = ("given", "tell")

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self.given = False
        self.tell = tell

    def __call__(self) -> None:
        """Calls `tell`, because a compilation begins, and sets `given`."""
        self.given = True
        self.tell()


class ComputedKinds:
    """Remembers the kinds of the computed passes: a second pass of a kind compiles nothing.

    The kind of a pass is its constants and shapes. A kind is recorded as computed when its first
    pass begins. A pass may compile until it is evaluated, so after a failure the kinds of all
    unevaluated passes are new again.
    """

    __slots__ = ("_begun", "_kinds")

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()
        self._begun: list[Hashable] = []  # kinds whose first pass may not be evaluated yet

    def is_new(self, kind: Hashable) -> bool:
        """Records that a pass of this kind begins; returns True if it is the first of its kind."""
        if kind in self._kinds:
            return False
        self._kinds.add(kind)
        self._begun.append(kind)
        return True

    def evaluated(self) -> None:
        """Records that all passes so far were evaluated."""
        self._begun.clear()

    def failed(self) -> None:
        """Forgets the kinds of passes since the last call of `evaluated`, after a failed pass."""
        self._kinds.difference_update(self._begun)
        self._begun.clear()


class CompiledPasses(Generic[P, R]):
    """A function that MLX compiles once for each kind of arguments.

    MLX itself never frees a compiled function. If there are `max_passes` functions, the least
    recently used function is freed just before another function is compiled, so the process does
    not grow. A call only builds the graph, which is evaluated later; see ComputedKinds.
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
        self._begun: set[Hashable] = set()  # kinds whose first call may not be evaluated yet

    def __contains__(self, kind: Hashable) -> bool:
        """Returns whether the function is compiled for this kind of arguments."""
        return kind in self._passes

    def __call__(self, kind: Hashable, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function compiled for `kind`: the constants and shapes of the arguments."""
        if kind not in self._passes:
            self._notice()
            if len(self._passes) == self._max_passes:
                self._begun.discard(self._passes.popitem(last=False)[0])
            # MLX identifies a function by its Python object, so each kind has a separate object.
            self._passes[kind] = mx.compile(partial(self._function))
            self._begun.add(kind)
        self._passes.move_to_end(kind)
        try:
            return self._passes[kind](*args, **kwargs)
        except BaseException:
            del self._passes[kind]  # the next call compiles again, and is the first of its kind
            self._begun.discard(kind)
            raise

    def evaluated(self) -> None:
        """Records that the results of all calls were evaluated."""
        self._begun.clear()

    def failed(self) -> None:
        """Frees all functions compiled since the last call of `evaluated`, after a failure."""
        for kind in self._begun:
            del self._passes[kind]
        self._begun.clear()
