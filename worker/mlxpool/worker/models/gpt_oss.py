"""gpt-oss: attention with sinks, in every second layer over a window, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.layers.activations import ClampedSwiGLU
from mlxpool.worker.layers.attention import GroupedQueryAttention
from mlxpool.worker.layers.config_fields import (
    FULL,
    MAX_MODULES,
    SLIDING,
    Heads,
    flag,
    integer,
    layer_count,
    layer_types,
    layer_windows,
    number,
    require,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import (
    FusableSublayer,
    PreNormLayer,
    WeightShapes,
    computed,
    linear_shapes,
)
from mlxpool.worker.layers.derived_weights import (
    DerivedWeights,
    StoredTensors,
    TensorSpec,
    from_mxfp4_blocks,
)
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    LayerBuilder,
    LayerFunction,
    LinearInput,
    PendingProduct,
)
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope

if TYPE_CHECKING:
    import mlx.core as mx


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of a gpt-oss; raises ModelLoadFailed with the unusable key."""
    require(config, "hidden_act", ["silu"])
    feed = GptOssMoE.from_config(config)
    eps = number(config, "rms_norm_eps", 1e-5)
    layers = tuple(PreNormLayer(feed.hidden, eps, mixer, feed) for mixer in _attention(config))

    def derived(found: StoredTensors) -> Iterable[DerivedWeights]:
        for index in range(len(layers)):
            yield from feed.derived(found, f"model.layers.{index}.mlp")

    return replace(Decoder.from_config(config, layers, eps=eps).plan(), derived=derived)


def _attention(config: Mapping[str, Any]) -> Iterator[GroupedQueryAttention]:
    """Returns the attention of each layer; without layer_types, even layers have a window."""
    layers = layer_count(config)
    types = layer_types(config, layers)
    types = types or tuple(FULL if layer % 2 else SLIDING for layer in range(layers))
    if SLIDING not in types:
        raise ModelLoadFailed(f"config.json has no {SLIDING!r} in layer_types, must have one")
    hidden, heads = integer(config, "hidden_size"), Heads.from_config(config, dim=64)
    rope = parse_rope(config, heads.dim, base=150000.0)
    biases = "qkvo" if flag(config, "attention_bias", True) else ""
    for window in layer_windows(config, layers, types):
        yield GroupedQueryAttention(hidden, heads, rope, window, biases=biases, sinks=True)


class GptOssMoE(Struct, frozen=True):
    """The mixture of experts of gpt-oss, a FeedForward; its linear layers have biases.

    Each token uses the `chosen` experts with the highest logits.
    """

    hidden: int
    width: int
    count: int
    chosen: int
    limit: float  # up is clamped to [-limit, limit], gate to at most limit

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GptOssMoE:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        experts = cls(
            hidden=integer(config, "hidden_size"),
            width=integer(config, "intermediate_size"),
            count=integer(config, "num_local_experts", maximum=MAX_MODULES),
            chosen=integer(config, "num_experts_per_tok"),
            limit=number(config, "swiglu_limit", 7.0),
        )
        if experts.chosen > experts.count:
            raise ModelLoadFailed(
                f"config.json has num_experts_per_tok {experts.chosen}, more than "
                f"num_local_experts {experts.count}"
            )
        return experts

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the tensors; the names begin with `name`."""
        yield from linear_shapes(f"{name}.router", self.count, self.hidden, bias=True)
        sizes = {"gate": (self.width, self.hidden), "up": (self.width, self.hidden)}
        for part, shape in {**sizes, "down": (self.hidden, self.width)}.items():
            for tensor, each in linear_shapes(f"{name}.experts.{part}_proj", *shape, bias=True):
                yield tensor, (self.count, *each)

    def derived(self, found: StoredTensors, name: str) -> Iterable[DerivedWeights]:
        """Splits the stacked expert weights of released checkpoints into gate, up and down.

        The rows of gate and up are interleaved in one weight. The stored weights are mxfp4 blocks,
        or dense and transposed.
        """
        stacks = {"gate_up": ("gate", "up"), "down": ("down",)}
        for stored, names in stacks.items():
            source = f"{name}.experts.{stored}_proj"
            modules = [f"{name}.experts.{part}_proj" for part in names]
            if f"{source}_blocks" in found:
                yield from from_mxfp4_blocks(found, source, modules)
            elif source in found:
                yield from _from_transposed(found, source, modules)

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction:
        """Builds the experts and the router over the weights whose names begin with `name`."""
        return _GptOssExperts(self, builder, name)


class _GptOssExperts(FusableSublayer):
    def __init__(self, spec: GptOssMoE, builder: LayerBuilder, name: str) -> None:
        self.spec = spec
        self.router = builder.linear(f"{name}.router")
        self.experts = builder.switch_glu(f"{name}.experts", ClampedSwiGLU(spec.limit))
        self.whole_sum, self.whole_product = builder.whole_sum, builder.whole_product

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> mx.array | PendingProduct:
        """Returns the weighted sum of the chosen experts, pending if a kernel computes it."""
        import mlx.core as mx

        spec = self.spec
        routing = RoutingParams(spec.count, spec.chosen, sigmoid=False, normed=True)
        product = self.experts.routed_sum(x, self.router, routing)
        if product is not None:
            return self.whole_product(product)
        x = computed(x)
        logits = self.router(x)
        chosen = mx.argpartition(logits, kth=-spec.chosen, axis=-1)[:, -spec.chosen :]
        ranks = mx.take_along_axis(logits, chosen, axis=-1)
        weights = mx.softmax(ranks, axis=-1, precise=True)
        return self.whole_sum((self.experts(x, chosen) * weights[..., None]).sum(axis=-2))


def _from_transposed(
    found: StoredTensors, source: str, modules: Sequence[str]
) -> Iterator[DerivedWeights]:
    """Splits `source` [E, in, rows] and its bias [E, rows] into the interleaved `modules`."""
    count = len(modules)
    weight, bias = found[source], found.get(f"{source}_bias")

    def weights(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        return [arrays[0][..., module::count].swapaxes(-1, -2) for module in range(count)]

    def biases(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        return [arrays[0][..., module::count] for module in range(count)]

    *experts, columns, rows = weight.shape
    spec = TensorSpec(weight.dtype, (*experts, rows // count, columns))
    yield DerivedWeights((source,), {f"{module}.weight": spec for module in modules}, weights)
    if bias is not None:
        spec = TensorSpec(bias.dtype, (*bias.shape[:-1], bias.shape[-1] // count))
        outputs = {f"{module}.bias": spec for module in modules}
        yield DerivedWeights((f"{source}_bias",), outputs, biases)
