"""Makes a sequence wait until another sequence has read their common prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Many

from mlxpool.worker.scheduling.sequence import Phase, Sequence

MIN_SHARED = 64  # the fewest tokens that a wait must save, unless both prompts are `shared`


def awaited_prompt(
    seq: Sequence, live: Many[Sequence], *, whole: bool, by_owner: bool = False
) -> Sequence | None:
    """Returns the running sequence whose prompt `seq` waits for, or None.

    `seq` waits for a sequence in prefill whose prompt has the same beginning. The beginning must
    have at least half of the tokens that this sequence has to read itself. Then `seq` gets the
    tokens from the prefix cache, which costs less than reading them. `whole`: the cache keeps only
    a whole prompt without its last token, so the beginning must have all these tokens. `by_owner`:
    the cache has only prompts of the same owner. The result is valid until the prompt is read or
    its sequence ends.
    """
    if seq.awaits is not None and _is_read(seq.awaits):
        return seq.awaits
    seq.awaits = None
    if not seq.reports:
        others = (other for other in live if not by_owner or other.owner == seq.owner)
        seq.awaits = next((other for other in others if _worth(seq, other, whole=whole)), None)
    return seq.awaits


def _is_read(reader: Sequence) -> bool:
    """Returns whether a sequence reads its prompt now."""
    return reader.phase is Phase.RUNNING and reader.submitted < len(reader.prompt) - 1


def _worth(seq: Sequence, reader: Sequence, *, whole: bool) -> bool:
    """Returns whether `seq` saves enough prefill if it waits until `reader` has read its prompt."""
    if not _is_read(reader) or seq.discarded or reader.discarded:
        return False
    begun, size = reader.cached, len(reader.prompt)
    saved = 1 if seq.shared and reader.shared else MIN_SHARED
    least = max(begun + saved, (begun + size) // 2)
    if whole:
        least = max(least, size - 1)
    if least > min(size, len(seq.prompt) - 1) or seq.prompt[least - 1] != reader.prompt[least - 1]:
        return False
    return seq.prompt[:least] == reader.prompt[:least]
