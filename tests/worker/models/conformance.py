"""Compares our engine with mlx-lm in every way of computing; the tests of all models use it.

A test file lists its cases, each a config.json. `prepare` writes a small random checkpoint for each
case. mlx-lm answers all prompts in one process, because its import is slow. Then our engine answers
them in each of WAYS: every token must be equal, and logits may differ by RELATIVE_TOLERANCE of the
largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.options import Options
from mlxpool.worker import models
from mlxpool.worker.attention.row_batch import RowBatch
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.caches.specs import RecurrentSpec
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import LoadedModel, load
from support import mlx_lm_peer
from support.engine_steps import decode, enter
from support.model_engines import model_engine
from support.model_logits import read, row_of
from support.worker_checkpoints import config, random_weights, write_checkpoint

Weights = Mapping[str, np.ndarray]

STEPS = 64
PROMPT_SIZES = (23, 2, 270)  # tokens; most ways use the first prompt
RELATIVE_TOLERANCE = 1e-4
MODES = {
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "mxfp8": (32, 8),
    "nvfp4": (16, 4),
}  # group size, bits


@dataclass(frozen=True, slots=True)
class Case:
    """A config.json to test; `stored` turns the weights of our plan into those of a checkpoint."""

    config: Mapping[str, Any]
    stored: Callable[[dict[str, np.ndarray]], Weights] = lambda weights: weights
    # Changes to the config for mlx-lm, if mlx-lm's file for the model lacks a feature. Tensors
    # that only the changed config has are zeros, so that their layers change nothing.
    peer: Mapping[str, Any] = field(default_factory=dict)
    only_alone: bool = False  # True: only "alone" of WAYS, for properties of single layers

    def is_tested(self, way: str) -> bool:
        """Returns whether the case is tested in this way of computing."""
        ways = WAYS_QUANTISED if "quantization" in self.config else WAYS
        return way in (("alone",) if self.only_alone else ways)


def quantised(
    settings: Mapping[str, Any], kept: str = "no such name", **more: Any
) -> dict[str, Case]:
    """Returns a case for each of MODES; weights whose names contain `kept` are not quantised."""
    return {
        f"quantised, {mode}": Case(
            {**settings, "quantization": {"group_size": group, "bits": bits, "mode": mode}, **more},
            partial(_packed, kept=kept, group=group, bits=bits, mode=mode),
        )
        for mode, (group, bits) in MODES.items()
    }


def _packed(
    weights: dict[str, np.ndarray], *, kept: str, group: int, bits: int, mode: str
) -> Weights:
    """Quantises as mlx-lm does: embeddings, linear layers and stacked experts."""
    stored = {}
    for name, array in weights.items():
        if array.ndim < 2 or kept in name or not name.endswith(".weight"):
            stored[name] = array
            continue
        tensors = mx.quantize(mx.array(array), group_size=group, bits=bits, mode=mode)
        for kind, tensor in zip(("weight", "scales", "biases"), tensors, strict=False):
            stored[f"{name.removesuffix('weight')}{kind}"] = np.array(tensor)
    return stored


@dataclass(frozen=True)
class Answer:
    """The answer of mlx-lm to a prompt: tokens [STEPS] and their logits [STEPS, V]."""

    prompt: list[int]
    ids: list[int]
    logits: np.ndarray

    @property
    def tolerance(self) -> float:
        """The largest allowed difference of a logit."""
        return RELATIVE_TOLERANCE * float(np.abs(self.logits).max())

    def sequence(self, prompt: list[int] | None = None) -> Sequence:
        """Returns a request with the answer's prompt, or with another prompt."""
        options = Options(temperature=0.0, logprobs=True, top_logprobs=3)
        return Sequence(b"", 1, tuple(prompt or self.prompt), options, 0, STEPS)


@dataclass(frozen=True)
class Checked:
    """A checkpoint and mlx-lm's answers."""

    path: Path
    answers: tuple[Answer, ...]

    @cached_property
    def loaded(self) -> LoadedModel:
        return load(inspect(self.path))

    @cached_property
    def text(self) -> ChatTokenizer:
        return ChatTokenizer.from_folder(self.loaded.folder)

    def engine(self, prefix: str = "tree") -> ModelEngine:
        return model_engine(self.loaded, self.text, prefix=prefix, lookahead=False)


def prepare(root: Path, cases: Mapping[str, Case]) -> dict[str, Checked]:
    """Returns all cases with mlx-lm's answers; skips the test if mlx-lm is not installed."""
    paths = {
        name: _write(root / str(number), case, number)
        for number, (name, case) in enumerate(cases.items())
    }
    return answered(paths)


def answered(paths: Mapping[str, Path]) -> dict[str, Checked]:
    """Model folders with mlx-lm's answers, which are written into the folders."""
    prompts = [prompt_of(size) for size in PROMPT_SIZES]
    folders = {name: _peer_folder(path) for name, path in paths.items()}
    _run_peer([str(folder) for folder in folders.values()], prompts)
    checked = {}
    for name, path in paths.items():
        peer = np.load(folders[name] / "peer.npz")
        answers = zip(prompts, peer["ids"].tolist(), peer["logits"], strict=True)
        checked[name] = Checked(path, tuple(Answer(*each) for each in answers))
    return checked


def prompt_of(size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, 256, size)]


def _peer_folder(path: Path) -> Path:
    return path / "peer" if (path / "peer").is_dir() else path


def _write(path: Path, case: Case, seed: int) -> Path:
    weights = random_weights(config(**case.config), seed)
    if case.peer:
        other = {**case.config, **case.peer}
        shapes = models.plan(config(**other)).shapes
        padded = {name: weights.get(name, np.zeros(shapes[name], np.float32)) for name in shapes}
        write_checkpoint(path / "peer", weights=padded, **other)
    return write_checkpoint(path, weights=case.stored(weights), **case.config)


def _run_peer(paths: list[str], prompts: list[list[int]]) -> None:
    mlx_lm_peer.ask({"paths": paths, "prompts": prompts, "steps": STEPS})


def alone(checked: Checked) -> None:
    """Prefills a prompt in one pass and decodes it alone; compares the logits of every token."""
    _assert_logits(checked, checked.answers[0], PROMPT_SIZES[0], STEPS)
    engine, seq = checked.engine(), checked.answers[0].sequence()
    enter(engine, seq)
    _decode_and_compare(engine, {seq: checked.answers[0]})


def in_chunks(checked: Checked, size: int) -> None:
    """Prefills the longest prompt in chunks of `size` tokens.

    Chunks of one token are tested with the first prompt.
    """
    answer = checked.answers[0] if size == 1 else checked.answers[-1]
    _assert_logits(checked, answer, size, 4)
    engine, seq = checked.engine(), answer.sequence()
    enter(engine, seq, size)
    _decode_and_compare(engine, {seq: answer})


def in_a_batch(checked: Checked) -> None:
    """Prefills all prompts, of different lengths, in one pass; decodes them together."""
    rows = [row_of(checked.loaded) for _ in checked.answers]
    spans = [
        RowSpan(row, len(answer.prompt)) for row, answer in zip(rows, checked.answers, strict=True)
    ]
    step = RowBatch(spans, range(len(spans)))
    ids = [token for answer in checked.answers for token in answer.prompt]
    logits = np.array(checked.loaded.model(mx.array(ids), step))
    for row_logits, answer in zip(logits, checked.answers, strict=True):
        assert np.abs(row_logits - answer.logits[0]).max() < answer.tolerance
    engine = checked.engine()
    running = {answer.sequence(): answer for answer in checked.answers}
    for seq in running:
        enter(engine, seq)
    _decode_and_compare(engine, running)


def after_prefix_hits(checked: Checked) -> None:
    """Compares answers to a prompt whose first n tokens are cached, for each number n."""
    answer, engine = checked.answers[0], checked.engine()
    running = {}
    for split in range(1, len(answer.prompt)):
        engine.prefix.clear()
        _run(engine, answer.sequence(answer.prompt[:split]))
        seq = answer.sequence()
        enter(engine, seq)
        assert seq.cached == split
        running[seq] = answer
    _decode_and_compare(engine, running)


def after_a_longer_one(checked: Checked) -> None:
    """Compares the answer to a prompt that is the beginning of a finished sequence.

    The prompt continues from a restore point.
    """
    answer, engine = checked.answers[0], checked.engine()
    longer = answer.sequence([*answer.prompt, 1, 2, 3])
    longer.restore_at = 20
    _run(engine, longer, 20)
    seq = answer.sequence()
    enter(engine, seq)
    assert seq.cached == (len(answer.prompt) - 1 if _can_be_cut(checked.loaded) else 20)
    _decode_and_compare(engine, {seq: answer})


def after_preemption(checked: Checked, prefix: str) -> None:
    """Compares the answer of a sequence that is preempted, then readmitted from its prefix."""
    answer, engine = checked.answers[0], checked.engine(prefix)
    seq = answer.sequence()
    enter(engine, seq)
    _decode_and_compare(engine, {seq: answer}, 20)
    engine.release(seq)
    seq.preempt()
    enter(engine, seq)
    _decode_and_compare(engine, {seq: answer})


WAYS: Mapping[str, Callable[[Checked], None]] = {
    "alone": alone,
    "in chunks of 1": partial(in_chunks, size=1),
    "in chunks of 7": partial(in_chunks, size=7),
    "in chunks of 2048": partial(in_chunks, size=2048),
    "in a ragged batch": in_a_batch,
    "after a prefix hit at every split": after_prefix_hits,
    "after a longer one": after_a_longer_one,
    "after preemption": partial(after_preemption, prefix="tree"),
    "after preemption, without a cache": partial(after_preemption, prefix="off"),
}


# Quantised weights affect only single layers, which do not depend on sequences.
WAYS_QUANTISED = ("alone", "in chunks of 7", "in a ragged batch")


def comparison(name: str, cases: Mapping[str, Case]) -> tuple[Any, Any]:
    """Returns the fixture `checked` and the test `test_equals_mlx_lm` of a module."""

    @pytest.fixture(scope="module")
    def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
        return prepare(tmp_path_factory.mktemp(name), cases)

    each = [
        (case, way)
        for case, model_case in cases.items()
        for way in WAYS
        if model_case.is_tested(way)
    ]

    @pytest.mark.parametrize(("case", "way"), each)
    def test_equals_mlx_lm(case: str, way: str, checked: dict[str, Checked]) -> None:
        WAYS[way](checked[case])

    return checked, test_equals_mlx_lm


def refusals(base: Mapping[str, Any], refused: Many[tuple[dict[str, Any], str]]) -> Any:
    """Returns a test that each change of `base` raises ModelLoadFailed with the given words."""

    @pytest.mark.parametrize(("changes", "words"), refused)
    def test_unusable_config_values_are_named(changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ModelLoadFailed, match=words):
            models.plan(config(**{**base, **changes}))

    return test_unusable_config_values_are_named


def _can_be_cut(loaded: LoadedModel) -> bool:
    """Returns whether every layer stores each token separately, so that any prefix is reusable."""
    caches = loaded.folder.plan.caches
    return not any(isinstance(spec, RecurrentSpec) or getattr(spec, "window", 0) for spec in caches)


def _assert_logits(checked: Checked, answer: Answer, chunk: int, steps: int) -> None:
    """Compares the logits of the first `steps` of mlx-lm's tokens, after a prefill in chunks."""
    row, prompt = row_of(checked.loaded), answer.prompt
    chunks = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)]
    parts = [*chunks, *([token] for token in answer.ids[: steps - 1])]
    ours = np.stack([read(checked.loaded, row, ids) for ids in parts][-steps:])
    assert np.abs(ours - answer.logits[:steps]).max() < answer.tolerance


def _run(engine: ModelEngine, seq: Sequence, steps: int = 1) -> None:
    """Runs a sequence to its end, so that the prefix cache keeps it."""
    enter(engine, seq)
    decode(engine, [seq], steps)
    engine.release(seq)


def _decode_and_compare(
    engine: ModelEngine, running: Mapping[Sequence, Answer], end: int = STEPS
) -> None:
    """Decodes all sequences together until each has `end` tokens; compares the tokens."""
    while any(len(seq.ids) < end for seq in running):
        for drawn in decode(engine, list(running)):
            _assert_drawn(drawn, len(drawn.sequence.ids) - 1, running[drawn.sequence])
    for seq, answer in running.items():
        assert seq.ids == answer.ids[:end]


def _assert_drawn(drawn: SampledToken, position: int, answer: Answer) -> None:
    """Compares log-probabilities; each is a difference of two logits."""
    assert drawn.logprob is not None
    logits = answer.logits[position].astype(np.float64)
    log_sum = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
    for token, logprob in [(drawn.token, drawn.logprob.logprob), *drawn.logprob.top]:
        assert abs(logits[token] - log_sum - logprob) < 2 * answer.tolerance
