"""Tests streams that continue when their context is full: the tokens read by passes and resumes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.compute.model_source import ModelSource
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.scheduling.spans import Span
from support.compute_harness import ComputeHarness, end_of, ids_of
from support.context_window import window
from support.counting_checker import expected_ids, text_of
from support.engine_steps import decode, enter
from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.weights.inspect import ModelFolder, inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

INT8_TIE = 0.1  # TIE for int8: rounding may change a number to the next integer
TIE = 0.1 if device.on_gpu() else 1e-4  # log-probability margin of the two best within rounding
CONTEXT, KEEP, STEPS = 24, 5, 75
SHIFT = {"shift": True, "num_ctx": CONTEXT, "num_keep": KEEP, "ignore_eos": True}


# ---- the counting model ------------------------------------------------------------------------


class Recording(CountingEngine):
    """A counting engine that records which positions of a stream each pass reads, by request."""

    read: ClassVar[dict[int, list[list[int]]]] = {}

    def submit(self, spans: Many[Span]) -> bool:
        for span in spans:
            seq = span.sequence
            stream = list(range(len(seq.prompt) + len(seq.ids)))
            assert span.end <= CONTEXT, "no more is read than the context holds"
            place = window(stream, CONTEXT, KEEP)[span.start : span.end]
            self.read.setdefault(seq.seed, []).append(place)
        return super().submit(spans)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[int]]]:
    monkeypatch.setattr(Recording, "read", {})
    return Recording.read


def test_a_counting_stream_goes_on_at_a_full_context(recorded: dict[int, list[list[int]]]) -> None:
    harness = ComputeHarness(engine=Recording).ready()
    for name in (1, 2, 3):
        harness.admit(name, prompt="x" * 10, count=40 + name, **SHIFT)
    harness.admit(4, prompt="x" * 10, count=14)
    deltas = harness.until_ended({1, 2, 3, 4})
    for name in (1, 2, 3):
        wanted = expected_ids("x" * 10, name, 40 + name)
        assert ids_of(deltas[name]) == wanted
        assert [delta.pos for delta in deltas[name]] == list(range(40 + name))
        assert "".join(delta.text for delta in deltas[name]) == text_of(wanted)
        end = end_of(deltas[name])
        assert end["reason"] == "length"
        assert end["usage"] == {
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "completion_tokens": 40 + name,
            "total_tokens": 50 + name,
        }
    assert ids_of(deltas[4]) == expected_ids("x" * 10, 4, 14)
    chunks = [chunk for chunk in recorded[1] if len(chunk) > 1]
    # The tokens that a model reads: the prompt, and after each cut of 9 the rest of the context.
    kept = list(range(KEEP))
    assert (
        chunks
        == [
            list(range(10)),
            [*kept, *range(KEEP + 9, 25)],
            [*kept, *range(KEEP + 18, 34)],
            [*kept, *range(KEEP + 27, 43)],
            [*kept, *range(KEEP + 36, 52)],
        ][: len(chunks)]
    )
    assert len(chunks) == 4  # 50 tokens are read: cuts before the 25th, 34th and 43rd


def test_a_resume_reads_no_more_than_the_context(recorded: dict[int, list[list[int]]]) -> None:
    harness = ComputeHarness(engine=Recording).ready()
    wanted = expected_ids("x" * 10, 1, 60)
    for name, had in enumerate((14, 15, 16, 23, 24, 25, 40), 1):
        ids = expected_ids("x" * 10, name, had)
        harness.resume(name, ids, "x" * 10, 60, **SHIFT)
    deltas = harness.until_ended(set(range(1, 8)))
    for name, had in enumerate((14, 15, 16, 23, 24, 25, 40), 1):
        assert ids_of(deltas[name]) == expected_ids("x" * 10, name, 60)[had:]
        assert recorded[name][0] == window(range(10 + had), CONTEXT, KEEP)
    assert wanted[14:] == ids_of(deltas[1])


def test_everything_but_one_token_may_be_kept(recorded: dict[int, list[list[int]]]) -> None:
    """A context that keeps all but one token shifts at every token, and is read again each time."""
    harness = ComputeHarness().ready()
    harness.admit(1, prompt="x" * 7, count=30, shift=True, num_ctx=8, num_keep=-1)
    harness.admit(2, prompt="x" * 7, count=30, shift=True, num_ctx=8, num_keep=7)
    deltas = harness.until_ended({1, 2})
    for name in (1, 2):
        assert ids_of(deltas[name]) == expected_ids("x" * 7, name, 30)


def test_a_stop_string_ends_a_shifted_stream(recorded: dict[int, list[list[int]]]) -> None:
    harness = ComputeHarness().ready()
    wanted = expected_ids("x" * 10, 1, 50)
    harness.admit(1, prompt="x" * 10, count=1000, stop=[text_of(wanted[-2:])], **SHIFT)
    (deltas,) = harness.until_ended({1}).values()
    assert ids_of(deltas) == wanted and end_of(deltas)["reason"] == "stop"


# ---- models with weights -----------------------------------------------------------------------

GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
    "num_hidden_layers": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "keys and values": {},
    "recurrent": {**QWEN3_NEXT, "num_hidden_layers": 3},
    "windows": GEMMA3,
    "latent": GLM,
}
LAYOUTS = [
    ("keys and values", {"layout": "slabs"}),
    ("keys and values", {"layout": "rows"}),
    ("keys and values", {"layout": "pool"}),
    ("keys and values", {"lookahead": True}),
    ("keys and values", {"prefix": "single"}),
    ("keys and values", {"prefix": "off"}),
    ("recurrent", {}),
    ("recurrent", {"lookahead": True}),
    ("windows", {}),
    ("latent", {}),
    ("latent", {"lookahead": True}),
    ("keys and values", {"kv": "int8"}),
    ("keys and values", {"kv": "int8", "layout": "pool"}),
    ("recurrent", {"kv": "int8"}),
    ("windows", {"kv": "int8"}),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: load(inspect(write_checkpoint(root / str(number), **config)))
        for number, (name, config) in enumerate(MODELS.items())
    }


def harness_of(
    folder: ModelFolder, *, deterministic: bool = False, **settings: Any
) -> ComputeHarness:
    """A compute thread with an engine of these settings, without its warm-up."""
    text = ChatTokenizer.from_folder(folder)

    def open_source(config: ModelConfig) -> ModelSource:
        def build(
            on_progress: object,
        ) -> ModelEngine:  # arrays belong to the thread that makes them
            model = load(folder, deterministic=deterministic)
            engine = model_engine(model, text, **{"blocks": 40, "lookahead": False, **settings})
            engine.warm_up = lambda on_progress=None: None  # type: ignore[method-assign]
            return engine

        opened = Opened("", folder.context, folder.plan.vocab_size, text)
        return ModelSource(opened, build, config.sequences)

    return ComputeHarness(source=open_source).ready()


def prompt_of(size: int, salt: int) -> list[int]:
    return [int(token) for token in np.random.default_rng([size, salt]).integers(0, 256, size)]


class Reference:
    """Computes the likeliest tokens after each context from an empty row; remembers the results."""

    def __init__(self, loaded: LoadedModel, kv: str) -> None:
        self._engine = model_engine(loaded, prefix="off", lookahead=False, kv=kv)
        self._tie = TIE if kv == "auto" else INT8_TIE
        self._known: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def assert_read(self, prompt: list[int], ids: list[int], context: int) -> None:
        """Asserts that each id is the likeliest after the tokens in the context, up to ties."""
        for count, token in enumerate(ids):
            (best, first), (other, second) = self._best_two(
                tuple(window([*prompt, *ids[:count]], context, KEEP))
            )
            assert token == best or (token == other and first - second < self._tie), count

    def _best_two(self, inputs: tuple[int, ...]) -> list[tuple[int, float]]:
        """Returns the two likeliest tokens after `inputs`, with their log-probabilities."""
        if inputs not in self._known:
            options = Options(temperature=0.0, logprobs=True, top_logprobs=2)
            seq = Sequence(b"", 1, inputs, options, 0, 1)
            enter(self._engine, seq)
            (drawn,) = decode(self._engine, [seq])
            self._engine.release(seq)
            assert drawn.logprob is not None
            self._known[inputs] = list(drawn.logprob.top)
        return self._known[inputs]


@pytest.fixture(scope="module")
def references(loaded: dict[str, LoadedModel]) -> Callable[[str, str], Reference]:
    """Returns a function that returns the Reference of a model and a dtype of keys and values.

    Each Reference is made once for all tests.
    """
    return cache(lambda model, kv: Reference(loaded[model], kv))


@pytest.mark.parametrize(
    ("model", "settings"), LAYOUTS, ids=[f"{m}, {s or 'default'}" for m, s in LAYOUTS]
)
def test_a_shifted_stream_is_that_of_its_context_read_again(
    model: str,
    settings: dict[str, Any],
    loaded: dict[str, LoadedModel],
    references: Callable[[str, str], Reference],
) -> None:
    harness = harness_of(loaded[model].folder, **settings)
    reference = references(model, settings.get("kv", "auto"))
    greedy = {**SHIFT, "temperature": 0.0}
    prompts = {1: prompt_of(10, 1), 2: prompt_of(23, 2), 3: prompt_of(3, 3)}
    for name, prompt in prompts.items():
        harness.admit(name, prompt, STEPS, **greedy)
    harness.admit(4, prompt_of(40, 4), STEPS, temperature=0.0, ignore_eos=True)
    deltas = harness.until_ended({1, 2, 3, 4})
    for name, prompt in prompts.items():
        ids = ids_of(deltas[name])
        assert len(ids) == STEPS
        reference.assert_read(prompt, ids, CONTEXT)
    reference.assert_read(prompt_of(40, 4), ids_of(deltas[4]), 512)
    # A worker that resumes in the middle: before, at and after a cut.
    begun = {name: ids_of(deltas[1])[:had] for name, had in enumerate((14, 15, 16, 40), 5)}
    for name, ids in begun.items():
        harness.resume(name, list(ids), prompts[1], STEPS, **greedy)
    resumed = harness.until_ended(set(begun))
    for name, ids in begun.items():
        whole = [*ids, *ids_of(resumed[name])]
        assert len(whole) == STEPS
        reference.assert_read(prompts[1], whole, CONTEXT)


@pytest.mark.skipif(device.on_gpu(), reason="a GPU refuses `deterministic`")
@pytest.mark.parametrize(
    ("had", "kv"), [*((had, "auto") for had in (1, 14, 15, 30, 74)), (15, "int8"), (40, "int8")]
)
def test_a_resume_of_a_shifted_stream_is_exact(had: int, kv: str, tmp_path: Path) -> None:
    """Tests sampled streams whose penalty window is longer than the context."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 16}
    folder = inspect(write_checkpoint(tmp_path, **sizes))
    options = {
        **SHIFT,
        "temperature": 0.9,
        "repeat_penalty": 1.3,
        "frequency_penalty": 0.1,
        "repeat_last_n": 40,
        "logprobs": True,
    }
    prompt, harness = prompt_of(10, 1), harness_of(folder, deterministic=True, kv=kv)
    harness.admit(1, prompt, STEPS, **options)
    whole = harness.until_ended({1})[1]
    other = harness_of(folder, deterministic=True, kv=kv)
    other.admit(2, prompt_of(20, 2), 30, temperature=0.0)  # in the same batch
    other.resume(1, ids_of(whole)[:had], prompt, STEPS, **options)
    rest = other.until_ended({1, 2})[1]
    assert ids_of(rest) == ids_of(whole)[had:]
    logprobs = [entry for delta in whole for entry in delta.logprobs or ()]
    assert [entry for delta in rest for entry in delta.logprobs or ()] == logprobs[had:]


def test_a_stream_may_shift_at_the_models_own_context(
    loaded: dict[str, LoadedModel], references: Callable[[str, str], Reference]
) -> None:
    """The stream fills the model's own context before it shifts; a row has memory for all of it."""
    model = loaded["keys and values"]
    prompt = prompt_of(500, 1)
    for settings in ({"layout": "slabs"}, {"layout": "pool", "lookahead": True}):
        harness = harness_of(model.folder, **settings)
        harness.admit(
            1, prompt, 30, temperature=0.0, ignore_eos=True, shift=True, num_ctx=512, num_keep=KEEP
        )
        ids = ids_of(harness.until_ended({1})[1])
        assert len(ids) == 30
        references("keys and values", "auto").assert_read(prompt, ids, 512)


def test_of_a_shifted_stream_only_the_kept_tokens_are_cached_again(
    loaded: dict[str, LoadedModel],
) -> None:
    """The prefix cache has the prompt and the ids before the first shift.

    It has no ids after the shift.
    """
    harness = harness_of(loaded["keys and values"].folder)
    prompt = prompt_of(10, 1)
    harness.admit(1, prompt, STEPS, temperature=0.0, **SHIFT)
    ids = ids_of(harness.until_ended({1})[1])
    inputs = window([*prompt, *ids[:20]], CONTEXT, KEEP)
    harness.admit(2, [*prompt, *ids[:14], 1, 2], 1)
    harness.admit(3, [*inputs, 1, 2], 1)
    deltas = harness.until_ended({2, 3})
    assert end_of(deltas[2])["usage"]["cached_tokens"] == 24
    assert end_of(deltas[3])["usage"]["cached_tokens"] == KEEP
