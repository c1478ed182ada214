"""The arguments of `Client.submit_batch`, as messages have them."""

from __future__ import annotations

from typing import Any

from mlxpool.client.batches.source import Lines, Source
from mlxpool.client.batches.steps import Steps, drawn_key, submit
from mlxpool.client.job_options import OF_BATCHES, BatchOptions
from mlxpool.client.jobs import IDLE_NAME, milliseconds
from mlxpool.client.request import divide_options
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import MAX_DEADLINE_MS
from mlxpool.common.protocol.kept.batch_lines import DEFAULTS
from mlxpool.common.protocol.kept.job_messages import IDLE, Notify


def submission(lines: Lines, model: str | None, options: BatchOptions) -> Steps[dict[str, Any]]:
    """The steps that submit a batch, see `steps.submit`. Raises BadRequest."""
    source, settings = source_and_settings(lines, model, options)
    key = options.get("key")
    return submit(source, drawn_key() if key is None else key, settings, options.get("on_sent"))


def source_and_settings(
    lines: Lines, model: str | None, options: BatchOptions
) -> tuple[Source, dict[str, Any]]:
    """The lines with their defaults, and the settings of the batch. Raises BadRequest."""
    given = {name: value for name, value in options.items() if name not in OF_BATCHES}
    priority = given.pop("priority", None)
    sampling, others = divide_options(given)
    unknown = [name for name in others if name not in DEFAULTS]
    if unknown:
        raise BadRequest(f"{unknown[0]} is of streams: a batch has none")
    defaults = {**others, "options": sampling}
    if model is not None:
        defaults["model"] = model
    settings: dict[str, Any] = {
        "priority": IDLE if priority == IDLE_NAME else priority or 0,
        "metadata": dict(options.get("metadata") or {}),
    }
    if (keep := options.get("keep")) is not None:
        settings["keep_ms"] = milliseconds("keep", keep)
    if (deadline := options.get("deadline")) is not None:
        settings["deadline_ms"] = max(1, milliseconds("deadline", deadline, MAX_DEADLINE_MS))
    if (notify := options.get("notify")) is not None:
        settings["notify"] = Notify.parse({"url": notify})
    check = options.get("check")
    return Source(lines, defaults, check is None or bool(check)), settings
