"""Builder."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import mlx.core as mx

from mlxpool.worker.kernels import cpu_exp
from mlxpool.worker.layers.column_major import to_column_major
from mlxpool.worker.layers.derived_weights import MODULE_TENSORS
from mlxpool.worker.layers.interface import Activation
from mlxpool.worker.layers.interface import Linear as AnyLinear
from mlxpool.worker.layers.linear import (
    ConcatenatedLinear,
    Embedding,
    GatedLinearUnit,
    Linear,
    MultiLinear,
    QuantisedEmbedding,
    QuantisedLinear,
    RMSNorm,
)
from mlxpool.worker.layers.quantisation import GLOBAL_SCALES, QuantLayout
from mlxpool.worker.layers.quantised_weight import QuantisedWeight, concatenated
from mlxpool.worker.layers.switch import SwitchGLU, SwitchLinear


class WeightLayerBuilder:
    """The parts of a model whose weights are these, computed in `dtype`.

    `layouts` says which modules have a quantised weight, and how; `opened`: these are turned into
    numbers once, here. `exact`: see `tiled`; they are opened then, too, for their own products come
    in no tiles. Each part takes its weights out, so that they are not there twice.
    """

    def __init__(
        self,
        weights: MutableMapping[str, mx.array],
        layouts: Mapping[str, QuantLayout],
        dtype: mx.Dtype,
        *,
        exact: bool = False,
        opened: bool = False,
    ) -> None:
        self._weights = weights
        self._layouts = layouts
        self._dtype = dtype
        self._exact = exact
        self._opened = opened or exact

    def linear(self, name: str) -> AnyLinear:
        return self.joined([name])

    def joined(self, names: Sequence[str]) -> AnyLinear:
        """Linear layers of one input as one, outputs side by side: fewer and larger products.

        Quantised ones may stay apart within, see `_joined_weight`.
        """
        if self._are_numbers(names):
            weight = _laid_out([self._dense(name) for name in names])
            return Linear(weight, self._joined_bias(names), self._exact)
        packed = self._joined_weight(names)
        if packed is None:
            return ConcatenatedLinear(tuple(self.linear(name) for name in names))
        assert isinstance(packed, QuantisedWeight)
        return QuantisedLinear(packed, self._joined_bias(names))

    def gated(
        self, names: Sequence[str], width: int, activation: Activation | None = None
    ) -> GatedLinearUnit:
        """Layers `names` for gates and what they gate, [width, in] each; else swiglu."""
        joined = self.joined(names)
        return GatedLinearUnit(joined, width, activation or self.swiglu, activation is None)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.array(f"{name}.weight"), eps)

    def embedding(self, name: str) -> Embedding | QuantisedEmbedding:
        weight = self._weight(name)
        if isinstance(weight, QuantisedWeight):
            return QuantisedEmbedding(weight, self._dtype)
        return Embedding(weight, self._exact)

    def array(self, name: str) -> mx.array:
        """A tensor by its whole name, for what is no layer."""
        return self._weights.pop(name)

    def heads(self, name: str) -> MultiLinear:
        """A linear layer for each head, weight [H, out, in]."""
        return MultiLinear(self._weight(name), self._exact)

    def experts(self, name: str) -> SwitchLinear:
        """Linear layers stacked, weight [E, out, in], called with the experts chosen."""
        return SwitchLinear(self._weight(name), self._joined_bias([name]))

    def expert_mlp(self, name: str, activation: Activation | None = None) -> SwitchGLU:
        """The experts `name`.gate_proj, .up_proj and .down_proj; without `activation` swiglu."""
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        weight = self._joined_weight(names)
        if weight is None:
            gate_up = tuple(self.experts(one) for one in names)
        else:
            gate_up = (SwitchLinear(weight, self._joined_bias(names)),)
        down = self.experts(f"{name}.down_proj")
        return SwitchGLU(gate_up, down, activation or self.swiglu, self._exact)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        if _on_gpu():
            return _fused_swiglu(gate, up)
        if self._exact or not cpu_exp.serves(gate):
            return _swiglu(gate, up)
        return cpu_exp.swiglu(gate, up)

    def _weight(self, name: str) -> mx.array | QuantisedWeight:
        weight = self._joined_weight([name])
        assert weight is not None, "one weight has one layout"
        return weight

    def _are_numbers(self, names: Sequence[str]) -> bool:
        """Whether the weights are computed with as plain numbers."""
        return self._opened or not any(self._layouts.get(name) for name in names)

    def _joined_weight(self, names: Sequence[str]) -> mx.array | QuantisedWeight | None:
        """The weights [..., out, in] as one along `out`; None where they stay apart.

        So do quantised ones of different layouts, and all on the CPU: there the copy at load costs
        more than larger products gain.
        """
        layouts = {self._layouts.get(name) for name in names}
        if self._are_numbers(names):
            return _concatenated([self._dense(name) for name in names], axis=-2)
        factors = [f"{name}.{kind}" for name in names for kind in GLOBAL_SCALES]
        scaled = any(factor in self._weights for factor in factors)
        if len(names) > 1 and (len(layouts) > 1 or scaled or not _on_gpu()):
            return None
        return concatenated([self._packed(name, self._layouts[name]) for name in names])

    def _joined_bias(self, names: Sequence[str]) -> mx.array | None:
        if f"{names[0]}.bias" not in self._weights:
            return None
        return _concatenated([self._weights.pop(f"{name}.bias") for name in names], axis=-1)

    def _dense(self, name: str) -> mx.array:
        layout = self._layouts.get(name)
        if layout is None:
            return self._weights.pop(f"{name}.weight")
        weight = self._packed(name, layout).dense(self._dtype)
        mx.eval(weight)
        return weight

    def _packed(self, name: str, layout: QuantLayout) -> QuantisedWeight:
        names = [one for kind in MODULE_TENSORS if (one := f"{name}.{kind}") in self._weights]
        arrays = {one: self._weights.pop(one) for one in names if not one.endswith(".bias")}
        return QuantisedWeight.of(arrays, name, layout)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


_fused_swiglu = mx.compile(_swiglu, shapeless=True)  # one kernel; a CPU might have no compiler


def _concatenated(parts: Sequence[mx.array], axis: int) -> mx.array:
    if len(parts) == 1:
        return parts[0]
    whole = mx.concatenate(list(parts), axis=axis)
    mx.eval(whole)
    return whole


def _laid_out(parts: Sequence[mx.array]) -> mx.array:
    """The weights [out, in] as one; on the CPU by columns, which small products read faster."""
    return _concatenated(parts, axis=0) if _on_gpu() else to_column_major(parts)


def _on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu
