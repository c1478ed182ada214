"""The rows of a step whose answers have a format: their masks, and those that sit the step out."""

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

# Forced tokens that are appended together, at least. A pass that reads several of a row takes
# longer: rows without a format see that, and rows with one have forced tokens as well.
MIN_RUN = 4
MIN_RUN_OF_ALL = 2  # where each row has a format
NO_RUN = MAX_RUN + 1


class ConstrainedRows:
    """Used by the compute thread, between the forward pass of a step and its draw."""

    def __init__(self, engine: Engine, generations: Generations) -> None:
        self._engine = engine
        self._generations = generations
        self.mask_maker = Masks(engine.mask_memory)
        self._held: list[Generation] = []  # their masks were late

    def min_run(self) -> int:
        """Returns how many forced tokens are appended together, at least.

        Where passes are compiled for numbers of lines, one with runs may have so many more lines or
        other kernels that every row loses more than a row with a format gains.
        """
        rows, limits = len(self._generations), self._engine.limits
        everyone = self._generations.constrained_count == rows
        if not limits.run_lines:
            return MIN_RUN_OF_ALL if everyone else MIN_RUN
        return MIN_RUN_OF_ALL if everyone and rows < limits.run_lines else NO_RUN

    def take_ahead(self, drawn: Many[SampledToken]) -> None:
        """Begins to give constraints tokens that will be committed behind the next forward pass.

        Another thread does so, and makes the masks behind them, while this one begins the pass.
        """
        self.mask_maker.take_ahead(self._tokens(drawn, ()), self.min_run())

    def take(self, drawn: Many[SampledToken], least: int, drafts: Container[Sequence] = ()) -> None:
        """Gives the constraints of rows the tokens that were drawn, before these are committed.

        Tokens that end an answer are left out, and rows that checked `drafts`. Then starts the
        masks behind these tokens, where other threads make masks, except for rows that append
        `least` or more forced tokens.
        """
        if self._generations.constrained_count:
            self.mask_maker.take(self._tokens(drawn, drafts), least)

    def give_back(self) -> None:
        """Takes back the tokens of `take_ahead`, which are not committed: a pass has failed."""
        self.mask_maker.give_back()

    def _tokens(
        self, drawn: Many[SampledToken], drafts: Container[Sequence]
    ) -> list[tuple[Constraint, int]]:
        """Returns the tokens that constraints take."""
        of, running, eos = self._generations.constrained_of, Phase.RUNNING, self._engine.eos
        found: list[tuple[Constraint, int]] = []
        for sequence, token, _ in drawn:
            row = of(sequence)
            if row is None or token in eos or sequence.phase is not running:
                continue
            if row.constraint is not None and sequence not in drafts:
                found.append((row.constraint, token))
        return found

    def begin_behind_runs(self, rows: Iterable[Generation]) -> None:
        """Begins the masks of rows that got forced tokens: a pass reads these before it draws."""
        if not self._generations.constrained_count or not self._engine.limits.ahead:
            return
        running = Phase.RUNNING
        found = {  # each once, though a row that checked drafts may have several tokens
            row.constraint: None
            for row in rows
            if row.sequence.phase is running and row.sequence.has_unread
        }
        self.mask_maker.begin_early([one for one in found if one is not None])

    def masks(
        self, rows: Iterable[Generation], drafts: Mapping[Sequence, Many[int]] = NO_DRAFTS
    ) -> tuple[RowMasks, list[tuple[Generation, Exception]]]:
        """Returns the masks with which rows of the newest pass draw, and why some have none.

        A row whose next tokens are known by now draws none, and one whose mask is late neither: its
        last input is read again when it is made. A row that checks `drafts` has a mask behind each.
        """
        asking: dict[Constraint, Generation] = {}
        for row in rows:
            constraint, sequence = row.constraint, row.sequence
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.has_unread:
                self._engine.withdraw(sequence, again=False)
            elif constraint is not None:  # a bound of thoughts was dropped behind them
                asking[constraint] = row
        if not asking:
            return NO_MASKS, []
        made = self.mask_maker.make([*asking])
        failed = [(asking[constraint], error) for constraint, error in made.failed.items()]
        for constraint in made.late:
            self._hold(asking[constraint], draws=constraint in made.lines)
        lines = {asking[constraint].sequence: line for constraint, line in made.lines.items()}
        masks = RowMasks(made.table, made.used, lines)
        if drafts:
            masks = _with_drafts(masks, {row.sequence: one for one, row in asking.items()}, drafts)
        return masks, failed

    def _hold(self, row: Generation, *, draws: bool) -> None:
        """Has steps leave out a row whose masks are late, and the newest one, unless it `draws`."""
        if not draws and row.sequence.phase is Phase.RUNNING:
            self._engine.withdraw(row.sequence, again=True)
        row.sequence.held = True
        self._held.append(row)

    def finds_forced(self, row: Generation) -> bool:
        """Whether the forced tokens of a row are found in this thread."""
        return row.constraint is not None and self.mask_maker.is_quick(row.constraint)

    def release(self) -> None:
        """Lets rows whose masks are made take part in steps again.

        A mask is begun when the token before is known.
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
        """Waits for a bounded time until a row can be released; returns at once if none is held."""
        if self._held:
            self.mask_maker.wait()


def _with_drafts(
    masks: RowMasks,
    constraints: Mapping[Sequence, Constraint],
    drafts: Mapping[Sequence, Many[int]],
) -> RowMasks:
    """Returns masks in which rows that check drafts have one behind each of them as well."""
    found: dict[Sequence, Mask] = {}
    for sequence, line in masks.lines.items():
        assert masks.table is not None
        constraint, token = constraints[sequence], only_token(line)
        mask = constraint.mask_of(token) if token is not None else masks.table.masks[line]
        mask = mask.reshape(1, -1)[:, : constraint.others.size]
        behind = drafts.get(sequence)
        found[sequence] = constraint.masks_behind(mask, behind) if behind else mask
    return RowMasks.of(found)
