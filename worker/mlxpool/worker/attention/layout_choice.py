"""Chooses and makes the layout of a model's rows."""

from __future__ import annotations

import mlx.core as mx
from msgspec.structs import replace

from mlxpool.worker.attention.in_pool.kernel_trials import kernels_write
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout
from mlxpool.worker.attention.in_pool.ragged_batch import attention_of
from mlxpool.worker.attention.in_slabs.slab_layout import SlabLayout
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.transfers.uploads import Uploads


def choose_layout(
    name: str | None, shape: RowShape, model: Model, *, deterministic: bool, on_gpu: bool
) -> tuple[str, RowShape]:
    """Returns the name of the layout and its row shape.

    If `name` is None, the layout is a pool on a CUDA GPU, slabs on a CPU, and rows for models that
    neither supports. A model with windows gets a pool only if our kernels compute its attention,
    see kernels/ragged_attention.py: MLX's operations would copy whole rows.
    """
    if name is None:
        name = "rows"
        if shape.all_full_attention and not on_gpu:
            name = "slabs"
        elif not deterministic and writes_in_place(shape, on_gpu):
            name = "rows" if shape.has_windows and not _kernels_attend(shape, model) else "pool"
    return name, replace(shape, keeps_all=name == "pool")


def _kernels_attend(shape: RowShape, model: Model) -> bool:
    return attention_of(model, shape.dtype, quantised=shape.quantised).supported


def make_layout(
    name: str,
    shape: RowShape,
    model: Model,
    blocks: int,
    *,
    rows: int,
    deterministic: bool,
    on_gpu: bool,
    uploads: Uploads | None = None,
    images: bool = False,
    keeps_states: bool = False,
    keeps_drawn: bool = False,
    long_passes: bool = False,
) -> Layout:
    """Makes the layout `name` for at most `rows` rows; a pool has `blocks` blocks.

    `uploads`: sends the index arrays of each pass over a pool of blocks to the device; None: MLX
    copies these arrays. `images`: the model reads images. `keeps_states`: passes return the states
    of all inputs. `keeps_drawn`: passes return the states of their logits. `long_passes`: passes
    over a pool have up to 2,048 tokens.
    """
    if name == "pool":
        return PagedLayout(
            shape,
            model,
            blocks,
            rows=rows,
            deterministic=deterministic,
            in_place=writes_in_place(shape, on_gpu),
            uploads=uploads,
            images=images,
            keeps_states=keeps_states,
            keeps_drawn=keeps_drawn,
            long_passes=long_passes,
        )
    kind = SlabLayout if name == "slabs" else Layout
    return kind(
        shape,
        model,
        deterministic=deterministic,
        keeps_states=keeps_states,
        keeps_drawn=keeps_drawn,
    )


def writes_in_place(shape: RowShape, on_gpu: bool) -> bool:
    """Returns True if our kernels write new tokens into the blocks of a pool."""
    return shape.fits_blocks and on_gpu and mx.cuda.is_available() and kernels_write(shape)
