"""The rows of a step whose answers have a format: their masks, and the rows that wait for masks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Many

from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.constraints.constraint import MAX_RUN, Constraint
from mlxpool.worker.constraints.mask_table import only_token
from mlxpool.worker.constraints.masks import Masks
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.sampling.row_masks import NO_MASKS, Mask, RowMasks
from mlxpool.worker.scheduling.scheduler import NO_DRAFTS
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence

# The fewest forced tokens that are appended together. A pass that reads several tokens of a row
# takes longer, which delays rows without a format.
MIN_RUN = 4
MIN_RUN_OF_ALL = 2  # the fewest forced tokens if every row has a format
NO_RUN = MAX_RUN + 1


class ConstrainedRows:
    """The masks of constrained rows; used by the compute thread between forward pass and draw."""

    def __init__(self, engine: Engine, generations: Generations) -> None:
        self._engine = engine
        self._generations = generations
        self.mask_maker = Masks(engine.mask_memory)
        self._held: list[Generation] = []  # excluded from steps until their masks are made

    def min_run(self) -> int:
        """Returns the least number of forced tokens that are appended together, without draws.

        A pass that reads these tokens may be a larger compiled pass, or use other kernels. Then
        every row may lose more time than the row with the format gains. In that case the result is
        NO_RUN, which no number of forced tokens reaches.
        """
        rows, limits = len(self._generations), self._engine.limits
        everyone = self._generations.constrained_count == rows
        if not limits.run_lines:
            return MIN_RUN_OF_ALL if everyone else MIN_RUN
        return MIN_RUN_OF_ALL if everyone and rows < limits.run_lines else NO_RUN

    def take_ahead(self, drawn: Many[SampledToken]) -> None:
        """Begins to advance constraints by drawn tokens, before the next forward pass begins.

        Another thread advances the constraints and makes the next masks, while this thread begins
        the pass. The tokens are committed after the pass has begun.
        """
        self.mask_maker.take_ahead(self._tokens(drawn, ()), self.min_run())

    def take(self, drawn: Many[SampledToken], least: int, drafts: Container[Sequence] = ()) -> None:
        """Advances the constraints of rows by the drawn tokens, before these tokens are committed.

        Skips tokens that end an answer, and the sequences in `drafts`: the pass checked their
        drafts. May begin the next masks in another thread, except the masks of rows to which
        `least` or more forced tokens will be appended.
        """
        if self._generations.constrained_count:
            self.mask_maker.take(self._tokens(drawn, drafts), least)

    def give_back(self) -> None:
        """Undoes `take_ahead` after a failed pass, because its tokens will not be committed."""
        self.mask_maker.give_back()

    def _tokens(
        self, drawn: Many[SampledToken], drafts: Container[Sequence]
    ) -> list[tuple[Constraint, int]]:
        """Returns each drawn token with the constraint of its row; omits unconstrained rows."""
        of, running, eos = self._generations.constrained_of, Phase.RUNNING, self._engine.eos
        taken: list[tuple[Constraint, int]] = []
        for sequence, token, _ in drawn:
            row = of(sequence)
            if row is None or token in eos or sequence.phase is not running:
                continue
            if row.constraint is not None and sequence not in drafts:
                taken.append((row.constraint, token))
        return taken

    def begin_behind_runs(self, rows: Iterable[Generation]) -> None:
        """Begins to make the masks of rows that have new forced tokens.

        The next pass reads these tokens; then it draws the token after them with the mask.
        """
        if not self._generations.constrained_count or not self._engine.limits.ahead:
            return
        running = Phase.RUNNING
        constraints = {  # each row once, even if it checked drafts and has several tokens
            row.constraint: None
            for row in rows
            if row.sequence.phase is running and row.sequence.has_unread
        }
        self.mask_maker.begin_early([rule for rule in constraints if rule is not None])

    def masks(
        self, rows: Iterable[Generation], drafts: Mapping[Sequence, Many[int]] = NO_DRAFTS
    ) -> tuple[RowMasks, list[tuple[Generation, Exception]]]:
        """Returns the masks for the draws of the newest pass, and each row whose mask failed.

        Some rows do not draw in this pass. If a row's next tokens are already known, it needs no
        draw. If a row's mask is not made yet, the row reads its last input again in a later step,
        when the mask is made. `drafts`: the drafts that the pass checks; a row with drafts also has
        a mask after each draft.
        """
        asking: dict[Constraint, Generation] = {}
        for row in rows:
            constraint, sequence = row.constraint, row.sequence
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.has_unread:
                self._engine.withdraw(sequence, again=False)
            elif constraint is not None:  # None: the row had only a ThoughtBound, now over
                asking[constraint] = row
        if not asking:
            return NO_MASKS, []
        batch = self.mask_maker.make([*asking])
        failed = [(asking[constraint], error) for constraint, error in batch.failed.items()]
        for constraint in batch.late:
            self._hold(asking[constraint], draws=constraint in batch.lines)
        lines = {asking[constraint].sequence: line for constraint, line in batch.lines.items()}
        masks = RowMasks(batch.table, batch.used, lines)
        if drafts:
            constraints = {row.sequence: constraint for constraint, row in asking.items()}
            masks = _with_drafts(masks, constraints, drafts)
        return masks, failed

    def _hold(self, row: Generation, *, draws: bool) -> None:
        """Excludes a row from steps until `release`, because its mask was not made in time.

        `draws`: the row draws in the newest step. Otherwise the row is also withdrawn from this
        step.
        """
        if not draws and row.sequence.phase is Phase.RUNNING:
            self._engine.withdraw(row.sequence, again=True)
        row.sequence.held = True
        self._held.append(row)

    def finds_forced(self, row: Generation) -> bool:
        """Returns whether this thread computes the forced tokens of a row."""
        return row.constraint is not None and self.mask_maker.is_quick(row.constraint)

    def release(self) -> None:
        """Lets the excluded rows whose masks are made take part in steps again.

        Begins to make the mask of an excluded row when no pass in flight draws a token of this row.
        """
        if not self._held:
            return
        waiting, self._held = self._held, []
        for row in waiting:
            sequence, constraint = row.sequence, row.constraint
            if sequence.phase is not Phase.RUNNING or constraint is None:
                sequence.held = False
                continue
            if not sequence.awaited:
                self.mask_maker.begin(constraint)
                sequence.held = not self.mask_maker.is_made(constraint)
            if sequence.held:
                self._held.append(row)

    def wait(self) -> None:
        """Waits for a bounded time until one more mask is made.

        Does nothing if no row is excluded from steps.
        """
        if self._held:
            self.mask_maker.wait()


def _with_drafts(
    masks: RowMasks,
    constraints: Mapping[Sequence, Constraint],
    drafts: Mapping[Sequence, Many[int]],
) -> RowMasks:
    """Returns masks in which rows that check drafts also have a mask after each draft."""
    row_masks: dict[Sequence, Mask] = {}
    for sequence, line in masks.lines.items():
        assert masks.table is not None
        constraint, token = constraints[sequence], only_token(line)
        mask = constraint.mask_of(token) if token is not None else masks.table.masks[line]
        mask = mask.reshape(1, -1)[:, : constraint.others.size]
        behind = drafts.get(sequence)
        row_masks[sequence] = constraint.masks_behind(mask, behind) if behind else mask
    return RowMasks.of(row_masks)
