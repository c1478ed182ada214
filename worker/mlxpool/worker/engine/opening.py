"""Opens a loaded model for an engine: makes the layout of its rows, and sizes their memory."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.attention.dot_product import pairs_in_memory
from mlxpool.worker.attention.in_pool.ragged_runner import PASS_LINES
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.layout_choice import choose_layout
from mlxpool.worker.attention.prediction_heads.head_drafts import HeadDrafts, StateDrafts
from mlxpool.worker.attention.prediction_heads.prediction_rows import Predictions
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import CacheRow
from mlxpool.worker.caches.specs import ROLLBACK_STEPS
from mlxpool.worker.engine import trial_kernels
from mlxpool.worker.engine.description import require_deterministic
from mlxpool.worker.engine.devices import OneDevice
from mlxpool.worker.engine.image_encoder import ImageEncoder
from mlxpool.worker.engine.kv_setting import no_int8_kernels, require_kv
from mlxpool.worker.engine.memory import EngineMemory
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.kernels import device, matmul_tiled
from mlxpool.worker.layers.model_plan import PredictingModel
from mlxpool.worker.prefix.modes import make_prefix_cache
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.memory_budget import MIN_BLOCKS
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.step_cost import StepTarget
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.transfers import downloads
from mlxpool.worker.transfers.downloads import Downloads
from mlxpool.worker.transfers.uploads import Upload, Uploads, upload_copy
from mlxpool.worker.weights.load import LoadedModel

MAX_STATE_DRAFTS = 3  # the most drafts that a row checks, if it keeps a state after each draft
ROWS_STAY = (
    "its layers have states or windows here, and rows with these cannot give up wrong drafts"
)
OTHER_BITS = "deterministic is true: log-probabilities of drafts differ in their last bits"
NO_TOKEN = 0  # the token in place of an image's input: features replace its embedding


class Parts(Struct, frozen=True):
    """The parts of an engine of a loaded model.

    `name` and `shape` describe the chosen layout; `memory` has the layout, see `make_layout`.
    `predictions` are the drafts of the model's own head. If `uploads` or `downloads` is None, MLX
    copies the arrays between host and device.
    """

    loaded: LoadedModel
    settings: EngineSettings
    devices: OneDevice
    memory: EngineMemory[Layout, CacheRow]
    name: str
    shape: RowShape
    batch: int  # the most tokens of a pass
    lookahead: bool  # a pass may be submitted while another is in flight
    target: StepTarget
    predictions: HeadDrafts | None
    uploads: Uploads | None
    downloads: Downloads | None
    image_encoder: ImageEncoder | None

    @property
    def upload(self) -> Upload:
        """The function that copies numbers from the host to the device."""
        return self.uploads or upload_copy

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.loaded.folder.plan.vocab_size

    @property
    def rows_go_back(self) -> bool:
        """True if rows can discard drafts that were checked and found wrong.

        Rows of recurrent layers can do so if the model has a draft head: such rows keep the states
        after a few drafts, see RowCache.put_states.
        """
        return not self.memory.layout.store.stateful or isinstance(self.predictions, Predictions)

    @property
    def no_drafts(self) -> str:
        """The reason why no pass checks drafts; empty: passes check drafts."""
        if self.devices.no_drafts:
            return self.devices.no_drafts
        if self.loaded.deterministic:
            return OTHER_BITS
        return "" if self.rows_go_back else ROWS_STAY

    @property
    def slot_token(self) -> int:
        """The token id that a pass reads in place of an input of an image."""
        vision = self.loaded.folder.vision
        return vision.plan.tokens[0] if vision is not None and vision.plan.crossed else NO_TOKEN


class Warmed(Struct, frozen=True):
    """The bounds of passes that the warm-up has chosen.

    The memory that it measured is in the memory budget.

    `seconds`: the target for the time of a pass while sequences decode. `long_passes`: a pass
    without decoding rows may have twice as many inputs as a pass with such rows.
    """

    seconds: float
    long_passes: bool = False


def open_parts(
    loaded: LoadedModel,
    settings: EngineSettings,
    devices: OneDevice | None = None,
    draft: DraftEngine | None = None,
) -> Parts:
    """Makes the parts of an engine, with as many blocks as fit before the warm-up.

    Raises ModelLoadFailed for settings that the model does not support.
    """
    LOAD.enter("engine")
    devices, folder, on_gpu = devices or OneDevice(), loaded.folder, device.on_gpu()
    memory: EngineMemory[Layout, CacheRow] = EngineMemory(
        folder, loaded.weight_bytes, settings, draft
    )
    require_kv(settings.kv, folder)
    if loaded.deterministic:
        require_deterministic(folder, on_gpu=on_gpu)
    batch = device.prefill_chunk(settings.batch)
    chunk = min(batch, memory.context)
    shape = RowShape(folder.plan.caches, loaded.dtype, memory.context, chunk, kv=settings.kv)
    if device.on_cuda() and devices.builds_alone:
        LOAD.enter("trials")
        trial_kernels.compile_trials(loaded.model, shape, folder.plan.vocab_size)
        LOAD.enter("engine")
    name, shape = choose_layout(
        settings.layout,
        shape,
        loaded.model,
        deterministic=loaded.deterministic,
        on_gpu=on_gpu,
    )
    predictions = _predictions_of(loaded, shape, memory)
    _set_row_sizes(memory, shape, predictions)
    integers = shape.quantised and on_gpu  # kernels read integers only in a pool
    windows = shape.keeps_all and shape.has_windows and not integers
    if settings.layout is None and windows and not memory.holds_a_context():
        # Rows keep only the tokens inside a window, so more sequences fit.
        name, shape = "rows", replace(shape, keeps_all=False)
        _set_row_sizes(memory, shape, predictions)
    target, step_target = StepTarget.of_device(on_gpu=on_gpu), settings.step_target
    shared = name == "pool" and downloads.works()
    parts = Parts(
        loaded=loaded,
        settings=settings,
        devices=devices,
        memory=memory,
        name=name,
        shape=shape,
        batch=batch,
        lookahead=on_gpu if settings.lookahead is None else settings.lookahead,
        target=StepTarget(step_target, step_target) if step_target else target,
        predictions=predictions,
        uploads=Uploads() if shared else None,
        downloads=Downloads() if shared else None,
        image_encoder=None if folder.vision is None else ImageEncoder(loaded),
    )
    make_layout(parts)
    memory.head = predictions
    if shape.quantised and on_gpu and not memory.layout.reads_int8:
        raise ModelLoadFailed(no_int8_kernels(folder, cuda=device.on_cuda()))
    expect_drafts(parts, 0)
    memory.set_capacity()
    return parts


def make_layout(parts: Parts, blocks: int | None = None, *, long_passes: bool = False) -> None:
    """Makes the layout and its prefix cache, and sets both in the engine's memory.

    `blocks`: the blocks of a pool; None: enough for all sequences and prefixes, if they fit.
    """
    memory, loaded, mode = parts.memory, parts.loaded, parts.settings.prefix
    if blocks is None:
        blocks = memory.pool_blocks(prefixes=mode != "off")
    memory.layout = parts.devices.make_layout(
        parts.name,
        parts.shape,
        loaded.model,
        max(blocks, MIN_BLOCKS),
        rows=memory.budget.rows,
        deterministic=loaded.deterministic,
        uploads=parts.uploads,
        images=loaded.folder.vision is not None,
        keeps_states=isinstance(parts.predictions, Predictions),
        keeps_drawn=isinstance(parts.predictions, StateDrafts),
        long_passes=long_passes,
    )
    memory.prefix = make_prefix_cache(
        mode, memory.layout.store, memory.prefix_bytes, by_owner=parts.settings.by_owner
    )


def remake_layout(
    parts: Parts, most_drafts: int, blocks: int | None = None, *, long_passes: bool
) -> None:
    """Replaces the layout by a layout with other blocks or passes.

    The old layout must have no rows.
    """
    tell = parts.memory.layout.notice.tell
    parts.memory.layout.close()
    mx.clear_cache()
    make_layout(parts, blocks, long_passes=long_passes)
    parts.memory.layout.notice.tell = tell
    parts.memory.layout.expect_drafts(most_drafts)
    parts.memory.set_capacity()


def expect_drafts(parts: Parts, most: int) -> None:
    """Sets the most drafts that the rows of a pass check together.

    Counts the memory for the states of these drafts in the budget.
    """
    memory, loaded, states = parts.memory, parts.loaded, 0
    memory.layout.expect_drafts(most)
    if parts.predictions is not None:
        width = loaded.folder.plan.shapes["model.norm.weight"][0]
        count = parts.predictions.most_states(memory.budget.rows, most)
        states = count * width * loaded.dtype.size
    memory.budget = replace(memory.budget, spare=memory.layout.spare + states)


def bounds_of(parts: Parts) -> tuple[int, int]:
    """Returns the most inputs of a pass, and the most pairs of a query and a key."""
    sizes, context = parts.memory.layout.sizes, parts.memory.context
    if sizes:  # attention of compiled passes keeps no scores
        chunk = min(parts.batch, context, sizes[-1])
        return chunk, chunk**2
    chunk = min(parts.batch, context)
    pairs = pair_budget(chunk)
    return chunk, pairs if parts.loaded.deterministic else pairs_in_memory(parts.shape, pairs)


def limits_of(parts: Parts, warmed: Warmed) -> StepLimits:
    """Returns the bounds of a pass."""
    layout, pairs, long = parts.memory.layout, pair_budget(parts.batch), warmed.long_passes
    chunk, _ = bounds_of(parts)
    return StepLimits(
        lines=min(chunk, PASS_LINES[-1]) if long else chunk,
        # Each rank of a group computes a part of the heads.
        pairs=parts.devices.ranks * pairs if layout.sizes else pairs,
        context=parts.memory.context,
        seconds=warmed.seconds,
        ahead=int(parts.lookahead),
        sizes=layout.sizes,
        run_lines=matmul_tiled.MAX_TOKENS if layout.sizes else 0,
        drafts=MAX_STATE_DRAFTS if layout.store.stateful else 0,
        prefill_lines=chunk if long else 0,
        prefill_pairs=2 * pairs if long else 0,
    )


def kept_rules(parts: Parts) -> dict[str, Any]:
    """Returns the properties of the engine on which the stored keys and values depend.

    Weights and versions are not among these properties.
    """
    shape = parts.shape
    return {
        "layout": parts.memory.layout.name,
        "kv": shape.kv,
        "dtype": str(shape.dtype),
        "caches": [str(cache) for cache in shape.caches],
        "deterministic": parts.loaded.deterministic,
    }


def _predictions_of(
    loaded: LoadedModel, shape: RowShape, memory: EngineMemory[Layout, CacheRow]
) -> HeadDrafts | None:
    """Makes the drafter that uses the model's own MTP head.

    Returns None if the head is not loaded, or cannot be used.
    """
    plan = loaded.folder.plan
    if not plan.predicts:
        return None
    cache, head = plan.prediction_cache, cast(PredictingModel, loaded.model).prediction
    if cache is None:
        return None if loaded.deterministic else StateDrafts(head)
    own = RowShape((cache,), shape.dtype, shape.capacity, shape.chunk)
    memory.budget = replace(memory.budget, head_block=KV_BLOCK_TOKENS * own.token_bytes)
    return Predictions(head, own)


def _set_row_sizes(
    memory: EngineMemory[Layout, CacheRow], shape: RowShape, predictions: HeadDrafts | None
) -> None:
    block, row = KV_BLOCK_TOKENS * max(shape.token_bytes, 1), shape.fixed_bytes
    if predictions is not None:  # a row also has the states after checked drafts
        row += MAX_STATE_DRAFTS * shape.state_bytes
        if device.on_gpu():  # the previous step's states stay as well, see StateSlice
            row += (1 + MAX_STATE_DRAFTS - ROLLBACK_STEPS) * shape.state_bytes
    memory.budget = replace(memory.budget, block=block, row=row)
