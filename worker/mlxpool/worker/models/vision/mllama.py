"""The image encoder of Llama 3.2 Vision: an image has up to four tiles, each with a class token.

The encoder always computes all tiles. Missing tiles are padding; padding tokens also fill each tile
up to a multiple of 8. A token of the image attends to all tokens, padding included; a padding token
attends to the tokens of the image, as in training. The text part gets the last hidden states and
the inputs of some layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.activations import activation
from mlxpool.worker.layers.config_fields import MAX_MODULES, integer, number, require
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, without_prefix
from mlxpool.worker.layers.encoder_plan import layer_norm, layer_norm_shapes
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, LayerFunction
from mlxpool.worker.media.settings import tile_arrangements
from mlxpool.worker.models.vision import siglip

if TYPE_CHECKING:
    import mlx.core as mx

PREFIXES = {"model.vision_model.": "vision_model.", "model.multi_modal": "multi_modal"}
PARTS = ("vision_model.", "multi_modal_projector.")
PATCHES = "vision_model.patch_embedding.weight"
PROJECTION = "multi_modal_projector"
CHANNELS = 3
TILE_MULTIPLE = 8  # a tile's tokens are padded to a multiple of this number
TAKEN = (3, 7, 15, 23, 30)  # by default the inputs of these layers go to the text part


def is_part(name: str) -> bool:
    """Returns whether a stored tensor belongs to the image encoder."""
    return name.removeprefix("model.").startswith(PARTS)


def derived(found: StoredTensors) -> Iterator[DerivedWeights]:
    """Yields the encoder's weights under this project's names, made from stored tensors."""
    for stored, spec in found.items():
        name = without_prefix(stored, PREFIXES)
        if name == PATCHES and len(spec.shape) == 4:
            yield from siglip.patch_weights(stored, name, spec)
        elif name != stored and is_part(stored):
            yield DerivedWeights((stored,), {name: spec}, tuple)


class TiledEncoder(Struct, frozen=True):
    """The hyperparameters of the image encoder and of the projection to the text part.

    `taken`: the layers whose inputs go to the text part, by default TAKEN.
    """

    hidden: int
    width: int  # width of the feed-forward
    heads: int
    local_layers: int
    global_layers: int  # layers after the local layers, with gates
    side: int  # side of a tile, in pixels
    patch: int  # side of a patch, in pixels
    tiles: int
    taken: tuple[int, ...]
    eps: float
    activation: LayerFunction
    out: int  # size of a hidden state of the text part

    @classmethod
    def from_config(cls, config: Any, out: int) -> TiledEncoder:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        if not isinstance(config, Mapping):
            raise ModelLoadFailed(f"config.json has vision_config {config!r:.60}, must be a map")
        require(config, "num_channels", [CHANNELS])
        side, patch = integer(config, "image_size", 448), integer(config, "patch_size", 14)
        if side % patch:
            raise ModelLoadFailed(
                f"config.json has image_size {side}, no multiple of patch_size {patch}"
            )
        hidden, heads = integer(config, "hidden_size", 1280), integer(config, "attention_heads", 16)
        if hidden % heads:
            raise ModelLoadFailed(
                f"config.json has attention_heads {heads}, which must divide {hidden}"
            )
        tiles = integer(config, "max_num_tiles", 4, maximum=64)
        ratios = [list(arrangement) for arrangement in tile_arrangements(tiles)]
        require(config, "supported_aspect_ratios", [ratios])
        local = integer(config, "num_hidden_layers", 32, maximum=MAX_MODULES)
        taken = _taken(config, local)
        require(config, "vision_output_dim", [hidden * (1 + len(taken))])
        return cls(
            hidden=hidden,
            width=integer(config, "intermediate_size", 5120),
            heads=heads,
            local_layers=local,
            global_layers=integer(config, "num_global_layers", 8, maximum=MAX_MODULES),
            side=side,
            patch=patch,
            tiles=tiles,
            taken=taken,
            eps=number(config, "norm_eps", 1e-5),
            activation=activation(config, "hidden_act", "gelu"),
            out=out,
        )

    @property
    def layers(self) -> int:
        """The number of all layers, local and global."""
        return self.local_layers + self.global_layers

    @property
    def tile_tokens(self) -> int:
        """The number of tokens of a tile: its patches and the class token."""
        return (self.side // self.patch) ** 2 + 1

    @property
    def filling(self) -> int:
        """The number of padding tokens of a tile."""
        return -self.tile_tokens % TILE_MULTIPLE

    def tiles_of(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Returns the rows and columns of tiles for an image with a grid of patches."""
        rows = self.side // self.patch
        return grid[1] // rows, grid[2] // rows

    def tokens(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Returns the numbers of encoder tokens and of padding tokens for an image with a grid."""
        high, wide = self.tiles_of(grid)
        tokens = high * wide * self.tile_tokens
        return tokens, self.tiles * (self.tile_tokens + self.filling) - tokens

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor, in the order of use."""
        name, hidden, ratios = "vision_model", self.hidden, len(tile_arrangements(self.tiles)) + 1
        yield PATCHES, (hidden, self.patch**2 * CHANNELS)
        yield from _tile_positions(f"{name}.pre_tile_positional_embedding", ratios, self)
        yield f"{name}.class_embedding", (hidden,)
        inner = f"{name}.gated_positional_embedding"
        yield f"{inner}.gate", (1,)
        yield f"{inner}.embedding", (self.tile_tokens, hidden)
        yield f"{inner}.tile_embedding.weight", (ratios, self.tiles * self.tile_tokens * hidden)
        yield from layer_norm_shapes(f"{name}.layernorm_pre", hidden)
        for index in range(self.local_layers):
            yield from self._layer_shapes(f"{name}.transformer.layers.{index}")
        yield from layer_norm_shapes(f"{name}.layernorm_post", hidden)
        yield from _tile_positions(f"{name}.post_tile_positional_embedding", ratios, self)
        for index in range(self.global_layers):
            inner = f"{name}.global_transformer.layers.{index}"
            yield from self._layer_shapes(inner)
            yield f"{inner}.gate_attn", (1,)
            yield f"{inner}.gate_ffn", (1,)
        yield from linear_shapes(PROJECTION, self.out, hidden * (1 + len(self.taken)), bias=True)

    def _layer_shapes(self, name: str) -> WeightShapes:
        yield from layer_norm_shapes(f"{name}.input_layernorm", self.hidden)
        for part in "qkvo":
            yield from linear_shapes(f"{name}.self_attn.{part}_proj", self.hidden, self.hidden)
        yield from layer_norm_shapes(f"{name}.post_attention_layernorm", self.hidden)
        yield from linear_shapes(f"{name}.mlp.fc1", self.width, self.hidden, True)
        yield from linear_shapes(f"{name}.mlp.fc2", self.hidden, self.width, True)

    def build(self, builder: LayerBuilder) -> BuiltTiledEncoder:
        """Returns the encoder with the builder's weights."""
        return BuiltTiledEncoder(self, builder)


def _tile_positions(name: str, ratios: int, spec: TiledEncoder) -> WeightShapes:
    yield f"{name}.gate", (1,)
    yield f"{name}.embedding.weight", (ratios, spec.tiles * spec.hidden)


def _taken(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    value = config.get("intermediate_layers_indices")
    indices = list(TAKEN) if value is None else value
    if not isinstance(indices, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in indices
    ):
        raise ModelLoadFailed(
            f"config.json has intermediate_layers_indices {value!r:.60}, must be layers below"
            f" {layers}"
        )
    return tuple(indices)


class BuiltTiledEncoder:
    """Encodes an image: pixels [height, width, 3] to states [tiles * tile_tokens, out].

    `height` and `width` are those of whole tiles.
    """

    def __init__(self, spec: TiledEncoder, builder: LayerBuilder) -> None:
        import mlx.core as mx

        name = "vision_model"
        self.spec = spec
        self.patches = builder.linear("vision_model.patch_embedding")
        self.before = _TilePositions(spec, builder, f"{name}.pre_tile_positional_embedding")
        self.class_token = builder.tensor(f"{name}.class_embedding")
        inner = f"{name}.gated_positional_embedding"
        self.gate = mx.tanh(builder.tensor(f"{inner}.gate"))
        self.positions = builder.tensor(f"{inner}.embedding")
        self.tile_positions = builder.tensor(f"{inner}.tile_embedding.weight")
        self.norm_before = layer_norm(builder, f"{name}.layernorm_pre", spec.eps)
        self.layers = [
            _Layer(spec, builder, f"{name}.transformer.layers.{index}", index)
            for index in range(spec.local_layers)
        ]
        self.norm_after = layer_norm(builder, f"{name}.layernorm_post", spec.eps)
        self.after = _TilePositions(spec, builder, f"{name}.post_tile_positional_embedding")
        self.global_layers = [
            _Layer(
                spec,
                builder,
                f"{name}.global_transformer.layers.{index}",
                spec.local_layers + index,
                gated=True,
            )
            for index in range(spec.global_layers)
        ]
        self.projection = builder.linear(PROJECTION)

    def __call__(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch
    ) -> mx.array:
        import mlx.core as mx

        spec, tiles = self.spec, self.spec.tiles_of(grid)
        ratio = tile_arrangements(spec.tiles).index(tiles) + 1
        count = tiles[0] * tiles[1]
        x = self._embedded(pixels, tiles, ratio)
        # Padding follows the tokens of the image, so attention excludes it by the number of image
        # tokens.
        x = mx.concatenate([part.reshape(-1, spec.hidden) for part in self._divided(x, count)])
        taken = {}
        for index, layer in enumerate(self.layers):
            if index in spec.taken:
                taken[index] = x
            x = layer(x, batch)
        whole = spec.tile_tokens + spec.filling
        place = mx.broadcast_to(mx.arange(spec.tiles)[:, None, None], (spec.tiles, whole, 1))
        numbers = mx.concatenate([part.reshape(-1) for part in self._divided(place, count)])
        x = self.norm_after(x) + self.after(ratio)[numbers]
        for layer in self.global_layers:
            x = layer(x, batch)
        seen = count * spec.tile_tokens
        # The taken states alternate: number h of each state, then number h + 1 of each state.
        beside = mx.stack([taken[index][:seen] for index in spec.taken], axis=-1)
        return self.projection(mx.concatenate([x[:seen], beside.reshape(seen, -1)], axis=-1))

    def _embedded(self, pixels: mx.array, tiles: tuple[int, int], ratio: int) -> mx.array:
        """Returns the tokens [tiles, tokens of a tile, hidden] of all tiles, padding included."""
        import mlx.core as mx

        spec, (high, wide) = self.spec, tiles
        rows, patch, count = spec.side // spec.patch, spec.patch, high * wide
        parts = pixels.reshape(high, rows, patch, wide, rows, patch, CHANNELS)
        parts = parts.transpose(0, 3, 1, 4, 2, 5, 6).reshape(count, rows * rows, -1)
        x = mx.pad(self.patches(parts), [(0, spec.tiles - count), (0, 0), (0, 0)])
        x = x + self.before(ratio)[:, None]
        first = mx.broadcast_to(self.class_token, (spec.tiles, 1, spec.hidden))
        x = mx.concatenate([first, x], axis=1) + (1 - self.gate) * self.positions
        x = x + self.gate * self.tile_positions[ratio].reshape(spec.tiles, -1, spec.hidden)
        return mx.pad(self.norm_before(x), [(0, 0), (0, spec.filling), (0, 0)])

    def _divided(self, x: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
        """Splits x [tiles, tokens, ...] into the tokens of the image and two arrays of padding."""
        return x[:count, : self.spec.tile_tokens], x[:count, self.spec.tile_tokens :], x[count:]


class _TilePositions:
    """The position embeddings of tiles: a call maps the index of an arrangement to [tiles, d].

    The embedding of a tile is added to all tokens of the tile.
    """

    def __init__(self, spec: TiledEncoder, builder: LayerBuilder, name: str) -> None:
        import mlx.core as mx

        self.tiles = spec.tiles
        self.gate = mx.tanh(builder.tensor(f"{name}.gate"))
        self.table = builder.tensor(f"{name}.embedding.weight")

    def __call__(self, ratio: int) -> mx.array:
        return self.gate * self.table[ratio].reshape(self.tiles, -1)


class _Layer:
    def __init__(
        self,
        spec: TiledEncoder,
        builder: LayerBuilder,
        name: str,
        index: int,
        *,
        gated: bool = False,
    ) -> None:
        import mlx.core as mx

        self.index, self.heads, self.activation = index, spec.heads, spec.activation
        self.scores = ScoreParams((spec.hidden // spec.heads) ** -0.5)
        self.before_attention = layer_norm(builder, f"{name}.input_layernorm", spec.eps)
        self.qkv = builder.concatenated([f"{name}.self_attn.{part}_proj" for part in "qkv"])
        self.o = builder.linear(f"{name}.self_attn.o_proj")
        self.before_feed = layer_norm(builder, f"{name}.post_attention_layernorm", spec.eps)
        self.up = builder.linear(f"{name}.mlp.fc1")
        self.down = builder.linear(f"{name}.mlp.fc2")
        self.gates: tuple[mx.array | float, mx.array | float] = (1.0, 1.0)
        if gated:
            attention, feed = (builder.tensor(f"{name}.gate_{part}") for part in ("attn", "ffn"))
            self.gates = mx.tanh(attention), mx.tanh(feed)

    def __call__(self, x: mx.array, batch: ForwardBatch) -> mx.array:
        count, heads = x.shape[0], self.heads
        qkv = self.qkv(self.before_attention(x)).reshape(count, 3 * heads, -1)
        q, k, v = qkv[:, :heads], qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
        read = batch.attend(self.index, q, k, v, self.scores)
        x = x + self.gates[0] * self.o(read.reshape(count, -1))
        return x + self.gates[1] * self.down(self.activation(self.up(self.before_feed(x))))
