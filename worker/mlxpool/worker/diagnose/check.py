"""`python -m mlxpool.worker.diagnose.check`: reports on models without serving them.

Reads a JSON line for each model, {name, model, machine?, memory_limit?}, and writes a JSON line
with the model's report, see docs/models.md. MLX is imported only for `machine`, the check of this
machine.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from mlxpool.common import logs
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.gpus import GpusUnavailable, check_enough, chosen_gpus, visible_gpus
from mlxpool.common.process import core_dumps, private_temp
from mlxpool.common.process.blas import why_slow
from mlxpool.common.records import as_map
from mlxpool.worker.caches.stored import INT8
from mlxpool.worker.compute.model_source import (
    A_MODEL_OF_TEXTS,
    NO_BACK_END,
    PLAIN_CHECKS,
    THE_COUNTING_MODEL,
    draft_of,
    require_batch,
    require_context,
    require_group_settings,
    require_head,
    require_ngrams,
    uses_head,
    why_no_drafts,
)
from mlxpool.worker.diagnose.problems import Problems, find_problems
from mlxpool.worker.encoders.folder import EncoderFolder, inspect_encoder, is_encoder
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.engine.description import (
    NOT_ON_A_GPU,
    describe,
    describe_counting,
    describe_encoder,
    features,
    of_weights,
    require_deterministic,
    tokenizer_kind,
)
from mlxpool.worker.engine.kv_setting import (
    kernels_read_int8,
    no_int8_kernels,
    require_kv,
    resume_note,
)
from mlxpool.worker.groups.divisions import part_of
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.memory_estimate import (
    MemoryEstimate,
    estimate_draft,
    estimate_memory,
)
from mlxpool.worker.speculation.drafter import AUTO
from mlxpool.worker.system import parent_death
from mlxpool.worker.weights.files import ModelFiles
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.json_files import read_json
from mlxpool.worker.weights.locate import COUNTING, locate, open_files, places

NICENESS = 10  # niceness of a check in the background, so that served requests go first
MAX_BACKGROUND_BYTES = 8 * 2**30  # memory of a check in the background, which reads any config

Tell: TypeAlias = Callable[[Mapping[str, Any]], None]
CACHE_FIELDS = ("token", "fixed", "sequence", "all_sequences", "least")  # of MemoryEstimate


def check(
    name: str,
    config: ModelConfig,
    *,
    machine: bool = False,
    memory_limit: int = 0,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Returns the report on a model; never raises because of the contents of its files.

    `memory_limit`: the pool's memory limit in bytes; 0: the default fraction of the machine's
    memory. `tell` is called with the report on the weights before the tokenizer is read.
    """
    report = _check(name, config, machine=machine, memory_limit=memory_limit, tell=tell)
    if machine and (why := gpu_problem(config, visible_gpus(os.environ))):
        fit = report.setdefault("machine", {"fits": True, "why": []})
        fit.update(fits=False, why=[*fit["why"], why])
    return report


def gpu_problem(config: ModelConfig, visible: Sequence[str]) -> str:
    """Returns why the `visible` GPUs do not suffice for the model's settings; "" if they do."""
    try:
        check_enough(chosen_gpus(visible, config.gpu_ids), config.devices)
    except GpusUnavailable as error:
        return str(error)
    return ""


def _check(
    name: str, config: ModelConfig, *, machine: bool, memory_limit: int, tell: Tell | None
) -> dict[str, Any]:
    report: dict[str, Any] = {"name": name, "path": config.path, "problems": [], "notes": []}
    report["model"] = None
    problems = Problems()
    if config.path == COUNTING:
        report["model"] = describe_counting(CountingEngine(config.counting, config.context))
        _check_plain(report, problems, config, THE_COUNTING_MODEL)
        report["problems"] = list(problems.found)
        return report
    location = problems.attempt(locate, config)
    folder = None
    if location is not None:
        report["path"] = str(location.where if isinstance(location, ModelFiles) else location)
        if _encodes(location, config.task):
            return _check_encoder(
                report, problems, location, config, machine=machine, memory_limit=memory_limit
            )
        on_weights = None if tell is None else lambda folder: tell(of_weights(folder))
        folder, messages = find_problems(
            location, config.engine, predicts=uses_head(config), on_weights=on_weights
        )
        problems.add(messages)
    elif tell is not None:  # the broker checks these places for changes
        report["places"] = list(map(str, places(config)))
    if folder is not None:
        report["notes"] += [*folder.notes, *filter(None, [why_slow() if machine else ""])]
        report["model"] = problems.attempt(describe, folder, config.prefix_cache, config.kv)
        if config.context > folder.context:
            report["notes"].append(
                f"context is {config.context} tokens, the model's own is {folder.context}, which"
                " counts: a longer prompt is refused"
            )
        if config.deterministic:
            problems.attempt(require_deterministic, folder)
        problems.attempt(require_kv, config.kv, folder)
        report["notes"] += _notes_of_settings(folder, config)
        draft = problems.attempt(draft_of, folder, config)
        problems.attempt(require_head, config, folder)
        problems.attempt(require_ngrams, config, folder)
        problems.attempt(require_batch, config)
        problems.attempt(require_context, config)
        if config.devices > 1:
            problems.attempt(require_group_settings, config)
            problems.attempt(part_of, folder, 0, config.devices)
        if machine:
            report.update(_machine(folder, config, memory_limit, draft))
    report["problems"] = list(problems.found)
    return report


def _notes_of_settings(folder: ModelFolder, config: ModelConfig) -> list[str]:
    """Returns messages on valid settings that have no effect, or an unexpected effect."""
    notes = []
    if note := resume_note(config.kv, deterministic=config.deterministic):
        notes.append(note)
    if config.speculation == AUTO and (why := why_no_drafts(folder, config)):
        notes.append(f"speculation is {AUTO!r}, but no drafts are made: {why}")
    return notes


def _check_plain(
    report: dict[str, Any], problems: Problems, config: ModelConfig, what: str
) -> None:
    """Adds a problem for each setting that needs a KV cache: this model has none."""
    for require in PLAIN_CHECKS:
        problems.attempt(require, config, what)
    if config.speculation == AUTO:
        report["notes"].append(
            f"speculation is {AUTO!r}, but no drafts are made: {what} checks none"
        )


def _encodes(location: Path | ModelFiles, task: str) -> bool:
    """Returns whether the files belong to an encoder model; False if they cannot be read."""
    try:
        return is_encoder(open_files(location), task)
    except (ModelLoadFailed, OSError):
        return False


def _check_encoder(
    report: dict[str, Any],
    problems: Problems,
    location: Path | ModelFiles,
    config: ModelConfig,
    *,
    machine: bool,
    memory_limit: int,
) -> dict[str, Any]:
    """Returns the report on an encoder model; only its first problem is found."""
    files = open_files(location)
    _check_plain(report, problems, config, A_MODEL_OF_TEXTS)
    encoder = problems.attempt(inspect_encoder, files, config.task, config.context)
    if encoder is not None:
        report["notes"] += [*encoder.folder.notes, *filter(None, [why_slow() if machine else ""])]
        tokenizer = tokenizer_kind(read_json(files / "tokenizer.json"))
        report["model"] = problems.attempt(describe_encoder, encoder, tokenizer)
        if machine:
            report.update(_machine_of_encoder(encoder, config, memory_limit))
    report["problems"] = list(problems.found)
    return report


def _machine_of_encoder(
    encoder: EncoderFolder, config: ModelConfig, memory_limit: int
) -> dict[str, Any]:
    """Returns the part `machine` of the report.

    It states whether the weights fit into the memory of the worker and of the pool.
    """
    try:
        from mlxpool.worker.kernels import device
    except ImportError as error:
        return {"machine": {"fits": False, "why": [NO_BACK_END.format(error=error)]}}
    total, free = device.device_memory()
    limit, weights = device.memory_limit(config.memory_limit), encoder.folder.weight_bytes
    pool = memory_limit or device.memory_limit(0)
    why = [
        f"weights take {weights} bytes, {who} may take {most}: raise memory_limit or take a smaller"
        " model"
        for who, most in (("a worker", limit), ("the pool", pool))
        if weights > most
    ]
    machine = {
        "device": "gpu" if device.on_gpu() else "cpu",
        "total": total,
        "free": free,
        "limit": limit,
        "pool_limit": pool,
        "longest": encoder.source.context,
        "fits": not why,
        "why": why,
    }
    return {"machine": machine}


def _machine(
    folder: ModelFolder, config: ModelConfig, memory_limit: int, draft: ModelFolder | None = None
) -> dict[str, Any]:
    """Returns the parts `memory` and `machine` of the report.

    `memory` has the memory that the model needs; `machine` tells whether this machine has enough.
    `draft`: the draft model; its weights and KV cache count as weights.
    """
    try:
        from mlxpool.worker.kernels import device
    except ImportError as error:
        return {"machine": {"fits": False, "why": [NO_BACK_END.format(error=error)]}}
    total, free = device.device_memory()
    limit = device.memory_limit(config.memory_limit)
    pool = memory_limit or device.memory_limit(0)
    need = estimate_memory(
        folder,
        context=min(folder.context, config.context or folder.context),
        sequences=config.sequences,
        prefix_cache=config.prefix_cache,
        prefix_bytes=config.prefix_bytes,
        limit=limit,
        chunk=device.prefill_chunk(config.batch),
        float32=not device.on_gpu(),
        deterministic=config.deterministic,
        kv=config.kv,
    )
    floor = folder.weight_bytes
    if draft is not None:
        beside = estimate_draft(
            draft, sequences=config.sequences, limit=limit, float32=not device.on_gpu()
        )
        need = replace(need, weights=need.weights + beside)
        floor += draft.weight_bytes
    why = [*memory_problems(need, limit, pool, config.memory_limit or floor)]
    if config.deterministic and "deterministic" in features(folder) and device.on_gpu():
        why.append(NOT_ON_A_GPU)
    cuda = device.on_cuda()
    if config.kv == INT8 and device.on_gpu() and not (cuda and kernels_read_int8(folder)):
        why.append(no_int8_kernels(folder, cuda=cuda))
    machine = {
        "device": "gpu" if device.on_gpu() else "cpu",
        "total": total,
        "free": free,
        "limit": limit,
        "pool_limit": pool,
        "longest": None if folder.uses_mlx_lm else need.context_within(limit),
        "fits": not why,
        "why": why,
    }
    memory: dict[str, int | str | None] = {**as_map(need), "least": need.least, "kv": config.kv}
    memory["prefix_disk"] = config.prefix_disk
    if folder.uses_mlx_lm:  # only mlx-lm's code knows the bytes of a token
        memory |= dict.fromkeys(CACHE_FIELDS)
    return {"memory": memory, "machine": machine}


def memory_problems(need: MemoryEstimate, limit: int, pool: int, floor: int) -> list[str]:
    """Returns why a worker cannot run here; empty if it can. All sizes are bytes.

    `need`: the memory of its model. `limit`: the worker's memory limit. `pool`: the pool's memory
    limit. `floor`: the memory that the broker reserves for the worker.
    """
    why = []
    least = need.fixed + 2 * KV_BLOCK_TOKENS * need.token
    if need.weights + least > limit:
        why.append(
            f"weights take {need.weights} bytes and {2 * KV_BLOCK_TOKENS} tokens {least}, a"
            f" worker may take {limit}: raise memory_limit or take a smaller model"
        )
    if floor > pool:
        why.append(
            f"a worker needs {floor} bytes, the pool's memory_limit is {pool};"
            " raise memory_limit or take a smaller model"
        )
    return why


def answer(line: str, tell: Tell | None = None) -> dict[str, Any]:
    """Returns the report on the model in a line of input; see `check`."""
    query: Mapping[str, Any] = json.loads(line)
    config = ModelConfig.from_table(query["model"])
    rest = {key: query[key] for key in ("machine", "memory_limit") if key in query}
    return check(str(query["name"]), config, **rest, tell=tell)


def bound_memory(size: int) -> None:
    """Bounds the process's data memory; an allocation above the bound raises MemoryError.

    Keeps an existing bound that is lower.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or size < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def _tell_early(model: Mapping[str, Any]) -> None:
    print(json.dumps({"early": model}), flush=True)


def main(arguments: list[str]) -> int:
    """Answers every line of standard input.

    `--background` lowers priority and bounds memory. A line with the report on the weights, under
    `early`, may precede an answer.
    """
    logs.set_up(json_lines=False, level=logging.WARNING)
    core_dumps.turn_off()
    try:
        private_temp.use()
    except OSError as error:
        print(f"mlxpool: {error}", file=sys.stderr)
        return 1
    if "--background" in arguments:
        os.nice(NICENESS)
        bound_memory(MAX_BACKGROUND_BYTES)
        parent_death.die_with_parent()
    tell = _tell_early if "--background" in arguments else None
    for line in sys.stdin:
        print(json.dumps(answer(line, tell)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
