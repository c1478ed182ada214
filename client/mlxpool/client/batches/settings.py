"""The arguments of `Client.submit_batch`, as messages have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.client.batches.source import Lines, Source
from mlxpool.client.jobs import milliseconds
from mlxpool.client.request import divide_options
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import MAX_DEADLINE_MS
from mlxpool.common.protocol.kept.batch_lines import DEFAULTS
from mlxpool.common.protocol.kept.job_messages import IDLE, Notify


def source_and_settings(
    lines: Lines,
    model: str | None,
    options: Mapping[str, Any],
    *,
    keep: float | None,
    deadline: float | None,
    metadata: Mapping[str, Any] | None,
    notify: str | None,
    check: bool,
) -> tuple[Source, dict[str, Any]]:
    """The lines with their defaults, and the settings of the batch. Raises BadRequest."""
    given = dict(options)
    priority = given.pop("priority", None)
    sampling, others = divide_options(given)
    unknown = [name for name in others if name not in DEFAULTS]
    if unknown:
        raise BadRequest(f"{unknown[0]} is of streams: a batch has none")
    defaults = {**others, "options": sampling}
    if model is not None:
        defaults["model"] = model
    settings: dict[str, Any] = {
        "priority": IDLE if priority == "idle" else priority or 0,
        "metadata": dict(metadata or {}),
    }
    if keep is not None:
        settings["keep_ms"] = milliseconds("keep", keep)
    if deadline is not None:
        settings["deadline_ms"] = max(1, milliseconds("deadline", deadline, MAX_DEADLINE_MS))
    if notify is not None:
        settings["notify"] = Notify.parse({"url": notify})
    return Source(lines, defaults, check), settings
