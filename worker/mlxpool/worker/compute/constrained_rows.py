"""The rows of a step whose answers have a format: their masks, and those that sit the step out."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.worker.compute.generations import Generation
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.masks import Found, Masks
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.sequence import Phase


class ConstrainedRows:
    """Used by the compute thread, between the forward pass of a step and its draw."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._masks = Masks()
        self._held: list[Generation] = []  # their masks were late

    def masks(self, rows: Iterable[Generation]) -> dict[Generation, Found]:
        """Returns the masks with which rows of the newest pass draw, or why there is none.

        A row whose next tokens are known by now draws none, and one whose mask is late neither: its
        last input is read again when it is made.
        """
        asking: dict[Constraint, Generation] = {}
        for row in rows:
            if row.constraint is None or row.sequence.phase is not Phase.RUNNING:
                continue
            if row.sequence.unread:
                self._engine.withdraw(row.sequence, again=False)
            else:
                asking[row.constraint] = row
        found = self._masks.make(asking)
        for constraint, row in asking.items():
            if constraint not in found:
                self._engine.withdraw(row.sequence, again=True)
            if constraint not in found or self._masks.is_late(constraint):
                row.sequence.held = True
                self._held.append(row)
        return {asking[constraint]: made for constraint, made in found.items()}

    def finds_forced(self, row: Generation) -> bool:
        """Whether the forced tokens of a row are found in this thread."""
        return row.constraint is not None and self._masks.is_quick(row.constraint)

    def release(self) -> None:
        """Lets rows whose masks are made take part in steps again.

        A mask is begun when the token before is known.
        """
        if not self._held:
            return
        waiting, self._held = self._held, []
        for row in waiting:
            sequence, constraint = row.sequence, row.constraint
            assert constraint is not None
            if sequence.phase is not Phase.RUNNING:
                sequence.held = False
                continue
            if not sequence.awaited:
                self._masks.begin(constraint)
                sequence.held = not self._masks.is_made(constraint)
            if sequence.held:
                self._held.append(row)

    def wait(self) -> None:
        """Waits for a bounded time until a row can be released; returns at once if none is held."""
        if self._held:
            self._masks.wait()
