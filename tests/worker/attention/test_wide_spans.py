"""Tests spans that give the logits of several tokens, or hidden states, in every layout.

The results are compared with a model that reads token by token and gives the logits of each token.
The hidden states are compared with the inputs of that model's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.worker_checkpoints import GLM, QWEN3_NEXT, config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_pool import ragged_batch, ragged_runner  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.layout import Layout  # noqa: E402
from mlxpool.worker.attention.layout_choice import choose_layout, make_layout  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan, logit_spans  # noqa: E402
from mlxpool.worker.engine.trial_passes import PassKind, compiled_kinds  # noqa: E402
from mlxpool.worker.transfers.uploads import Uploads  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support import simt  # noqa: E402
from support.model_head import noted_head  # noqa: E402

ON_GPU = mx.cuda.is_available()
CONTEXT = 512
WINDOWS = {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "sliding_attention"],
}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({}, ("rows", "slabs", "pool")),
    "windows and sinks": (WINDOWS, ("rows", "pool")),
    "latent": (GLM, ("rows", "pool")),
    "recurrent": ({**QWEN3_NEXT, "num_hidden_layers": 3}, ("rows",)),
}
CASES = [(name, layout) for name, (_, layouts) in MODELS.items() for layout in layouts]
# For each row of a pass: its tokens, its tokens with results, whether results are hidden states.
PASSES = st.lists(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 3, 5, 20]), st.integers(0, 20), st.booleans()),
        min_size=5,
        max_size=5,
    ).filter(lambda each: any(count for count, _, _ in each)),
    min_size=1,
    max_size=3,
)
Given = tuple[int, int, bool]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def one(name: str) -> LoadedModel:
        if name not in models:
            changes = {**MODELS[name][0], "max_position_embeddings": CONTEXT}
            models[name] = load(
                inspect(write_checkpoint(tmp_path_factory.mktemp("model"), **changes))
            )
        return models[name]

    models: dict[str, LoadedModel] = {}
    return one


def layout_of(name: str, model: LoadedModel, **others: Any) -> Layout:
    shape = RowShape(model.folder.plan.caches, model.dtype, CONTEXT, 300)
    name, shape = choose_layout(name, shape, model.model, deterministic=False, on_gpu=ON_GPU)
    options = {"rows": 32, "deterministic": False, "on_gpu": ON_GPU, **others}
    return make_layout(name, shape, model.model, 40, **options)


class OneByOne:
    """Reads tokens one by one; keeps the logits of each, and the inputs of the model's head."""

    def __init__(self, model: LoadedModel, rows: int) -> None:
        self._layout, self._model = layout_of("rows", model), model.model
        self.rows = [self._layout.store.new_row() for _ in range(rows)]

    def read(self, row: int, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits [n, vocabulary] and hidden states [n, d] of n tokens."""
        logits = []
        with noted_head(self._model) as taken:
            for token in ids:
                inputs = mx.array([token], dtype=mx.int32)
                out = self._layout.forward([RowSpan(self.rows[row], 1)], inputs, [0]).logits
                mx.eval(out, taken)
                logits.append(out)
        return tuple(np.array(mx.concatenate(x).astype(mx.float32)) for x in (logits, taken))  # type: ignore[return-value]


def compare(
    layout: Layout,
    one_by_one: OneByOne,
    passes: Sequence[Sequence[Given]],
    tolerance: float,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Computes passes; each span must give the results of reading its tokens one by one."""
    rows = [layout.store.new_row() for _ in one_by_one.rows]
    draw = np.random.default_rng(5)
    for each in passes:
        spans, ids, expected = [], [], []
        for number, (count, lines, hidden) in enumerate(each):
            if not count:
                continue
            tokens = draw.integers(0, 256, count).tolist()
            lines = count if hidden else min(lines, count)
            logits, states = one_by_one.read(number, tokens)
            spans.append(RowSpan(rows[number], count, max(lines, 1), hidden))
            expected.append((lines, states if hidden else logits[count - lines :]))
            ids += tokens
        wanted = [n for n, (lines, _) in enumerate(expected) if lines]
        wanted.sort(key=lambda n: (spans[n].hidden, spans[n].lines))
        begin()
        output = layout.step(spans, ids, None, wanted)
        mx.eval([part for part in output if part is not None])
        drawing = logit_spans(spans, wanted)
        assert (output.hidden is None) == (len(drawing) == len(wanted))
        for array, some in ((output.logits, drawing), (output.hidden, wanted[len(drawing) :])):
            if array is None or not some:
                continue
            got = np.array(array.astype(mx.float32))
            want = np.concatenate([expected[n][1] for n in some])
            assert array is not output.hidden or array.dtype == mx.float32
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
        assert [row.offset for row in rows] == [row.offset for row in one_by_one.rows]
        if layout.keeps_states:
            assert output.states is not None and output.states.shape[0] == len(ids)
            ends = np.cumsum([span.count for span in spans])
            drawn = [n for at in drawing for n in range(ends[at] - spans[at].lines, ends[at])]
            if drawn:
                of_lines = output.states[mx.array(drawn)]
                got = np.array(layout.model.logits_of(of_lines).astype(mx.float32))
                want = np.array(output.logits.astype(mx.float32))
                assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()
        if layout.keeps_drawn and drawing and output.hidden is None:
            assert output.drawn is not None, "the states that the logits are of"
            lines = output.logits.shape[0]
            got = np.array(layout.model.logits_of(output.drawn)[:lines].astype(mx.float32))
            want = np.array(output.logits.astype(mx.float32))
            assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()
        else:
            assert output.drawn is None or not drawing
    for row in rows:
        layout.store.release(row)


@settings(max_examples=10, deadline=None)
@given(passes=PASSES)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_spans_give_what_reading_one_by_one_gives(
    loaded: Any, name: str, layout: str, passes: Any
) -> None:
    model = loaded(name)
    compare(layout_of(layout, model), OneByOne(model, 5), passes, 2e-2 if ON_GPU else 1e-4)


MIXED: list[list[Given]] = [
    [(20, 1, False), (9, 0, False), (5, 5, True), (1, 1, False), (0, 0, False)],
    [(1, 1, False), (4, 4, False), (1, 1, True), (1, 1, False), (6, 2, False)],
    [(3, 3, False), (3, 3, False), (3, 3, False), (3, 3, False), (2, 2, False)],
    [(1, 1, False), (3, 3, True), (1, 0, False), (2, 2, False), (1, 1, False)],
    [(1, 1, True), (1, 1, False), (1, 1, False), (1, 1, True), (1, 1, False)],
    [(9, 9, True), (2, 2, True), (0, 0, False), (0, 0, False), (0, 0, False)],
    [(3, 2, False), (1, 1, False), (0, 0, False), (0, 0, False), (0, 0, False)],
]


@pytest.fixture(params=["", "keeps_drawn", "keeps_states"])
def ragged(
    request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, LoadedModel, Callable[[], None]]]:
    """Yields the layout of a block pool whose passes run our kernels, simulated without a GPU.

    Also yields the model in float32, and a function to call before each pass, which begins its
    uploads. Two variants also return hidden states for a model's own head: the states of the drawn
    tokens (`keeps_drawn`), or of all inputs (`keeps_states`). In the latter variant MLX copies a
    pass's plan to the device.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 64,
        "vocab_size": 288,
    }
    weights = {
        name: np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
        for name, array in random_weights(config(**sizes)).items()
    }
    folder = inspect(write_checkpoint(tmp_path, weights=weights, **sizes))
    exact = load(folder)
    with ExitStack() as stack:
        if not ON_GPU:
            stack.enter_context(simt.simulated())
        uploads = None if request.param == "keeps_states" else Uploads()
        layout = layout_of(
            "pool",
            load(folder, dtype=mx.bfloat16),
            rows=8,
            on_gpu=True,
            uploads=uploads,
            **({request.param: True} if request.param else {}),
        )
        assert isinstance(layout, PagedLayout) and layout.ragged is not None
        yield layout, exact, uploads.begin if uploads else lambda: None


def test_ragged_passes_give_what_reading_one_by_one_gives(
    ragged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares bfloat16 passes with float32; some passes give more results than they have rows.

    A pass with chunks is submitted in two parts, of which the first ends after the first of two
    layers.
    """
    layout, exact, begins = ragged
    monkeypatch.setattr(ragged_batch, "ends_part", lambda layer: layer == 0)
    begun: list[int] = []
    begin = ragged_runner.begin

    def noted(parts: Sequence[Any]) -> None:
        begun.append(len(parts))
        begin(parts)

    monkeypatch.setattr(ragged_runner, "begin", noted)
    compare(layout, OneByOne(exact, 5), MIXED, 5e-2, begin=begins)
    kinds = {(shape.wanted > 8, shape.drawn) for shape in layout.ragged.passes}
    assert {(False, None), (True, None), (False, 8), (True, 8), (True, 0)} <= kinds
    assert begun.count(1) >= 4 and set(begun) <= {0, 1}


def spans_of(layout: Layout, kind: PassKind) -> tuple[list[RowSpan], list[int]]:
    """Returns the spans of a pass of this kind, and the indices of the spans that get logits."""
    new = layout.store.new_row
    spans = [RowSpan(new(), count) for count in kind.counts]
    spans += [RowSpan(new(), 1 + kind.drafts, 1 + kind.drafts)] if kind.drafts else []
    wanted = [*range(len(spans))]
    return spans + ([RowSpan(new(), kind.unread)] if kind.unread else []), wanted


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.integers(0, 7), counts=st.lists(st.integers(2, 100), min_size=1, max_size=3))
def test_passes_with_prompts_were_compiled_at_load(
    ragged: Any, rows: int, counts: list[int]
) -> None:
    """Every pass over `rows` decoding rows and some chunks of prompts was compiled at load.

    Any number of the prompts may end in the pass.
    """
    layout, *_ = ragged
    runner = layout.ragged
    kinds = compiled_kinds(runner.sizes, 8, runner.sizes[-1], 0)
    known = {runner.shape_of(*spans_of(layout, kind)) for kind in kinds}
    spans = [RowSpan(layout.store.new_row(), count) for count in [1] * rows + counts]
    if sum(span.count for span in spans) <= runner.sizes[-1]:
        for wanted in range(rows, len(spans) + 1):
            assert runner.shape_of(spans, list(range(min(wanted, 8)))) in known


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    depths=st.lists(st.integers(0, 16), min_size=1, max_size=8).filter(any),
    unread=st.sampled_from([0, 1, 7, 100, 200]),
    one_kernel=st.booleans(),
)
def test_passes_that_check_drafts_were_compiled_at_load(
    ragged: Any, depths: list[int], unread: int, one_kernel: bool
) -> None:
    """Passes have any number of rows, with or without prompts, and at most 48 drafts in total.

    48 is the expected number of drafts. If one kernel computes passes that only check drafts, these
    passes are compiled separately.
    """
    layout, *_ = ragged
    drafts, runner = 48, layout.ragged
    layout.expect_drafts(drafts)
    runner._one_kernel = object() if one_kernel else None
    while sum(depths) > drafts:
        depths = [depth // 2 for depth in depths]
    kinds = compiled_kinds(runner.sizes, 8, runner.sizes[-1], drafts, layout.follow_lines)
    known = {runner.shape_of(*spans_of(layout, kind)) for kind in [PassKind((1,)), *kinds]}
    new = layout.store.new_row
    spans = [RowSpan(new(), 1 + depth, 1 + depth) for depth in sorted(depths)]
    wanted = [*range(len(spans))]
    spans += [RowSpan(new(), unread)] if unread else []
    if sum(span.count for span in spans) <= runner.sizes[-1]:
        shape = runner.shape_of(spans, wanted)
        assert shape in known and shape.follow == (one_kernel and not unread)
        # A pass with a long prompt has few lines with logits.
        assert shape.wanted <= next(size for size in runner.sizes if size >= 8 + drafts)
