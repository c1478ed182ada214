"""Compares the choice of experts, their products and their sum with float64.

All cases run on a GPU, some also by simt.py without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import expert_fragments, expert_products, expert_routing  # noqa: E402
from mlxpool.worker.kernels.expert_fragments import PackedArrays, PackedFormat  # noqa: E402
from mlxpool.worker.kernels.expert_products import ExpertWeight, ExpertWeights  # noqa: E402
from mlxpool.worker.kernels.routing_params import RoutingParams  # noqa: E402
from support.float64 import assert_near, normed, numbers  # noqa: E402

ON_GPU = mx.cuda.is_available()
GLM = RoutingParams(64, 4, sigmoid=True, normed=True, factor=1.8)
QWEN = RoutingParams(128, 8, sigmoid=False, normed=True)
GPT_OSS = RoutingParams(32, 4, sigmoid=False, normed=True)
ROUTINGS = {
    "GLM": GLM,
    "qwen3_moe": QWEN,
    "gpt_oss": GPT_OSS,
    "qwen3_next": RoutingParams(512, 10, sigmoid=False, normed=True),
    "not normed": RoutingParams(40, 6, sigmoid=False, normed=False),
    "groups": RoutingParams(
        64, 8, sigmoid=True, normed=True, factor=2.5, groups=8, chosen_groups=4
    ),
    "one choice": RoutingParams(8, 1, sigmoid=True, normed=True),
    "all": RoutingParams(8, 8, sigmoid=False, normed=True),
}


pytestmark = pytest.mark.usefixtures("simulated_kernels")


@dataclass
class Plan:
    """The parts of a kernel's routing plan for T tokens: chosen experts, weights and work items."""

    weights: Any  # [T, k]
    experts: Any  # [T, k]
    order: Any  # choices by expert, with the choices of a shared expert
    items: Any  # expert, lines and first position of each work item

    @classmethod
    def of(cls, words: Any, tokens: int, routing: RoutingParams, shared: bool) -> Plan:
        array, choices = np.array(words), tokens * routing.chosen
        lines = expert_routing.item_lines(tokens, routing)
        assert len(array) == expert_routing.plan_words(tokens, lines, routing, shared)
        assert array[0] <= expert_routing.max_items(tokens, lines, routing, shared)
        weights, experts, order = np.split(array[4:], [choices, 2 * choices])
        begin = 4 + 3 * choices + shared * tokens
        items = array[begin + begin % 2 :].reshape(-1, 2)[: array[0]]
        return cls(
            weights.view(np.float32).reshape(tokens, -1),
            experts.reshape(tokens, -1),
            order[: choices + shared * tokens],
            np.stack([items[:, 0] & 0xFFFF, items[:, 0] >> 16, items[:, 1]], axis=1),
        )

    def check_work(self, tokens: int, routing: RoutingParams, shared: bool) -> None:
        """Checks the work items: each has choices of one expert, and each choice is in one item.

        The choices are sorted by expert.
        """
        flat, lines = self.experts.reshape(-1), expert_routing.item_lines(tokens, routing)
        expected = list(np.argsort(flat, kind="stable"))
        if shared:
            expected += list(len(flat) + np.arange(tokens))
        assert self.order.tolist() == expected
        whose = np.append(flat, np.full(tokens, routing.count))
        at = 0
        for expert, count, first in self.items.tolist():
            assert first == at and 0 < count <= lines
            assert (whose[self.order[first : first + count]] == expert).all()
            at += count
        assert at == len(expected)
        full = [count for _, count, _ in self.items.tolist()]
        assert sum(count < lines for count in full) <= len(np.unique(flat)) + shared


def expected_choice(logits: Any, added: Any, routing: RoutingParams) -> tuple[Any, Any]:
    """Returns the experts [T, k] in descending order, and their weights, in float64."""
    if routing.sigmoid:
        scores = 1 / (1 + np.exp(-logits))
        ranked = scores + (0 if added is None else added)
        if routing.chosen_groups < routing.groups:
            grouped = ranked.reshape(len(logits), routing.groups, -1)
            two = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
            best = np.argsort(-two, axis=-1, kind="stable")[:, : routing.chosen_groups]
            keep = np.zeros(two.shape, bool)
            np.put_along_axis(keep, best, True, axis=1)
            ranked = np.where(keep[..., None], grouped, 0).reshape(ranked.shape)
    else:
        ranked = logits + (0 if added is None else added)
        powers = np.exp(ranked - ranked.max(-1, keepdims=True))
        scores = powers / powers.sum(-1, keepdims=True)
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : routing.chosen]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if routing.normed and (routing.chosen > 1 or not routing.sigmoid):
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights * routing.factor


def distinct_logits(tokens: int, routing: RoutingParams, seed: int = 0) -> Any:
    """Returns logits [T, E]; no two logits of one token are close."""
    rng = np.random.default_rng(seed)
    steps = np.arange(routing.count) * (6 / routing.count) - 3
    return np.stack([rng.permutation(steps) for _ in range(tokens)]).astype(np.float32)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_plan_of_logits_equals_float64(name: str) -> None:
    """Tests routings with and without a shared expert, and with and without an added bias."""
    routing, number = ROUTINGS[name], list(ROUTINGS).index(name)
    shared, adds = number % 2 == 0, number % 3 < 2
    added = np.random.default_rng(9).normal(size=routing.count).astype(np.float32) / 4
    more = added if adds else None
    for tokens in (1, 7, 8, 9, 64, 300):
        logits = distinct_logits(tokens, routing, tokens)
        ours = mx.array(added) if adds else None
        words = expert_routing.plan_logits(mx.array(logits), ours, routing, shared=shared)
        plan = Plan.of(words, tokens, routing, shared)
        experts, weights = expected_choice(logits.astype(np.float64), more, routing)
        assert (plan.experts == experts).mean() > 0.999  # near-ties may differ
        assert np.allclose(plan.weights, weights, 1e-3, 1e-4)
        plan.check_work(tokens, routing, shared)


@pytest.mark.parametrize(
    ("name", "dtype"), [("GLM", "bfloat16"), ("gpt_oss", "float16"), ("all", "bfloat16")]
)
def test_the_plan_of_tokens_equals_float64(name: str, dtype: str) -> None:
    routing, kind, size = ROUTINGS[name], getattr(mx, dtype), 192
    mx.random.seed(3)
    gate = (mx.random.normal((routing.count, size)) * size**-0.5).astype(kind)
    for tokens in (1, 11, 40):
        x = (4 * mx.random.normal((tokens, size))).astype(kind)
        assert expert_routing.multiplies(x, gate)
        words = expert_routing.plan_tokens(x, gate, None, routing, shared=False)
        plan = Plan.of(words, tokens, routing, False)
        plan.check_work(tokens, routing, False)
        logits = numbers(x) @ numbers(gate).T
        experts, weights = expected_choice(logits, None, routing)
        assert (plan.experts == experts).mean() > 0.98
        assert np.allclose(plan.weights, weights, 1e-3, 1e-3)


@pytest.mark.parametrize("tokens", [1, 8])
def test_the_plan_of_normed_tokens_is_that_of_their_norm(tokens: int) -> None:
    size = 576
    gate = (mx.random.normal((64, size), key=mx.random.key(1)) * size**-0.5).astype(mx.bfloat16)
    gain = mx.random.normal((size,), key=mx.random.key(2)).astype(mx.bfloat16)
    x = (4 * mx.random.normal((tokens, size), key=mx.random.key(3))).astype(mx.bfloat16)
    added = mx.random.normal((64,), key=mx.random.key(4)) / 8
    assert expert_routing.can_norm(x) and not expert_routing.can_norm(mx.zeros((9, size)))
    norm = expert_routing.LineNorm(gain, 1e-5)
    plan, lines = expert_routing.plan_normed_tokens(x, norm, gate, added, GLM, shared=True)
    assert_near(lines, normed(numbers(x), numbers(gain), 1e-5), 0.01)
    again = expert_routing.plan_tokens(lines, gate, added, GLM, shared=True)
    assert np.array_equal(np.array(plan), np.array(again))


def test_many_tokens_have_thread_blocks_of_more_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    x = mx.random.normal((37, 192), key=mx.random.key(5)).astype(mx.bfloat16)
    gate = (mx.random.normal((40, 192), key=mx.random.key(6)) / 12).astype(mx.bfloat16)
    routing, plans = ROUTINGS["not normed"], []
    for blocks in (expert_routing.MANY_BLOCKS, 4):
        monkeypatch.setattr(expert_routing, "MANY_BLOCKS", blocks)
        words = expert_routing.plan_tokens(x, gate, None, routing, shared=True)
        Plan.of(words, 37, routing, True).check_work(37, routing, True)
        plans.append(Plan.of(words, 37, routing, True))
    assert np.array_equal(plans[0].experts, plans[1].experts)
    assert np.array_equal(plans[0].weights, plans[1].weights)


def test_equal_logits_choose_the_lower_expert_and_no_numbers_choose_some() -> None:
    for routing in (GLM, QWEN, ROUTINGS["groups"]):
        logits = np.zeros((3, routing.count), np.float32)
        logits[1, 5] = 1
        logits[2] = np.nan
        words = expert_routing.plan_logits(mx.array(logits), None, routing, shared=False)
        plan = Plan.of(words, 3, routing, False)
        assert plan.experts[0].tolist() == list(range(routing.chosen))
        others = [expert for expert in range(routing.chosen) if expert != 5]
        assert plan.experts[1].tolist() == [5, *others][: routing.chosen]
        assert len(set(plan.experts[2].tolist())) == routing.chosen
        assert np.isnan(plan.weights[2]).all() and np.isfinite(plan.weights[:2]).all()
        plan.check_work(3, routing, False)


@pytest.mark.parametrize("tokens", [1, 130, 300])
def test_all_tokens_can_have_the_same_experts(tokens: int) -> None:
    logits = np.tile(distinct_logits(1, GLM), (tokens, 1))
    words = expert_routing.plan_logits(mx.array(logits), None, GLM, shared=True)
    plan = Plan.of(words, tokens, GLM, True)
    assert len(np.unique(plan.experts)) == GLM.chosen
    plan.check_work(tokens, GLM, True)


def test_the_lines_of_items() -> None:
    lines = [expert_routing.item_lines(tokens, GLM) for tokens in (1, 8, 32, 128, 512, 2048)]
    assert lines == [8, 8, 8, 32, 64, 128]
    assert not expert_routing.supports(20_000, GLM)
    assert not expert_routing.supports(1, RoutingParams(600, 4, sigmoid=True, normed=True))
    assert expert_routing.supports(1, GLM) and expert_products.supports(128, 64, mx.bfloat16)
    assert not expert_products.supports(100, 64, mx.bfloat16)
    assert not expert_products.supports(128, 64, mx.float32)


@dataclass
class Experts:
    """Random experts, quantised or not, and a dense shared expert, to compute with a kernel."""

    routing: RoutingParams
    hidden: int
    width: int
    kind: Any
    packed: PackedFormat | None = None
    biased: bool = False
    limit: float = 0.0

    def __post_init__(self) -> None:
        mx.random.seed(5)
        count, hidden, width = self.routing.count, self.hidden, self.width

        def weight(*shape: int) -> Any:
            return (mx.random.normal(shape) * shape[-1] ** -0.5).astype(self.kind)

        shapes = (count, 2 * width, hidden), (count, hidden, width)
        self.dense = [weight(*shape) for shape in shapes]
        layers = [ExpertWeight(dense) for dense in self.dense]
        if self.packed is not None:
            both = [expert_fragments.quantised(dense, self.packed) for dense in self.dense]
            layers = [expert_products.of_packed(packed, gated=packed is both[0]) for packed in both]
            self.dense = [exact(packed) for packed in both]
        if self.biased:
            layers = [replace(layer, bias=weight(count, layer.rows) * 8) for layer in layers]
        self.weights = ExpertWeights(layers[0], layers[1], self.limit)
        self.shared = weight(2 * width, hidden), weight(hidden, width)

    def one(self, x: Any, expert: int | None) -> Any:
        """Returns the output of expert number `expert` for x, or of the shared expert (None)."""
        layers, biases = [numbers(weight) for weight in self.shared], [0, 0]
        if expert is not None:
            both = self.weights.gate_up, self.weights.down
            layers = [numbers(dense[expert]) for dense in self.dense]
            biases = [0 if layer.bias is None else numbers(layer.bias[expert]) for layer in both]
        gate, up = np.split(x @ layers[0].T + biases[0], 2, axis=-1)
        if self.limit and expert is not None:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit) + 1
        slope = 1.702 if self.limit and expert is not None else 1
        return (gate / (1 + np.exp(-slope * gate)) * up) @ layers[1].T + biases[1]

    def expected(self, x: Any, plan: Plan, shared: bool) -> Any:
        out = np.zeros((len(x), self.hidden))
        for expert in np.unique(plan.experts):
            token, choice = np.nonzero(plan.experts == expert)
            out[token] += self.one(x[token], int(expert)) * plan.weights[token, choice][:, None]
        return out + (self.one(x, None) if shared else 0)


def exact(given: PackedArrays) -> Any:
    """Returns the dequantised weight, in float32: in bfloat16 MLX rounds intermediate results."""
    if given.biases is None:
        return given.opened()
    scales, biases = given.scales.astype(mx.float32), given.biases.astype(mx.float32)
    return replace(given, scales=scales, biases=biases).opened()


THREE = RoutingParams(8, 3, sigmoid=False, normed=True)
TWO = RoutingParams(5, 2, sigmoid=False, normed=False)
PRODUCTS = {
    "bfloat16": Experts(THREE, 192, 128, mx.bfloat16),
    "float16": Experts(TWO, 128, 192, mx.float16, biased=True, limit=2.0),
}
FOUR, EIGHT = PackedFormat(4, 64, floats=False), PackedFormat(8, 32, floats=False)
MXFP4 = PackedFormat(4, 32, floats=True)
PACKED = {
    "4 bits": partial(Experts, THREE, 256, 192, mx.bfloat16, FOUR),
    "4 bits, groups of 32": partial(Experts, TWO, 192, 128, mx.float16, replace(FOUR, group=32)),
    "8 bits": partial(Experts, TWO, 192, 128, mx.bfloat16, EIGHT),
    "mxfp4": partial(Experts, THREE, 320, 192, mx.bfloat16, MXFP4, biased=True, limit=2.0),
    "mxfp4, float16": partial(Experts, TWO, 128, 192, mx.float16, MXFP4),
}


def check_mixture(experts: Experts, tokens: int, *, skewed: bool, shared: bool) -> None:
    """Compares a mixture of experts with float64.

    With `skewed` all tokens choose the same experts.
    """
    routing = experts.routing
    x = mx.random.normal((tokens, experts.hidden), key=mx.random.key(tokens)).astype(experts.kind)
    logits = distinct_logits(1 if skewed else tokens, routing, tokens)
    given = mx.array(np.tile(logits, (tokens, 1)) if skewed else logits)
    words = expert_routing.plan_logits(given, None, routing, shared=shared)
    plan = Plan.of(words, tokens, routing, shared)
    beside = None if shared else x * 2
    more = experts.shared if shared else None
    outputs, whole = expert_products.pending_mixture(
        x, words, routing, experts.weights, more, beside
    )
    mixture = whole(outputs)
    if tokens == 9:
        assert mx.array_equal(whole(outputs, x), x + mixture).item()
    expected = experts.expected(numbers(x), plan, shared)
    expected += 0 if beside is None else numbers(beside)
    assert_near(mixture, expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_mixture_equals_float64(name: str) -> None:
    """Tests evenly spread and identical choices of experts, with and without a shared expert."""
    few = (9, 150) if name == "bfloat16" else (33,)  # a simulated kernel takes a second to compile
    for tokens in few if not ON_GPU else (1, 4, 9, 17, 33, 64, 150, 300, 1000):
        shared = tokens % 2 == 1 and not PRODUCTS[name].biased
        check_mixture(PRODUCTS[name], tokens, skewed=tokens == 150, shared=shared)


@pytest.mark.parametrize("name", PACKED)
def test_the_mixture_of_quantised_experts_equals_float64(name: str) -> None:
    experts = PACKED[name]()
    formats = (experts.packed, experts.packed)
    assert expert_products.supports(experts.hidden, experts.width, experts.kind, formats)
    few = (33,) if experts.kind == mx.float16 else (20, 135)
    for tokens in few if not ON_GPU else (1, 4, 9, 17, 33, 64, 150, 300, 1000):
        check_mixture(experts, tokens, skewed=tokens == 135, shared=False)


@pytest.mark.parametrize("tokens", [3, 20])
def test_few_blocks_multiply_all_units_of_quantised_experts(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two thread blocks and little shared memory, each block computes several work items."""
    experts = PACKED["mxfp4"]()
    monkeypatch.setattr(expert_products, "MULTIPROCESSORS", 2)
    room = expert_routing.item_lines(tokens, experts.routing) * 2 * (experts.hidden + 8)
    monkeypatch.setattr(expert_products, "FEW_SHARED_BYTES", room + 1024)
    expert_products.few_layout.cache_clear()
    check_mixture(experts, tokens, skewed=False, shared=False)
    expert_products.few_layout.cache_clear()


@pytest.mark.parametrize("packed", [MXFP4, EIGHT], ids=["mxfp4", "8 bits"])
def test_few_blocks_multiply_quantised_experts_with_a_part_of_a_stage(
    packed: PackedFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread block computes many units, whose rows have fewer fragments in their last stage."""
    experts = Experts(THREE, 7 * expert_products.COLUMNS, 128, mx.bfloat16, packed)
    monkeypatch.setattr(expert_products, "MULTIPROCESSORS", 1)
    for tokens, sets in ((33, 4), (135, 16)):
        layout = expert_products.packed_layout(sets, experts.hidden, packed)
        assert 7 % layout.wide and layout.wide % layout.deep == 0
        check_mixture(experts, tokens, skewed=sets == 16, shared=False)
