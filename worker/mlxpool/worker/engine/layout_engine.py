"""How ModelEngine opens a model: the layout of its rows, and the memory that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.attention.dot_product import pairs_in_memory
from mlxpool.worker.attention.in_pool.ragged_runner import PASS_LINES
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.layout_choice import choose_layout, make_layout
from mlxpool.worker.attention.prediction_heads.head_drafts import HeadDrafts, StateDrafts
from mlxpool.worker.attention.prediction_heads.prediction_rows import Predictions
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import CacheRow
from mlxpool.worker.caches.specs import ROLLBACK_STEPS
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.constraints.mask_table import MaskTable
from mlxpool.worker.engine import trial_kernels
from mlxpool.worker.engine.description import require_deterministic
from mlxpool.worker.engine.image_encoder import ImageEncoder
from mlxpool.worker.engine.kv_setting import no_int8_kernels, require_kv
from mlxpool.worker.engine.token_draws import TokenDraws
from mlxpool.worker.engine.warm_up import WarmedEngine
from mlxpool.worker.kernels import device, matmul_tiled
from mlxpool.worker.layers.model_plan import PredictingModel
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.modes import make_prefix_cache
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.scheduling.memory_budget import MIN_BLOCKS
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.sequence import (
    Sequence,
)
from mlxpool.worker.scheduling.step_cost import StepTarget
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.speculation.mtp import Predictor
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.transfers import downloads
from mlxpool.worker.transfers.downloads import Downloads
from mlxpool.worker.transfers.uploads import Uploads, upload_copy
from mlxpool.worker.weights.load import LoadedModel

MAX_STATE_DRAFTS = 3  # that a row checks, where it has a state behind each
ROWS_STAY = (
    "its layers have states or windows here, and rows with these cannot give up wrong drafts"
)
OTHER_BITS = "deterministic is true: log-probabilities of drafts differ in their last bits"
NO_TOKEN = 0  # in place of an input that has no embedding: of an image, features replace it


class LayoutEngine(WarmedEngine):
    """The part of ModelEngine that chooses the layout of rows and counts their memory."""

    def __init__(
        self,
        loaded: LoadedModel,
        text: ChatTokenizer | TokenTable | None = None,
        *,
        context: int | None = None,
        prefix: str = "tree",
        prefix_bytes: int = 0,
        lookahead: bool | None = None,
        layout: str | None = None,
        max_sequences: int = 8,
        limit: int = 0,
        blocks: int | None = None,
        step_target: float = 0.0,
        batch: int = 0,
        kv: str = AUTO,
        by_owner: bool = False,
        draft: DraftEngine | None = None,
        keeps_measurement: bool = False,
    ) -> None:
        """Makes an engine; `context` bounds the context length of the model.

        `lookahead` None: only on a GPU. `layout` None: see choose_layout.
        `limit` bounds the bytes of the process, see device.memory_limit. `blocks` None: as many as
        the limit leaves. `prefix_bytes` 0: a quarter of what the weights leave of the limit.
        `step_target`: seconds of a pass while sequences decode; 0: the warm-up chooses it.
        `batch` bounds the tokens of a pass, see device.prefill_chunk. `kv`: what rows store, see
        caches/stored.py. `by_owner`: sequences find only the prefixes that sequences of their owner
        left. `draft`: the draft model, for whose memory room is left; it is warmed up and closed
        with this engine. `keeps_measurement`: see WarmedEngine.
        """
        LOAD.enter("engine")
        folder = loaded.folder
        super().__init__(
            folder,
            text,
            weights=loaded.weight_bytes,
            context=context,
            prefix_bytes=prefix_bytes,
            max_sequences=max_sequences,
            limit=limit,
            blocks=blocks,
            batch=batch,
            kv=kv,
            by_owner=by_owner,
        )
        self.draft = draft
        self._keeps_measurement = keeps_measurement
        require_kv(kv, folder)
        if loaded.deterministic:
            require_deterministic(folder, on_gpu=device.on_gpu())
        self._loaded = loaded
        self._model, self._dtype = loaded.model, loaded.dtype
        shape = RowShape(folder.plan.caches, loaded.dtype, self.context, self.chunk, kv=kv)
        if device.on_cuda():
            self._compile_trials(shape)
            LOAD.enter("engine")
        name, shape = choose_layout(
            layout, shape, self._model, deterministic=loaded.deterministic, on_gpu=device.on_gpu()
        )
        self._predictions = self._make_predictions(shape)
        self._set_row_sizes(shape)
        integers = shape.quantised and device.on_gpu()  # of which kernels read those of pools
        windows = shape.keeps_all and shape.has_windows and not integers
        if layout is None and windows and not self._holds_a_context():
            # Rows keep only the tokens inside a window, so more sequences fit.
            name, shape = "rows", replace(shape, keeps_all=False)
            self._set_row_sizes(shape)
        pairs = pair_budget(self.chunk)
        self._pairs = pairs if loaded.deterministic else pairs_in_memory(shape, pairs)
        shared = name == "pool" and downloads.works()
        self._uploads = Uploads() if shared else None
        self._downloads = Downloads() if shared else None
        self._upload = self._uploads or upload_copy
        self._layout_request = name, shape, prefix
        self._layout, self._prefix = self._make_layout()
        if shape.quantised and device.on_gpu() and not self._layout.reads_int8:
            raise ModelLoadFailed(no_int8_kernels(folder, cuda=device.on_cuda()))
        self._bound_passes()
        self._spare = self._layout.spare + self._head_state_bytes()
        self.blocks.capacity = self._capacity()
        self._lookahead = device.on_gpu() if lookahead is None else lookahead
        self._draws_alone = self._layout.store.stateful
        self._target = StepTarget.of_device(on_gpu=device.on_gpu())
        if step_target:
            self._target = StepTarget(step_target, step_target)
        self._step_seconds = self._target.most
        self._image_encoder = None if folder.vision is None else ImageEncoder(loaded)
        self._slot_token = NO_TOKEN
        if folder.vision is not None and folder.vision.plan.crossed:
            (self._slot_token,) = folder.vision.plan.tokens
        self._draws = TokenDraws(self.vocab_size, self._upload)
        self._mask_tables: list[MaskTable] = []  # that are allocated, and nobody has

    def _compile_trials(self, shape: RowShape) -> None:
        """Compiles the kernels together that the making of the layout tries one by one."""
        LOAD.enter("trials")
        trial_kernels.compile_trials(self._model, shape, self.vocab_size)

    def _bound_passes(self) -> None:
        """See WarmedEngine."""
        if self._layout.sizes:  # attention of compiled passes keeps no scores
            self.chunk = min(self.batch, self.context, self._layout.sizes[-1])
            self._pairs = self.chunk**2

    def _make_predictions(self, shape: RowShape) -> HeadDrafts | None:
        """Makes the drafts of the model's own head; None where it is not loaded or not served."""
        plan = self._loaded.folder.plan
        if not plan.predicts:
            return None
        cache = plan.prediction_cache
        if cache is None:
            if self._loaded.deterministic:
                return None
            return StateDrafts(cast(PredictingModel, self._model).prediction)
        own = RowShape((cache,), shape.dtype, shape.capacity, shape.chunk)
        self._head_block_bytes = KV_BLOCK_TOKENS * own.token_bytes
        return Predictions(cast(PredictingModel, self._model).prediction, own)

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """See Engine.report_compiles."""
        self._layout.notice.tell = tell
        if self._predictions is not None:
            self._predictions.notice.tell = tell

    def expect_drafts(self, most: int) -> None:
        """See Engine.expect_drafts."""
        super().expect_drafts(most)
        self._spare = self._layout.spare + self._head_state_bytes()

    def _head_state_bytes(self) -> int:
        """Returns the bytes of the states that are kept for the head at most."""
        if self._predictions is None:
            return 0
        width = self._loaded.folder.plan.shapes["model.norm.weight"][0]
        states = self._predictions.most_states(self._max_sequences, self._most_drafts)
        return states * width * self._loaded.dtype.size

    def _set_row_sizes(self, shape: RowShape) -> None:
        self._block_bytes = KV_BLOCK_TOKENS * max(shape.token_bytes, 1)
        self._row_bytes = shape.fixed_bytes
        if self._predictions is not None:  # the states behind drafts that are checked
            self._row_bytes += MAX_STATE_DRAFTS * shape.state_bytes
            if device.on_gpu():  # those of the step before stay as well, see StateSlice
                self._row_bytes += (1 + MAX_STATE_DRAFTS - ROLLBACK_STEPS) * shape.state_bytes

    def _holds_a_context(self) -> bool:
        return (self._fixed_blocks or self._blocks_in_budget()) >= blocks_for(self.context)

    @property
    def layout(self) -> str:
        """See Engine.layout."""
        name, kv = self._layout.name, self._layout_request[1].kv
        return name if kv == AUTO else f"{name}, {kv}"

    def _make_layout(self, blocks: int | None = None) -> tuple[Layout, PrefixCache[CacheRow]]:
        """Makes the layout and its prefix cache.

        A pool has `blocks`; None: enough for all sequences and prefixes, if the memory suffices.
        """
        name, shape, prefix = self._layout_request
        if blocks is None:
            blocks = self._pool_blocks()
        layout = self._new_layout(name, shape, max(blocks, MIN_BLOCKS))
        budget, by_owner = self._prefix_bytes, self._by_owner
        return layout, make_prefix_cache(prefix, layout.store, budget, by_owner=by_owner)

    def _pool_blocks(self) -> int:
        """See WarmedEngine."""
        if self._fixed_blocks is not None:
            return self._fixed_blocks
        _, _, prefix = self._layout_request
        prefixes = 0 if prefix == "off" else self._prefix_bytes // self._block_bytes
        most = self._max_sequences * blocks_for(self.context) + prefixes
        return min(most, self._blocks_in_budget())

    @property
    def _store(self) -> Any:
        return self._layout.store

    def _kept_rules(self) -> dict[str, Any]:
        _, shape, _ = self._layout_request
        return {
            "layout": self._layout.name,
            "kv": shape.kv,
            "dtype": str(shape.dtype),
            "caches": [str(cache) for cache in shape.caches],
            "deterministic": self._loaded.deterministic,
        }

    def _new_layout(self, name: str, shape: RowShape, blocks: int) -> Layout:
        """Makes the layout of this name; a pool has `blocks` blocks."""
        return make_layout(
            name,
            shape,
            self._model,
            blocks,
            rows=self._max_sequences,
            deterministic=self._loaded.deterministic,
            on_gpu=device.on_gpu(),
            uploads=self._uploads,
            images=self._loaded.folder.vision is not None,
            keeps_states=isinstance(self._predictions, Predictions),
            keeps_drawn=isinstance(self._predictions, StateDrafts),
            long_passes=self._long_passes,
        )

    @property
    def no_drafts(self) -> str:
        """See Engine.no_drafts."""
        if self._loaded.deterministic:
            return OTHER_BITS
        return "" if self._rows_go_back else ROWS_STAY

    @property
    def _rows_go_back(self) -> bool:
        """Whether rows can give up drafts that were checked.

        With a head they have the states behind few drafts, see RowCache.put_states.
        """
        return not self._layout.store.stateful or isinstance(self._predictions, Predictions)

    @property
    def predictor(self) -> Predictor | None:
        """See Engine.predictor."""
        return self._predictions

    @property
    def limits(self) -> StepLimits:
        """See Engine.limits."""
        pairs = pair_budget(self.batch)
        return StepLimits(
            lines=min(self.chunk, PASS_LINES[-1]) if self._long_passes else self.chunk,
            pairs=pairs,
            context=self.context,
            seconds=self._step_seconds,
            ahead=int(self._lookahead),
            sizes=self._layout.sizes,
            run_lines=matmul_tiled.MAX_TOKENS if self._layout.sizes else 0,
            drafts=MAX_STATE_DRAFTS if self._layout.store.stateful else 0,
            prefill_lines=self.chunk if self._long_passes else 0,
            prefill_pairs=2 * pairs if self._long_passes else 0,
        )

    def blocks_in_use(self) -> int:
        """See BlockMemory."""
        free = self._layout.free_blocks
        return super().blocks_in_use() if free is None else self._layout.blocks - free

    def blocks_of(self, seq: Sequence) -> int:
        """See BlockMemory."""
        row = self._rows.get(seq)
        return 0 if row is None else self._layout.blocks_of(row)

    def _kv_bytes(self) -> tuple[int, int]:
        used, free = self._layout.kv_bytes(self._rows.values())
        return used + (self._predictions.nbytes if self._predictions is not None else 0), free

    def _bytes_left(self) -> int:
        return self._layout.left(self._rows.values(), self.blocks.capacity * self._block_bytes)

    def _capacity(self) -> int:
        if self._fixed_blocks is not None:
            return self._fixed_blocks
        blocks = self._blocks_in_budget()
        return min(blocks, self._layout.blocks) if self._layout.holds_prefixes else blocks

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return super().yields_cores and not self._loaded.deterministic
