"""Compares the kernel for the experts of one token with the kernels for any number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import device, expert_products, expert_token  # noqa: E402
from mlxpool.worker.kernels.expert_fragments import PACKED_FORMATS, PackedFormat  # noqa: E402
from mlxpool.worker.kernels.expert_products import ExpertWeight, ExpertWeights  # noqa: E402
from mlxpool.worker.kernels.expert_routing import LineNorm  # noqa: E402
from mlxpool.worker.kernels.expert_token import TokenMixture  # noqa: E402
from mlxpool.worker.kernels.routing_params import RoutingParams  # noqa: E402
from support import simt  # noqa: E402
from support.float64 import assert_near, numbers  # noqa: E402

ON_GPU = mx.cuda.is_available()
GLM = RoutingParams(64, 4, sigmoid=True, normed=True, factor=1.8)
QWEN = RoutingParams(128, 8, sigmoid=False, normed=True)
OSS = RoutingParams(32, 4, sigmoid=False, normed=True)
GROUPS = RoutingParams(16, 4, sigmoid=True, normed=True, groups=4, chosen_groups=2)


pytestmark = pytest.mark.usefixtures("token_grid_machine")


def mixture_of(
    routing: RoutingParams, hidden: int, width: int, kind: Any, *, shared: bool
) -> tuple[TokenMixture, Any]:
    """Returns a mixture of random weights, whose scores are far apart, and a token."""
    mx.random.seed(routing.count)

    def weight(*shape: int, size: float = 1.0) -> Any:
        return (size * mx.random.normal(shape) * shape[-1] ** -0.5).astype(kind)

    count = routing.count
    more = (weight(2 * width, hidden), weight(hidden, width)) if shared else None
    mixture = TokenMixture(
        LineNorm(1 + weight(hidden), 1e-5),
        weight(count, hidden, size=4),
        mx.random.normal((count,)) / 8 if routing.sigmoid else None,
        routing,
        ExpertWeights(
            ExpertWeight(weight(count, 2 * width, hidden)),
            ExpertWeight(weight(count, hidden, width)),
        ),
        more,
    )
    return mixture, (4 * mx.random.normal((1, hidden))).astype(kind)


@pytest.mark.parametrize(
    ("routing", "hidden", "width", "dtype", "shared"),
    [(GLM, 320, 192, "bfloat16", True), (QWEN, 2560, 64, "float16", False)],
    ids=["GLM", "qwen3_moe"],
)
def test_one_token_equals_the_kernels_of_many(
    routing: RoutingParams, hidden: int, width: int, dtype: str, shared: bool
) -> None:
    """Tests more columns than a lane loads at once.

    The kernel runs twice, because its launches use the same scratch memory.
    """
    kind = getattr(mx, dtype)
    mixture, x = mixture_of(routing, hidden, width, kind, shared=shared)
    assert expert_token.supports(x, mixture.norm, mixture.gate, mixture.routing, mixture.experts)
    for _ in range(2):
        expected = numbers(expert_token.by_kernels(mixture, x))
        assert_near(mixture(x), expected)
        assert_near(mixture(x, x), expected + numbers(x))
        x = x[:, ::-1] + 1


def test_groups_of_experts_and_one_shared() -> None:
    mixture, x = mixture_of(GROUPS, 192, 64, mx.bfloat16, shared=True)
    expected = numbers(expert_token.by_kernels(mixture, x))
    assert_near(mixture(x), expected)


@pytest.mark.parametrize(
    ("packed", "routing", "hidden", "width", "biased"),
    [
        (PACKED_FORMATS[-1], OSS, 17 * 64, 192, True),
        (PackedFormat(4, 64, floats=False), QWEN, 192, 128, False),
        (PackedFormat(8, 32, floats=False), GROUPS, 448, 64, True),
        (PackedFormat(4, 32, floats=False), OSS, 192, 192, False),
    ],
    ids=["mxfp4", "4 bits", "8 bits", "4 bits in groups of 32"],
)
def test_one_token_with_quantised_weights(
    packed: PackedFormat, routing: RoutingParams, hidden: int, width: int, biased: bool
) -> None:
    """Tests more columns than a warp holds, and more strips of down weights than thread blocks."""
    kind = mx.bfloat16
    mixture, x = mixture_of(routing, hidden, width, kind, shared=False)
    dense = mixture.experts
    experts = expert_products.quantised_experts(dense.gate_up.weight, dense.down.weight, packed)
    if biased:
        gate_up, down = (
            replace(layer, bias=(mx.random.normal((routing.count, rows)) / 2).astype(kind))
            for layer, rows in ((experts.gate_up, 2 * width), (experts.down, hidden))
        )
        experts = ExpertWeights(gate_up, down, 1.5)
    added = (mx.random.normal((routing.count,)) / 8).astype(kind) if biased else None
    mixture = replace(mixture, experts=experts, added=added)
    assert expert_token.supports(x, mixture.norm, mixture.gate, routing, experts)
    for _ in range(2):
        expected = numbers(expert_token.by_kernels(mixture, x))
        assert_near(mixture(x), expected)
        assert_near(mixture(x, x), expected + numbers(x))
        x = x[:, ::-1] + 1


def test_what_the_kernel_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, x = mixture_of(GROUPS, 192, 64, mx.bfloat16, shared=False)
    norm, gate, routing, experts = mixture.norm, mixture.gate, GROUPS, mixture.experts
    assert expert_token.supports(x, norm, gate, routing, experts)
    assert not expert_token.supports(mx.concatenate([x, x]), norm, gate, routing, experts)
    assert not expert_token.supports(x, norm, gate.astype(mx.float16), routing, experts)
    limited = replace(experts, limit=7.0)
    assert not expert_token.supports(x, norm, gate, routing, limited)
    monkeypatch.setattr(device, "shares_multiprocessors", lambda: True)
    assert not expert_token.supports(x, norm, gate, routing, experts)


@pytest.mark.skipif(ON_GPU, reason="simulates a GPU whose thread blocks are not all resident")
def test_thread_blocks_that_are_not_resident_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt, "resident", False)
    mixture, x = mixture_of(GROUPS, 192, 64, mx.bfloat16, shared=False)
    assert not expert_token.supports(
        x, mixture.norm, mixture.gate, mixture.routing, mixture.experts
    )
