"""The states of a model and their transitions, and the state that operators are shown."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from mlxpool.broker.workers.worker_states import COMING, SERVING, WorkerState


class ModelState(Enum):
    """What the pool wants with a model; its workers have states of their own."""

    COLD = "cold"  # nothing needs it: no worker is started
    WANTED = "wanted"  # its slots are filled, as far as memory and the restart delay allow
    FAILED = "failed"  # its last worker reported why it cannot serve
    BROKEN = "broken"  # the breaker is open: restart_limit workers in a row never served
    DRAINING = "draining"  # admits nothing, finishes what was accepted
    DRAINED = "drained"  # admits nothing, and nothing is left


_C, _W, _F, _B = ModelState.COLD, ModelState.WANTED, ModelState.FAILED, ModelState.BROKEN
_DRAINING, _DRAINED = ModelState.DRAINING, ModelState.DRAINED
_FAILURES = {"load failed": _F, "breaker opened": _B, "worker failed": _C}

# want: something waits for it.  start: its slots may be filled now.
# served: a request ended in a worker.  mended: its files or settings have changed.
# give up: all that waited was answered with an error.  reopen: admits requests again.
TRANSITIONS: dict[ModelState, dict[str, ModelState]] = {
    _C: {
        "want": _W, "served": _C, "mended": _C, "unload": _C, "give up": _C,
        "drain": _DRAINED, "reopen": _C, **_FAILURES,
    },
    _W: {
        "want": _W, "start": _W, "served": _W, "mended": _W, "unload": _C, "give up": _C,
        "drain": _DRAINING, "reopen": _W, **_FAILURES, "worker failed": _W,
    },
    _F: {
        "want": _F, "start": _W, "served": _W, "mended": _C, "unload": _F, "give up": _F,
        "drain": _DRAINED, "reopen": _F, **_FAILURES,
    },
    _B: {
        "want": _B, "start": _W, "served": _W, "mended": _C, "unload": _B, "give up": _B,
        "drain": _DRAINED, "reopen": _B, **_FAILURES,
    },
    _DRAINING: {
        "want": _DRAINING, "start": _DRAINING, "served": _DRAINING, "mended": _DRAINING,
        "unload": _DRAINED, "give up": _DRAINED, "drain": _DRAINING, "reopen": _W,
        **dict.fromkeys(_FAILURES, _DRAINING),
    },
    _DRAINED: {
        "want": _DRAINING, "served": _DRAINED, "mended": _DRAINED, "unload": _DRAINED,
        "give up": _DRAINED, "drain": _DRAINED, "reopen": _C,
        **dict.fromkeys(_FAILURES, _DRAINED),
    },
}  # fmt: skip
ADMITTING = frozenset({_C, _W, _F, _B})
DEMANDED = frozenset({_W, _DRAINING})
FAILING = frozenset({_F, _B})


def shown_state(
    state: ModelState,
    workers: Collection[WorkerState],
    *,
    load_failed: bool,
    failures: int,
    restart_limit: int,
) -> str:
    """cold | starting | ready | draining | drained | failed | broken, as operators see it.

    The failures of a model without workers are shown whatever its state: a model that was drained
    and opened again is as broken as before.
    """
    if state not in ADMITTING:
        return "draining" if workers else "drained"
    if any(each in SERVING for each in workers):
        return "ready"
    if any(each in COMING for each in workers):
        return "starting"
    if workers:
        return "draining"
    if load_failed:
        return "failed"
    if failures >= restart_limit:
        return "broken"
    return "starting" if state is _W and failures else "cold"
