"""Opens a model of a folder, or a built-in model, by its settings, and makes its engine."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.config.schema import Counting, ModelConfig
from mlxpool.common.errors import ModelLoadFailed, PoolError
from mlxpool.worker import versions
from mlxpool.worker.caches.specs import RecurrentSpec
from mlxpool.worker.draft_model.opening import inspect_draft, load_draft
from mlxpool.worker.encoders.folder import inspect_encoder, is_encoder
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.engine.counting_engine import CountingEngine, CountingText
from mlxpool.worker.engine.description import require_deterministic
from mlxpool.worker.engine.encoding.encoder import Encoder
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.kv_setting import require_kv, require_no_kv, resume_note
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.groups.divisions import Part, part_of
from mlxpool.worker.groups.links import GroupLinks, StartGroup
from mlxpool.worker.prompt.kept_text import text_of
from mlxpool.worker.prompt.text_model import Opened, TextSource, TokenTable
from mlxpool.worker.scheduling.memory_estimate import dequantises_at_load
from mlxpool.worker.speculation.drafter import AUTO, MTP, NGRAM, OFF
from mlxpool.worker.speculation.ngram_search import MAX_TOKENS
from mlxpool.worker.weights.files import ModelFiles
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import COUNTING, locate, open_files

log = logging.getLogger("mlxpool.worker")

NO_BACK_END = (
    "MLX has no usable back end here ({error}); on Linux install one of mlxpool[cpu],"
    " mlxpool[cuda12], mlxpool[cuda13]"
)

COUNTS = "the counting model answers with numbers"
THE_COUNTING_MODEL, A_MODEL_OF_TEXTS = "the counting model", "a model of texts"
WITH_MLX_LM = "mlx-lm's code computes this model, and draws its tokens"

# Seconds that the compute thread may keep the GIL while the main thread waits. On a GPU the compute
# thread builds a pass in 1 to 1.5 ms; the main thread runs while MLX evaluates the pass. With the
# 0.5 ms of other workers, 32 streams of a model of 1B got 0.8 times as many tokens as with 3 ms.
GPU_SWITCH_INTERVAL = 0.002

MIN_MODEL_CONTEXT = 4  # the least context in tokens that the warm-up of a model needs

OnProgress = Callable[[int, int], None]


class ModelSource(Struct, frozen=True):
    """A checked model that is not loaded yet."""

    opened: Opened
    load: Callable[[OnProgress], Engine]
    max_sequences: int  # the most sequences that the engine runs together
    weight_bytes: int = 0  # stored bytes, the total for `load`'s progress; 0: unknown


class EncoderSource(Struct, frozen=True):
    """A checked encoder model that is not loaded yet; for the fields see ModelSource."""

    opened: OpenedEncoder
    load: Callable[[OnProgress], Encoder]
    weight_bytes: int


def open_source(
    config: ModelConfig,
    counting: Callable[[Counting, int], CountingEngine] = CountingEngine,
    start_group: StartGroup | None = None,
) -> ModelSource | EncoderSource:
    """Checks the model without MLX, and returns it with a function that loads it.

    `start_group` starts the other processes of a model on several devices, during its load. Raises
    ModelLoadFailed with the reason if the model cannot be used.
    """
    if config.path != COUNTING:
        files = open_files(locate(config))
        if is_encoder(files, config.task):
            require_plain(config, A_MODEL_OF_TEXTS)
            return _encoder(files, config)
    return open_generator(config, counting, start_group)


def open_generator(
    config: ModelConfig,
    counting: Callable[[Counting, int], CountingEngine] = CountingEngine,
    start_group: StartGroup | None = None,
) -> ModelSource:
    """Checks a model that generates text, see `open_source`."""
    require_batch(config)
    require_context(config)
    if config.path == COUNTING:
        require_plain(config, THE_COUNTING_MODEL)
        engine = counting(config.counting, config.context)
        engine.chunk = min(config.batch or engine.chunk, engine.context)
        return _counting(engine, config.sequences)
    return _folder(open_files(locate(config)), config, start_group)


def require_one_device(config: ModelConfig, what: str) -> None:
    """Raises ModelLoadFailed if several devices are set for a model that cannot be divided."""
    if config.devices > 1:
        raise ModelLoadFailed(
            f"devices is {config.devices}, but {what} is not divided between devices: leave devices"
            " out"
        )


def require_no_disk(config: ModelConfig, what: str) -> None:
    """Raises ModelLoadFailed if prefix_disk is set for a model that keeps no prefixes."""
    if config.prefix_disk:
        raise ModelLoadFailed(
            f"prefix_disk is {config.prefix_disk} bytes, but {what} keeps no prefixes: leave"
            " prefix_disk out"
        )


def require_no_drafts(config: ModelConfig, what: str) -> None:
    """Raises ModelLoadFailed if drafts or a draft model are set, but the model checks no drafts."""
    if config.draft:
        raise ModelLoadFailed(
            f"draft is {config.draft!r}, but {what} checks no drafts: leave draft out"
        )
    if config.speculation not in (OFF, AUTO):
        raise ModelLoadFailed(
            f"speculation is {config.speculation!r}, but {what} checks no drafts: leave"
            " speculation out"
        )


def require_unset_kv(config: ModelConfig, what: str) -> None:
    """Raises ModelLoadFailed if `kv` is set for a model that stores no keys and values."""
    require_no_kv(config.kv, what)


# Each function raises ModelLoadFailed if a setting is used that the counting model and encoder
# models do not support.
PLAIN_CHECKS = (require_one_device, require_unset_kv, require_no_disk, require_no_drafts)


def require_plain(config: ModelConfig, what: str) -> None:
    """Raises ModelLoadFailed for the first unsupported setting; `what` names the kind of model."""
    for require in PLAIN_CHECKS:
        require(config, what)


def require_batch(config: ModelConfig) -> None:
    """Raises ModelLoadFailed if a step in which all sequences decode has no room for a prompt."""
    if 0 < config.batch <= config.sequences:
        raise ModelLoadFailed(
            f"batch is {config.batch} tokens, sequences is {config.sequences}: a step needs more"
            " tokens than sequences, or no prompt is read while all run; raise batch or lower"
            " sequences"
        )


def require_context(config: ModelConfig) -> None:
    """Raises ModelLoadFailed for a context that is too short for the warm-up."""
    if 0 < config.context < MIN_MODEL_CONTEXT:
        raise ModelLoadFailed(
            f"context is {config.context} tokens, must be at least {MIN_MODEL_CONTEXT}, or 0 for"
            " the model's own"
        )


def _counting(engine: CountingEngine, max_sequences: int) -> ModelSource:
    def load(on_progress: OnProgress) -> Engine:
        engine.load(on_progress)
        return engine

    opened = Opened(
        engine.digest,
        engine.context,
        engine.vocab_size,
        CountingText(),
        no_format=COUNTS,
    )
    return ModelSource(opened, load, max_sequences, engine.settings.load_bytes)


def uses_head(config: ModelConfig) -> bool:
    """Returns whether the settings let the checkpoint's own head, if any, make drafts."""
    return config.speculation in (MTP, AUTO) and config.devices == 1


def require_head(config: ModelConfig, folder: ModelFolder) -> None:
    """Raises ModelLoadFailed if drafts of the model's own head are demanded but not possible."""
    why = why_no_drafts(folder, config)
    if config.speculation != MTP or (folder.plan.predicts and not why):
        return
    do = (
        'leave speculation out, or set it to "auto"'
        if why
        else 'set speculation to "ngram" or "auto"'
    )
    head = folder.plan.prediction
    if none := _why_none_of_any(folder, config):
        why = none
    elif head is None:
        kind = f"model_type {folder.model_type!r}"
        why = f"{kind} has no head that predicts further tokens (MTP), or config.json has none"
    else:
        why = (
            f"{folder.path} has no tensors {head.tensors!r} of a head that predicts further tokens"
            " (MTP); most conversions leave them out"
        )
        do = f"name a folder that has them, as the released checkpoint does, or {do}"
    raise ModelLoadFailed(f"speculation is {MTP!r}, but {why}: {do}")


def _require_settings(config: ModelConfig, folder: ModelFolder) -> None:
    """Raises ModelLoadFailed if the model does not support a setting."""
    require_head(config, folder)
    require_ngrams(config, folder)
    if config.devices > 1:
        require_group_settings(config)
    if config.deterministic:
        require_deterministic(folder)
    require_kv(config.kv, folder)


def _folder(
    files: ModelFiles, config: ModelConfig, start_group: StartGroup | None = None
) -> ModelSource:
    folder = inspect(files, config.engine, predicts=uses_head(config))
    _require_settings(config, folder)
    part = part_of(folder, 0, config.devices) if config.devices > 1 else None
    draft = draft_of(folder, config)
    text, source = _text_of(folder)
    _release_free_memory()  # of the tokenizer: preparing processes have their own tokenizers
    context = min(folder.context, config.context or folder.context)
    draft_bytes = 0 if draft is None else draft.weight_bytes

    def load(on_progress: OnProgress) -> Engine:
        links = None if part is None or start_group is None else start_group()
        _require_mlx()
        from mlxpool.worker.engine.model_engine import ModelEngine
        from mlxpool.worker.kernels import device
        from mlxpool.worker.weights.load import load as load_weights

        device.log_device()
        if note := resume_note(config.kv, deterministic=config.deterministic):
            log.info(note)
        if config.deterministic:
            require_deterministic(folder, on_gpu=device.on_gpu())
        device.keep_large_arrays_off_heap()
        if device.on_gpu():
            sys.setswitchinterval(GPU_SWITCH_INTERVAL)
        settings = EngineSettings(
            context=context,
            prefix=config.prefix_cache,
            prefix_bytes=config.prefix_bytes,
            max_sequences=config.sequences,
            limit=config.memory_limit,
            step_target=config.step_target,
            batch=device.worker_chunk(config.batch, config.sequences),
            by_owner=config.prefix_scope == "owner",
            kv=config.kv,
        )
        if folder.uses_mlx_lm:
            from mlxpool.worker.mlx_lm import engine as mlx_lm_engine

            model = mlx_lm_engine.load(folder, on_progress)
            return mlx_lm_engine.MlxLmEngine(model, folder, text, settings)
        if part is not None:
            if links is None:
                raise ModelLoadFailed(f"devices is {config.devices}: only a worker has several")
            return _load_group(part, config, links, text, settings, on_progress)
        drafting = None
        if draft is not None:
            drafting = load_draft(
                draft, on_progress, rows=config.sequences, limit=config.memory_limit
            )
        loaded = load_weights(
            folder,
            lambda tensors, size: on_progress(tensors, size + draft_bytes),
            deterministic=config.deterministic,
            dequantise=dequantises_at_load(
                folder,
                limit=device.memory_limit(config.memory_limit),
                float32=not device.on_gpu(),
            ),
        )
        settings = replace(settings, keeps_measurement=True)
        return ModelEngine(loaded, text, settings, draft=drafting)

    opened = Opened(
        versions.digest_of(folder.digest, config.kv),
        context,
        folder.plan.vocab_size,
        text,
        source,
        folder.eos_ids,
        WITH_MLX_LM if folder.uses_mlx_lm else "",
        WITH_MLX_LM if folder.uses_mlx_lm else "",
        config.plain_contents,
    )
    return ModelSource(opened, load, config.sequences, folder.weight_bytes + draft_bytes)


def why_no_drafts(folder: ModelFolder, config: ModelConfig) -> str:
    """Returns the reason why no step of the model checks drafts; empty: steps may check drafts.

    The reason follows from the model's files and settings alone.
    """
    recurrent = any(isinstance(cache, RecurrentSpec) for cache in folder.plan.caches)
    if why := _why_none_of_any(folder, config):
        return why
    if recurrent and not folder.plan.predicts:
        return "its layers have recurrent states, and rows with these cannot give up wrong drafts"
    return ""


def _why_none_of_any(folder: ModelFolder, config: ModelConfig) -> str:
    """Returns the reason why no step can check drafts from any source; empty: no such reason."""
    if folder.uses_mlx_lm:
        return "mlx-lm's code computes this model, and checks no drafts"
    if config.devices > 1:
        return f"devices is {config.devices}, and a group of devices checks no drafts"
    if config.deterministic:
        return "deterministic is true: log-probabilities of drafts differ in their last bits"
    return ""


def require_ngrams(config: ModelConfig, folder: ModelFolder) -> None:
    """Raises ModelLoadFailed if drafts of n-grams are demanded and cannot be checked."""
    if config.speculation != NGRAM:
        return
    why, size = why_no_drafts(folder, config), folder.plan.vocab_size
    if not why and size > MAX_TOKENS:
        why = f"the vocabulary has {size:,} tokens, above the {MAX_TOKENS:,} of n-grams"
    if why:
        raise ModelLoadFailed(
            f"speculation is {NGRAM!r}, but {why}; leave speculation out, or set it to {AUTO!r}"
        )


def draft_of(folder: ModelFolder, config: ModelConfig) -> ModelFolder | None:
    """Returns the checked draft model of the settings; None: no draft model is set.

    Raises ModelLoadFailed if the model checks no drafts, or the draft model does not suit it.
    """
    if not config.draft:
        return None
    if why := why_no_drafts(folder, config):
        raise ModelLoadFailed(
            f"draft is {config.draft!r}, but {why}: leave draft and speculation out"
        )
    return inspect_draft(config.draft, folder)


def require_group_settings(config: ModelConfig) -> None:
    """Raises ModelLoadFailed if a setting is not supported for a model on several devices."""
    if config.deterministic:
        raise ModelLoadFailed(
            f"deterministic = true is not built for devices = {config.devices}: sums over devices"
            " are rounded otherwise; leave one of them out"
        )
    if config.prefix_disk:
        raise ModelLoadFailed(
            f"prefix_disk is not built for devices = {config.devices}: each process has a part of"
            " the keys and values; leave one of them out"
        )


def _load_group(
    part: Part,
    config: ModelConfig,
    links: GroupLinks,
    text: TokenTable,
    settings: EngineSettings,
    on_progress: OnProgress,
) -> Engine:
    """Loads the part of rank 0, while the other ranks load their parts."""
    from mlxpool.worker.groups.group_engine import open_group_engine
    from mlxpool.worker.groups.loading import default_prefix_bytes, load_part

    links.wait_until_ready(lambda: on_progress(0, 0))
    group = load_part(part, config, links.meeting, on_progress)
    links.ports.close()
    prefix = default_prefix_bytes(
        part, settings.context or part.folder.context, config.sequences, config.kv
    )
    settings = replace(
        settings,
        limit=group.limit,
        prefix_bytes=config.prefix_bytes // part.ranks or prefix,
    )
    return open_group_engine(
        group.loaded,
        text,
        settings,
        orders=links.orders,
        collectives=group.collectives,
    )


def _encoder(files: ModelFiles, config: ModelConfig) -> EncoderSource:
    encoder = inspect_encoder(files, config.task, config.context)
    for note in encoder.folder.notes:
        log.warning(note, extra={"model": str(files.where)})
    _release_free_memory()

    def load(on_progress: OnProgress) -> Encoder:
        _require_mlx()
        from mlxpool.worker.engine.encoding.encoder_engine import EncoderEngine
        from mlxpool.worker.kernels import device
        from mlxpool.worker.weights.load import load as load_weights

        device.log_device()
        device.keep_large_arrays_off_heap()
        loaded = load_weights(encoder.folder, on_progress)
        return EncoderEngine(encoder, loaded, limit=config.memory_limit, batch=config.batch)

    opened = OpenedEncoder(
        digest=versions.digest_of(encoder.digest),
        context=encoder.source.context,
        vocab_size=encoder.source.vocab_size,
        tasks=frozenset({encoder.task}),
        source=encoder.source,
        dimensions=encoder.dimensions,
        normalises=encoder.vectors.normalises,
        labels=encoder.labels,
    )
    return EncoderSource(opened, load, encoder.folder.weight_bytes)


def _require_mlx() -> None:
    """Raises ModelLoadFailed if MLX cannot be imported."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ModelLoadFailed(NO_BACK_END.format(error=error)) from error


def _text_of(folder: ModelFolder) -> tuple[TokenTable, TextSource]:
    """Checks the tokenizer and chat templates, and logs notes; returns tokens and text source."""
    table, source, notes = text_of(folder)
    for note in (*folder.notes, *notes):
        log.warning(note, extra={"model": str(folder.path)})
    return table, source


def as_load_error(error: BaseException, name: str) -> PoolError:
    """Returns the error with which requests end if the model could not be loaded."""
    if isinstance(error, PoolError):
        return error
    return ModelLoadFailed(f"loading model {name!r} failed: {type(error).__name__}: {error}")


def _release_free_memory() -> None:
    """Return freed memory to the operating system, if the C library can (glibc)."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
