"""The image encoder SigLIP: patches with learned positions, bidirectional attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.activations import activation
from mlxpool.worker.layers.config_fields import Heads, integer, layer_count, number, require
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, TensorSpec
from mlxpool.worker.layers.encoder_plan import layer_norm, layer_norm_shapes
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, LayerFunction

if TYPE_CHECKING:
    import mlx.core as mx

CHANNELS = 3
UNUSED = "vision_tower.head."  # pools a whole image; language models do not use it


class Siglip(Struct, frozen=True):
    """The hyperparameters of the encoder, whose tensor names begin with `vision_tower.`."""

    hidden: int
    width: int  # width of the feed-forward
    heads: Heads
    layers: int
    side: int  # side of an image, in pixels
    patch: int  # side of a patch, in pixels
    eps: float
    activation: LayerFunction

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Siglip:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        require(config, "model_type", ["siglip_vision_model"])
        require(config, "num_channels", [CHANNELS])
        side, patch = integer(config, "image_size", 224), integer(config, "patch_size", 16)
        if side % patch:
            raise ModelLoadFailed(
                f"config.json has image_size {side}, no multiple of patch_size {patch}"
            )
        return cls(
            hidden=integer(config, "hidden_size", 768),
            width=integer(config, "intermediate_size", 3072),
            heads=Heads.from_config({"num_attention_heads": 12, "hidden_size": 768, **config}),
            layers=layer_count({"num_hidden_layers": 12, **config}),
            side=side,
            patch=patch,
            eps=number(config, "layer_norm_eps", 1e-6),
            activation=activation(config, "hidden_act", "gelu_pytorch_tanh"),
        )

    @property
    def rows(self) -> int:
        """The number of patches per side."""
        return self.side // self.patch

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor, in the order of use."""
        name, hidden = "vision_tower.embeddings", self.hidden
        yield from linear_shapes(
            f"{name}.patch_embedding", hidden, self.patch**2 * CHANNELS, bias=True
        )
        yield f"{name}.position_embedding.weight", (self.rows**2, hidden)
        for index in range(self.layers):
            name = f"vision_tower.encoder.layers.{index}"
            yield from layer_norm_shapes(f"{name}.layer_norm1", hidden)
            for part in ("q", "k", "v"):
                yield from linear_shapes(f"{name}.self_attn.{part}_proj", hidden, hidden, True)
            yield from linear_shapes(f"{name}.self_attn.out_proj", hidden, hidden, True)
            yield from layer_norm_shapes(f"{name}.layer_norm2", hidden)
            yield from linear_shapes(f"{name}.mlp.fc1", self.width, hidden, True)
            yield from linear_shapes(f"{name}.mlp.fc2", hidden, self.width, True)
        yield from layer_norm_shapes("vision_tower.post_layernorm", hidden)

    def build(self, builder: LayerBuilder) -> Tower:
        """Returns the encoder with the builder's weights."""
        return Tower(self, builder)


class Tower:
    """Encodes an image: pixels [side, side, 3] to states [patches, hidden], row by row."""

    def __init__(self, spec: Siglip, builder: LayerBuilder) -> None:
        name = "vision_tower.embeddings"
        self.spec = spec
        self.patches = builder.linear(f"{name}.patch_embedding")
        self.positions = builder.tensor(f"{name}.position_embedding.weight")
        self.layers = [_Layer(spec, builder, index) for index in range(spec.layers)]
        self.norm = layer_norm(builder, "vision_tower.post_layernorm", spec.eps)

    def __call__(self, pixels: mx.array, batch: ForwardBatch) -> mx.array:
        rows, patch = self.spec.rows, self.spec.patch
        parts = pixels.reshape(rows, patch, rows, patch, CHANNELS).swapaxes(1, 2)
        x = self.patches(parts.reshape(rows * rows, -1)) + self.positions
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)


class _Layer:
    def __init__(self, spec: Siglip, builder: LayerBuilder, index: int) -> None:
        name = f"vision_tower.encoder.layers.{index}"
        self.index, self.heads, self.activation = index, spec.heads, spec.activation
        self.scores = ScoreParams(spec.heads.dim**-0.5)
        self.before_attention = layer_norm(builder, f"{name}.layer_norm1", spec.eps)
        self.qkv = builder.concatenated([f"{name}.self_attn.{part}_proj" for part in "qkv"])
        self.o = builder.linear(f"{name}.self_attn.out_proj")
        self.before_feed = layer_norm(builder, f"{name}.layer_norm2", spec.eps)
        self.up = builder.linear(f"{name}.mlp.fc1")
        self.down = builder.linear(f"{name}.mlp.fc2")

    def __call__(self, x: mx.array, batch: ForwardBatch) -> mx.array:
        count, heads = x.shape[0], self.heads.query
        qkv = self.qkv(self.before_attention(x)).reshape(count, 3 * heads, -1)
        q, k, v = qkv[:, :heads], qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
        read = batch.attend(self.index, q, k, v, self.scores)
        x = x + self.o(read.reshape(count, -1))
        return x + self.down(self.activation(self.up(self.before_feed(x))))


def patch_weights(stored: str, name: str, spec: TensorSpec) -> Iterator[DerivedWeights]:
    """Yields the weight of the patch embedding as a matrix [out, patch * patch * 3].

    The columns of the matrix are the pixels of a patch, row by row. Checkpoints store a convolution
    [out, 3, patch, patch], MLX's checkpoints [out, patch, patch, 3].
    """
    channels_first = spec.shape[1] == CHANNELS != spec.shape[-1]
    outputs, columns = spec.shape[0], spec.shape[1] * spec.shape[2] * spec.shape[3]

    def transform(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        weight = arrays[0].transpose(0, 2, 3, 1) if channels_first else arrays[0]
        return [weight.reshape(outputs, columns)]

    yield DerivedWeights((stored,), {name: TensorSpec(spec.dtype, (outputs, columns))}, transform)
