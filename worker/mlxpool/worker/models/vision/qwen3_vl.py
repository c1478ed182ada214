"""The image encoder of Qwen3-VL: patches of any grid, with RoPE over rows and columns.

An input is one token of the text part: a square of merge * merge patches, which are adjacent in the
encoder's arrays. The position embeddings of a learned square are interpolated to the grid.
Checkpoints store a convolution over two frames; both frames of an image are equal, so the weights
of the frames are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.activations import activation, gelu
from mlxpool.worker.layers.config_fields import MAX_MODULES, integer, number, require
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.derived_weights import (
    DerivedWeights,
    StoredTensors,
    TensorSpec,
    without_prefix,
)
from mlxpool.worker.layers.encoder_plan import layer_norm, layer_norm_shapes
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, LayerFunction

if TYPE_CHECKING:
    import mlx.core as mx

PREFIXES = {"model.visual.": "visual.", "vision_tower.": "visual.", "visual.": "visual."}
PATCHES = "visual.patch_embed.proj.weight"
CHANNELS, FRAMES = 3, 2
EPS = 1e-6
THETA = 10_000.0


def is_part(name: str) -> bool:
    """Returns whether a stored tensor belongs to the image encoder."""
    return name.startswith(tuple(PREFIXES))


def derived(found: StoredTensors) -> Iterator[DerivedWeights]:
    """Yields the encoder's weights under this project's names, made from stored tensors."""
    for stored, spec in found.items():
        name = without_prefix(stored, PREFIXES)
        if not is_part(stored):
            continue
        if name == PATCHES and len(spec.shape) == 5:
            yield _patch_weights(stored, spec)
        elif name != stored:
            yield DerivedWeights((stored,), {name: spec}, tuple)


def _patch_weights(stored: str, spec: TensorSpec) -> DerivedWeights:
    """Makes the weight of the patch embedding as a matrix [out, p * p * 3].

    The stored weight is [out, 3, 2, p, p], in MLX's checkpoints [out, 2, p, p, 3].
    """
    first = spec.shape[1] == CHANNELS
    patch = spec.shape[-2]
    shape = spec.shape[0], patch * patch * CHANNELS

    def transform(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        import mlx.core as mx

        weight = arrays[0].astype(mx.float32).sum(axis=2 if first else 1)
        return [(weight.transpose(0, 2, 3, 1) if first else weight).reshape(shape)]

    return DerivedWeights((stored,), {PATCHES: TensorSpec("F32", shape)}, transform)


class QwenTower(Struct, frozen=True):
    """The hyperparameters of the encoder, whose tensor names begin with `visual.`.

    `side`: learned positions per side of the square. `deep`: indices of the layers whose outputs
    also go to the text part.
    """

    hidden: int
    width: int  # width of the feed-forward
    heads: int
    layers: int
    patch: int  # side of a patch, in pixels
    merge: int  # merge * merge patches become one input
    side: int
    out: int  # size of an input of the text part
    deep: tuple[int, ...]
    theta: float
    activation: LayerFunction

    @classmethod
    def from_config(cls, config: Any, out: int) -> QwenTower:
        """Reads config.json; `out`: the hidden size of the text part.

        Raises ModelLoadFailed with the missing or unusable key.
        """
        if not isinstance(config, Mapping):
            raise ModelLoadFailed(f"config.json has vision_config {config!r:.60}, must be a map")
        require(config, "in_channels", [CHANNELS])
        require(config, "temporal_patch_size", [FRAMES])
        require(config, "out_hidden_size", [out])
        layers = integer(config, "depth", maximum=MAX_MODULES)
        deep = config.get("deepstack_visual_indexes") or []
        if not isinstance(deep, list) or any(
            type(layer) is not int or not 0 <= layer < layers for layer in deep
        ):
            raise ModelLoadFailed(
                f"config.json has deepstack_visual_indexes {deep!r:.60}, must be layers below"
                f" {layers}"
            )
        hidden, heads = integer(config, "hidden_size"), integer(config, "num_heads")
        if hidden % (4 * heads):
            raise ModelLoadFailed(
                f"config.json has num_heads {heads}; 4 times this must divide {hidden}"
            )
        places = integer(config, "num_position_embeddings")
        if isqrt(places) ** 2 != places:
            raise ModelLoadFailed(
                f"config.json has num_position_embeddings {places}, must be a square"
            )
        rope = config.get("rope_parameters") or {}
        return cls(
            hidden=hidden,
            width=integer(config, "intermediate_size"),
            heads=heads,
            layers=layers,
            patch=integer(config, "patch_size"),
            merge=integer(config, "spatial_merge_size", 2),
            side=isqrt(places),
            out=out,
            deep=tuple(deep),
            theta=number(rope, "rope_theta", THETA),
            activation=activation(config, "hidden_act", "gelu_pytorch_tanh"),
        )

    @property
    def merged(self) -> int:
        """The number of values in the concatenated hidden states of one input's patches."""
        return self.hidden * self.merge**2

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor, in the order of use."""
        hidden = self.hidden
        yield from linear_shapes(
            "visual.patch_embed.proj", hidden, self.patch**2 * CHANNELS, bias=True
        )
        yield "visual.pos_embed.weight", (self.side**2, hidden)
        for index in range(self.layers):
            name = f"visual.blocks.{index}"
            yield from layer_norm_shapes(f"{name}.norm1", hidden)
            yield from linear_shapes(f"{name}.attn.qkv", 3 * hidden, hidden, True)
            yield from linear_shapes(f"{name}.attn.proj", hidden, hidden, True)
            yield from layer_norm_shapes(f"{name}.norm2", hidden)
            yield from linear_shapes(f"{name}.mlp.linear_fc1", self.width, hidden, True)
            yield from linear_shapes(f"{name}.mlp.linear_fc2", hidden, self.width, True)
        yield from self._merger_shapes("visual.merger", hidden)
        for index in range(len(self.deep)):
            yield from self._merger_shapes(f"visual.deepstack_merger_list.{index}", self.merged)

    def _merger_shapes(self, name: str, normed: int) -> WeightShapes:
        yield from layer_norm_shapes(f"{name}.norm", normed)
        yield from linear_shapes(f"{name}.linear_fc1", self.merged, self.merged, True)
        yield from linear_shapes(f"{name}.linear_fc2", self.out, self.merged, True)

    def build(self, builder: LayerBuilder) -> Tower:
        """Returns the encoder with the builder's weights."""
        return Tower(self, builder)


class Tower:
    """Encodes an image: pixels [height, width, 3] to features [1 + D, count, out].

    `count` is the number of inputs that the image takes in the text part. D is the number of layers
    in `deep`.
    """

    def __init__(self, spec: QwenTower, builder: LayerBuilder) -> None:
        self.spec = spec
        self.patches = builder.linear("visual.patch_embed.proj")
        self.positions = builder.tensor("visual.pos_embed.weight")
        self.layers = [_Layer(spec, builder, index) for index in range(spec.layers)]
        self.merger = _Merger(spec, builder, "visual.merger", before=True)
        self.deep = [
            _Merger(spec, builder, f"visual.deepstack_merger_list.{index}", before=False)
            for index in range(len(spec.deep))
        ]

    def __call__(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch
    ) -> mx.array:
        import mlx.core as mx

        spec = self.spec
        merge, patch = spec.merge, spec.patch
        high, wide = grid[1] // merge, grid[2] // merge
        parts = pixels.reshape(high, merge, patch, wide, merge, patch, CHANNELS)
        parts = parts.transpose(0, 3, 1, 4, 2, 5, 6).reshape(high * wide * merge**2, -1)
        rows, columns = patch_places(grid, merge)
        x = self.patches(parts) + self._learned(rows, columns, grid)
        turns = _turns(rows, columns, spec)
        deep = []
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, batch)
            if index in spec.deep:
                deep.append(self.deep[spec.deep.index(index)](x))
        return mx.stack([self.merger(x), *deep])

    def _learned(
        self, rows: npt.NDArray[Any], columns: npt.NDArray[Any], grid: tuple[int, int, int]
    ) -> mx.array:
        """Returns position embeddings [n, hidden], interpolated from the learned square."""
        import mlx.core as mx

        side = self.spec.side
        total: mx.array | None = None
        for row, row_share in _taps(rows, grid[1], side):
            for column, share in _taps(columns, grid[2], side):
                weights = mx.array((row_share * share).astype(np.float32))[:, None]
                part = self.positions[mx.array(row * side + column)] * weights
                total = part if total is None else total + part
        assert total is not None
        return total.astype(self.positions.dtype)


def patch_places(
    grid: tuple[int, int, int], merge: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the row and the column of each patch, [n] each, in the encoder's order of patches.

    The merge * merge patches of one input are adjacent.
    """
    shape = (grid[1] // merge, merge, grid[2] // merge, merge)
    rows, columns = np.mgrid[0 : grid[1], 0 : grid[2]]
    row, column = (axis.reshape(shape).transpose(0, 2, 1, 3).ravel() for axis in (rows, columns))
    return row, column


def _taps(
    places: npt.NDArray[Any], size: int, side: int
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Returns the two nearest of `side` learned points for each patch, with their weights.

    `places`: the indices of the patches on an axis of `size` patches.
    """
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(at)
    return [
        (np.clip(floor.astype(np.int32) + step, 0, side - 1), 1 - np.abs(at - floor - step))
        for step in (0, 1)
    ]


def _turns(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], spec: QwenTower
) -> tuple[mx.array, mx.array]:
    """Returns RoPE's cosines and sines [n, 1, head_dim] for the patches.

    The quarters of a head are rotated by row, column, row and column.
    """
    import mlx.core as mx

    size = spec.hidden // spec.heads
    steps = np.arange(0, size // 2, 2, dtype=np.float32) / np.float32(size // 2)
    turns = (1.0 / np.float32(spec.theta) ** steps).astype(np.float32)
    angles = np.concatenate([rows[:, None] * turns, columns[:, None] * turns], axis=1)
    whole = mx.array(np.concatenate([angles, angles], axis=1).astype(np.float32))[:, None]
    return mx.cos(whole), mx.sin(whole)


class _Layer:
    def __init__(self, spec: QwenTower, builder: LayerBuilder, index: int) -> None:
        name = f"visual.blocks.{index}"
        self.index, self.heads, self.activation = index, spec.heads, spec.activation
        self.scores = ScoreParams((spec.hidden // spec.heads) ** -0.5)
        self.before_attention = layer_norm(builder, f"{name}.norm1", EPS)
        self.qkv = builder.linear(f"{name}.attn.qkv")
        self.o = builder.linear(f"{name}.attn.proj")
        self.before_feed = layer_norm(builder, f"{name}.norm2", EPS)
        self.up = builder.linear(f"{name}.mlp.linear_fc1")
        self.down = builder.linear(f"{name}.mlp.linear_fc2")

    def __call__(
        self, x: mx.array, turns: tuple[mx.array, mx.array], batch: ForwardBatch
    ) -> mx.array:
        count, heads = x.shape[0], self.heads
        qkv = self.qkv(self.before_attention(x)).reshape(count, 3 * heads, -1)
        qk = _turned(qkv[:, : 2 * heads], *turns)
        q, k, v = qk[:, :heads], qk[:, heads:], qkv[:, 2 * heads :]
        read = batch.attend(self.index, q, k, v, self.scores)
        x = x + self.o(read.reshape(count, -1))
        return x + self.down(self.activation(self.up(self.before_feed(x))))


def _turned(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    import mlx.core as mx

    wide = x.astype(mx.float32)
    a, b = mx.split(wide, 2, axis=-1)
    return (wide * cosines + mx.concatenate([-b, a], axis=-1) * sines).astype(x.dtype)


class _Merger:
    """Merges adjacent patches [n, hidden] into inputs [n / merge², out].

    `before`: normalises each patch before the merge, instead of each group of merged patches.
    """

    def __init__(self, spec: QwenTower, builder: LayerBuilder, name: str, *, before: bool) -> None:
        self.size, self.before = spec.merged, before
        self.norm = layer_norm(builder, f"{name}.norm", EPS)
        self.up = builder.linear(f"{name}.linear_fc1")
        self.down = builder.linear(f"{name}.linear_fc2")

    def __call__(self, x: mx.array) -> mx.array:
        x = (
            self.norm(x).reshape(-1, self.size)
            if self.before
            else self.norm(x.reshape(-1, self.size))
        )
        return self.down(gelu(self.up(x)))
