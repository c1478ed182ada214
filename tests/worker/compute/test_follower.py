"""Tests the progress of ranks other than rank 0, from before the build of a pass to its end."""

from __future__ import annotations

from typing import Any, cast

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.compute import follower as module  # noqa: E402
from mlxpool.worker.compute.follower import Follower  # noqa: E402
from mlxpool.worker.compute.progress import Progress  # noqa: E402
from mlxpool.worker.groups.messages import Ended, Pass  # noqa: E402

DECODE, PREFILL = ("decode", 0), ("prefill", 4)


class FakeCollectives:
    """Stands for the collectives of a group, all of whose ranks compute."""

    rank = 1

    def check(self) -> None: ...


class FakeLayout:
    """A layout that records the progress during the build of each pass."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seen: list[tuple[str, int, bool]] = []

    def step(self, spans: Any, ids: Any, drawn: Any, wanted: Any) -> tuple[Any, None]:
        self.seen.append(shown(self._progress))
        return mx.zeros(1), None


def shown(progress: Progress) -> tuple[str, int, bool]:
    look = progress.block.read()
    return look.phase, look.tokens, look.fresh


def begun(ids: int, *, fresh: bool) -> Pass:
    """A pass over `ids` inputs: a decode pass if there is one input, else a prefill pass."""
    wanted = [0] if ids == 1 else []
    return Pass([], [], [], [], [], [], [], [0] * ids, wanted, 0, fresh, builds=False)


def ranked() -> tuple[Follower, FakeLayout, Progress]:
    progress = Progress(lambda: None)
    follower = Follower(cast(Any, None), cast(Any, FakeCollectives()), progress)
    layout = FakeLayout(progress)
    follower._pool = module._Pool(cast(Any, layout))
    return follower, layout, progress


def test_a_pass_that_compiles_is_shown_while_it_is_built() -> None:
    follower, layout, progress = ranked()
    for fresh in (True, False):
        follower.handle(begun(1, fresh=fresh))
        assert layout.seen[-1] == shown(progress) == (*DECODE, fresh)
        follower.handle(Ended())
    assert shown(progress) == ("idle", 0, False)


def test_the_oldest_pass_in_flight_is_shown() -> None:
    """When the oldest pass has ended, the next pass is shown, and whether it compiles."""
    follower, layout, progress = ranked()
    follower.handle(begun(1, fresh=False))
    follower.handle(begun(4, fresh=True))
    assert layout.seen == [(*DECODE, False), (*DECODE, True)]
    follower.handle(Ended())
    assert shown(progress) == (*PREFILL, True)
    follower.handle(begun(1, fresh=False))
    assert shown(progress) == (*PREFILL, True)
    follower.handle(Ended())
    assert shown(progress) == (*DECODE, False)
    follower.handle(Ended())
    assert shown(progress) == ("idle", 0, False)
    assert progress.count == 3
