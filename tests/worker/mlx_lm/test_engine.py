"""Models that only mlx-lm supports give the tokens of mlx-lm in our engine."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace

from support import mlx_lm_peer
from support.engine_steps import ScheduledSteps, decode, enter, read
from support.worker_checkpoints import EOS, config, write_checkpoint, write_json, write_tokenizer

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import ModelConfig  # noqa: E402
from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.caches.kinds import FullCache, StateCache  # noqa: E402
from mlxpool.worker.compute import model_source  # noqa: E402
from mlxpool.worker.diagnose.check import check  # noqa: E402
from mlxpool.worker.engine.description import quantisation  # noqa: E402
from mlxpool.worker.engine.settings import EngineSettings  # noqa: E402
from mlxpool.worker.mlx_lm.engine import MlxLmEngine, load  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.scheduling.sequence import Phase, Sequence, SequenceFailed  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights import mlx_lm_models  # noqa: E402
from mlxpool.worker.weights.inspect import ModelFolder, inspect  # noqa: E402

STEPS = 40
PROMPTS = (21, 2, 45)  # tokens
WINDOW = 12
CASES: dict[str, dict[str, Any]] = {
    # keys and values of every token
    "phi3": config(model_type="phi3"),
    # windows and full layers
    "cohere2": config(
        model_type="cohere2",
        head_dim=8,
        layer_norm_eps=1e-5,
        logit_scale=0.25,
        attention_bias=False,
        layer_norm_bias=False,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
    ),
    # states only, unbounded context
    "mamba": {
        "model_type": "falcon_mamba",
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": True,
    },
}

PEER = "support.zoo_peer"


def prompt_of(size: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(7).integers(0, 256, size).tolist())


@dataclass(frozen=True)
class Checked:
    """A model folder and mlx-lm's answers to PROMPTS."""

    folder: ModelFolder
    model: Any
    ids: list[list[int]]
    logits: np.ndarray  # [prompts, STEPS, V]

    def engine(self, prefix: str = "tree", **settings: Any) -> MlxLmEngine:
        given = EngineSettings(prefix=prefix, **settings)
        return MlxLmEngine(self.model, self.folder, None, given)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
    paths = {case: tmp_path_factory.mktemp(case) for case in CASES}
    for case, path in paths.items():
        write_json(path / "config.json", CASES[case])
        write_json(path / "generation_config.json", {"eos_token_id": EOS})
        write_tokenizer(path)
    models = {str(path): CASES[case] for case, path in paths.items()}
    job = {"models": models, "prompts": [prompt_of(size) for size in PROMPTS], "steps": STEPS}
    mlx_lm_peer.ask(job, PEER)
    checked_models = {}
    for case, path in paths.items():
        folder, peer = inspect(path), np.load(path / "peer.npz")
        checked_models[case] = Checked(folder, load(folder), peer["ids"].tolist(), peer["logits"])
    return checked_models


def sequence(prompt: tuple[int, ...], restore_at: int = 0, **raw: Any) -> Sequence:
    options = Options(**{"temperature": 0.0, **raw})
    return Sequence(b"", 1, prompt, options, 11, STEPS, restore_at=restore_at)


every = pytest.mark.parametrize("case", CASES)


@every
@pytest.mark.parametrize("budget", [1, 7, 2048])
def test_chunks_give_mlx_lms_tokens(case: str, budget: int, checked: dict[str, Checked]) -> None:
    reference = checked[case]
    engine, seq = reference.engine(), sequence(prompt_of(PROMPTS[2]))
    enter(engine, seq, budget)
    decode(engine, [seq], STEPS)
    assert seq.ids == reference.ids[2]


@pytest.mark.parametrize("fails_in", ["submit", "collect"])
def test_a_size_whose_pass_failed_is_new_still(
    checked: dict[str, Checked], fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seq = checked["phi3"].engine(), sequence(prompt_of(21))
    engine.admit(seq)
    seq.phase = Phase.RUNNING

    def fails(*_: Any) -> Any:
        raise MemoryError("no room for the pass")

    with monkeypatch.context() as patch:
        if fails_in == "submit":
            patch.setattr(engine, "_computed", fails)
        with pytest.raises(MemoryError):
            engine.submit([Span(seq, 0, seq.length, 1)])
            patch.setattr(mx, "eval", fails)
            engine.collect()
    engine.release(seq)
    again = sequence(prompt_of(21))
    engine.admit(again)
    again.phase = Phase.RUNNING
    assert engine.submit([Span(again, 0, again.length, 1)])
    engine.collect()


def test_a_pass_of_a_new_size_is_told_before_it_is_built(
    checked: dict[str, Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New kinds of passes are reported: a chunk, a decode step, and a pass of several rows.

    Chunks or numbers of rows of a similar size belong to the same kind.
    """
    engine, seen = checked["phi3"].engine(), list[str]()
    engine.report_compiles(lambda: seen.append("told"))
    build = engine._computed

    def built(span: Span) -> Any:
        seen.append("built")
        return build(span)

    monkeypatch.setattr(engine, "_computed", built)
    rows = [sequence(prompt_of(size)) for size in (45, 40, 21)]
    fresh = []
    for seq in rows:
        engine.admit(seq)
        seq.phase = Phase.RUNNING
        seen.clear()
        fresh.append(engine.submit([Span(seq, 0, seq.length, 1)]))
        assert seen == (["told", "built"] if fresh[-1] else ["built"])
        seq.ids += [sampled.token for sampled in engine.collect().drawn]
    assert fresh == [True, False, True]
    for some, new in ((rows[:1], True), (rows[:1], False), (rows[:2], True), (rows, False)):
        spans = [Span(seq, seq.submitted, 1, 1) for seq in some]
        assert engine.submit(spans) == new
        for sampled in engine.collect().drawn:
            sampled.sequence.ids.append(sampled.token)


@every
def test_log_probabilities_are_mlx_lms(case: str, checked: dict[str, Checked]) -> None:
    reference = checked[case]
    engine, seq = reference.engine(), sequence(prompt_of(PROMPTS[0]), logprobs=True)
    enter(engine, seq)
    for logits in reference.logits[0].astype(np.float64):
        (drawn,) = decode(engine, [seq])
        whole = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        assert drawn.logprob is not None
        assert abs(logits[drawn.token] - whole - drawn.logprob.logprob) < 2e-4 * logits.max()


@every
def test_scored_tokens_have_mlx_lms_log_probabilities(
    case: str, checked: dict[str, Checked]
) -> None:
    reference = checked[case]
    engine, seq = reference.engine(), sequence(prompt_of(PROMPTS[0]))
    seq.scored = (9, 200, 3)
    enter(engine, seq)
    (drawn,) = decode(engine, [seq])
    logits = reference.logits[0][0].astype(np.float64)
    whole = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
    assert drawn.logprob is not None
    assert [token for token, _ in drawn.logprob.top] == [9, 200, 3]
    for token, logprob in drawn.logprob.top:
        assert abs(logits[token] - whole - logprob) < 2e-4 * np.abs(logits).max()


@every
def test_rows_in_turn_give_mlx_lms_tokens(case: str, checked: dict[str, Checked]) -> None:
    reference = checked[case]
    engine, rows = reference.engine(), [sequence(prompt_of(size)) for size in PROMPTS]
    for seq in rows:
        enter(engine, seq)
    decode(engine, rows, STEPS)
    assert [seq.ids for seq in rows] == reference.ids


@every
@pytest.mark.parametrize("prefix", ["tree", "single", "off"])
def test_prefixes_are_reused(case: str, prefix: str, checked: dict[str, Checked]) -> None:
    reference = checked[case]
    engine, prompt = reference.engine(prefix), prompt_of(PROMPTS[2])
    begun = sequence((*prompt[:30], 1, 2, 3), restore_at=20)
    enter(engine, begun)
    decode(engine, [begun], WINDOW + 1)
    engine.release(begun)
    cached_tokens = []
    for _ in range(2):
        seq = sequence(prompt)
        enter(engine, seq)
        decode(engine, [seq], STEPS)
        engine.release(seq)
        assert seq.ids == reference.ids[2]
        cached_tokens.append(seq.cached)
    states = case != "phi3"
    cached = {"tree": 20 if states else 30, "single": 0 if states else 30, "off": 0}[prefix]
    again = {"tree": 30 if states else 44, "single": 0 if states else 44, "off": 0}[prefix]
    assert cached_tokens == [cached, again]


@every
def test_kept_prefixes_are_not_overwritten(case: str, checked: dict[str, Checked]) -> None:
    """Three sequences continue from one prefix; windows write into their ring buffers in place."""
    reference = checked[case]
    engine, prompt = reference.engine(), prompt_of(PROMPTS[0])
    begun = sequence(prompt)
    enter(engine, begun)
    decode(engine, [begun], 10)
    engine.release(begun)
    rows = [sequence(prompt) for _ in range(3)]
    for seq in rows:
        seq.ids += begun.ids
        enter(engine, seq)
        assert seq.cached == len(prompt) + 9
        decode(engine, [seq], 5)
    decode(engine, rows, STEPS - 15)
    assert [seq.ids for seq in rows] == [reference.ids[0]] * 3


@every
@pytest.mark.parametrize("prefix", ["tree", "off"])
def test_preemption_and_resume_change_no_token(
    case: str, prefix: str, checked: dict[str, Checked]
) -> None:
    reference = checked[case]
    engine, seq = reference.engine(prefix), sequence(prompt_of(PROMPTS[0]))
    seq.ids += reference.ids[0][:3]
    enter(engine, seq)
    for steps in (1, 9):
        decode(engine, [seq], steps)
        engine.release(seq)
        seq.preempt()
        engine.admit(seq)
        assert (seq.submitted == seq.length - 1) == (prefix == "tree")
        read(engine, seq, 5)
    decode(engine, [seq], STEPS - 13)
    assert seq.ids == reference.ids[0]


@every
def test_scheduled_steps_give_mlx_lms_tokens(case: str, checked: dict[str, Checked]) -> None:
    """Decode rows share their passes with one chunk, whose last input draws a token."""
    reference = checked[case]
    engine = reference.engine()
    assert (engine.limits.prompts, engine.limits.ahead) == (1, 0)
    steps, rows = ScheduledSteps(engine), [sequence(prompt_of(size)) for size in PROMPTS]
    for seq in rows:
        steps.admit(seq)
    first = steps.step()
    assert [drawn.sequence for drawn in first] == [rows[0]]
    while any(len(seq.ids) < STEPS for seq in rows):
        steps.step()
        for seq in [seq for seq in steps.live if len(seq.ids) == STEPS]:
            steps.leave(seq)
    assert [seq.ids for seq in rows] == reference.ids


def test_a_failed_row_does_not_change_other_rows(
    checked: dict[str, Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = checked["mamba"]
    engine, rows = reference.engine(), [sequence(prompt_of(size)) for size in PROMPTS]
    for seq in rows:
        enter(engine, seq)
    sample = sampler.sample
    with monkeypatch.context() as patch, pytest.raises(SequenceFailed) as failed:
        damaged = mx.array([0.0, np.nan, 0.0])[:, None]
        patch.setattr(sampler, "sample", lambda logits, draws: sample(logits + damaged, draws))
        decode(engine, rows)
    assert failed.value.sequence is rows[1]
    engine.release(rows[1])
    decode(engine, [rows[0], rows[2]], STEPS - 1)
    assert [rows[0].ids, rows[2].ids] == [reference.ids[0], reference.ids[2]]


def test_a_failed_step_leaves_nothing_behind(
    checked: dict[str, Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seq = checked["phi3"].engine(), sequence(prompt_of(20))
    enter(engine, seq)

    def fails(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="malloc"):
        patch.setattr(mx, "eval", fails)
        decode(engine, [seq])
    assert engine.lost(seq) and not engine.in_flight
    engine.release(seq)
    assert (engine.memory().kv, engine.memory().prefix) == (0, 0)


def test_memory_is_measured_at_load(checked: dict[str, Checked]) -> None:
    moves: list[int] = []
    engine = checked["phi3"].engine()
    engine.warm_up(lambda: moves.append(1))
    token = 2 * 2 * 8 * 4 * 2  # layers, heads, size, bytes, keys and values
    assert len(moves) == 2
    assert (engine.memory().kv, engine.memory().prefix) == (0, 0)
    assert (engine.inspect().budget.block, engine.inspect().budget.row) == (256 * token, 0)
    states = checked["mamba"].engine()
    states.warm_up()
    assert (states.inspect().budget.block, states.inspect().budget.row) == (
        1,
        2 * (64 * 8 + 3 * 64) * 4 - 1,
    )
    with pytest.raises(ModelLoadFailed, match=r"limit is 1000 bytes.*leaves 0 blocks"):
        checked["phi3"].engine(limit=1000).warm_up()


def test_prefixes_are_kept_of_the_known_cache_classes() -> None:
    home = "mlx_lm.models.cache."
    assert mlx_lm_models.cache_kinds_of([f"{home}KVCache", f"{home}ArraysCache"]) == (
        FullCache(0),
        StateCache(1),
    )
    for other in (f"{home}ChunkedKVCache", "mlx_lm.models.somewhere.KVCache"):
        assert mlx_lm_models.cache_kinds_of([f"{home}KVCache", other]) is None


def test_caches_that_cannot_be_copied_are_not_kept(
    checked: dict[str, Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm_models, "CACHE_KINDS", {})
    engine = checked["phi3"].engine("tree")
    for _ in range(2):
        enter(engine, seq := sequence(prompt_of(20)))
        engine.release(seq)
        assert seq.cached == 0


def test_code_of_a_models_folder_is_never_run(checked: dict[str, Checked]) -> None:
    """The code in the folder is not even run if mlx-lm itself would run it."""
    folder = checked["phi3"].folder
    with_code = replace(folder, config={**folder.config, "model_file": "model.py"})
    with (
        patch("mlx_lm.utils.load_model", side_effect=AssertionError("it may run the code")),
        pytest.raises(ModelLoadFailed, match=r"model_file in config.json .*'model.py'.* never run"),
    ):
        load(with_code)


def test_the_description_without_loading(checked: dict[str, Checked]) -> None:
    folder = checked["phi3"].folder
    assert folder.uses_mlx_lm and folder.eos_ids == {EOS}
    assert (folder.context, folder.plan.vocab_size) == (512, 264)
    assert folder.weight_bytes == sum(tensor.nbytes for tensor in folder.tensors.values()) > 0
    assert checked["mamba"].folder.context == mlx_lm_models.UNBOUNDED_CONTEXT


def test_check_reports_what_is_known_without_mlx_lms_code(checked: dict[str, Checked]) -> None:
    """The report lacks the numbers that only mlx-lm's code knows."""
    path = str(checked["phi3"].folder.path)
    report = check("m", ModelConfig(path=path), machine=True)
    assert report["problems"] == []
    model, memory, machine = report["model"], report["memory"], report["machine"]
    assert (model["layers"], model["parameters"], model["quantisation"]) == (None, None, "f32")
    unknown = {"token", "fixed", "sequence", "all_sequences", "least"}
    assert {key for key, value in memory.items() if value is None} == unknown
    assert (memory["weights"], machine["longest"]) == (model["size"], None)
    (words,) = check("m", ModelConfig(path=path, deterministic=True))["problems"]
    assert "'phi3', which is computed by mlx-lm's code" in words


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"bits": 4, "group_size": 32}, "4-bit affine g32"),
        ({"quant_method": "other"}, "f32"),
    ],
)
def test_the_quantisation_of_mlx_lm_in_words(
    told: dict[str, Any], words: str, checked: dict[str, Checked]
) -> None:
    plain = checked["phi3"].folder
    tensors = {"head.scales": next(iter(plain.tensors.values()))}
    config = {**plain.config, "quantization": told}
    folder = replace(plain, config=config, match=replace(plain.match, tensors=tensors))
    assert quantisation(folder) == words


def test_engine_forces_a_side(tmp_path: Path, checked: dict[str, Checked]) -> None:
    """`engine` selects our code or mlx-lm's for a model; tokens are equal, digests are not."""
    both, seen = str(write_checkpoint(tmp_path / "both")), []
    for side in ("auto", "own", "mlx-lm"):
        source = model_source.open_generator(ModelConfig(path=both, engine=side))
        engine = source.load(lambda tensors, size: None)
        assert isinstance(engine, MlxLmEngine) == (side == "mlx-lm")
        seq = Sequence(b"", 0, tuple(prompt_of(20)), Options(temperature=0.0), 0, 9)
        enter(engine, seq)
        decode(engine, [seq], 8)
        seen.append((engine.digest, list(seq.ids)))
        engine.close()
    (auto, ids), (own, own_ids), (other, other_ids) = seen
    assert auto == own != other
    assert ids == own_ids == other_ids and len(ids) >= 8
    only = str(checked["phi3"].folder.path)
    with pytest.raises(ModelLoadFailed, match="model_type 'phi3', which is not supported"):
        model_source.open_generator(ModelConfig(path=only, engine="own"))


def test_open_source_loads_the_engine_and_keeps_process_limits(checked: dict[str, Checked]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = str(checked["phi3"].folder.path)
    source = model_source.open_generator(ModelConfig(path=path, context=100))
    seen: list[tuple[int, int]] = []
    engine = source.load(lambda tensors, size: seen.append((tensors, size)))
    assert isinstance(engine, MlxLmEngine) and engine.context == source.opened.context == 100
    assert seen[-1][1] == engine.memory().weights
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    with pytest.raises(ModelLoadFailed, match=r"deterministic = true is not built for .*'phi3'"):
        model_source.open_generator(ModelConfig(path=path, deterministic=True))


def test_importing_mlx_lm_lowers_no_limit() -> None:
    """Runs in a new process, because mlx-lm may already be imported in this process."""
    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from mlxpool.worker.mlx_lm.engine import open_file_limit_kept\n"
        "with open_file_limit_kept():\n    import mlx_lm\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "No module named 'mlx_lm'" in done.stderr:
        pytest.skip("mlx-lm is not installed")
    assert done.returncode == 0, done.stderr


def test_without_mlx_lm_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: dict[str, Checked]
) -> None:
    monkeypatch.setattr(mlx_lm_models, "_home", lambda: None)
    words = (
        r"'phi3', which is not supported; supported are: .*llama, .*pip install 'mlxpool\[zoo\]'"
    )
    with pytest.raises(ModelLoadFailed, match=words):
        inspect(checked["phi3"].folder.path)


@pytest.mark.parametrize(
    "model_type", ["unheard_of", "../models/phi3", "cache.py", None, 3, ["phi3"]]
)
def test_a_type_that_mlx_lm_lacks_is_refused(tmp_path: Path, model_type: Any) -> None:
    assert not mlx_lm_models.is_available({"model_type": model_type})


def test_a_type_of_our_own_is_not_computed_by_mlx_lm(tmp_path: Path) -> None:
    assert not inspect(write_checkpoint(tmp_path)).uses_mlx_lm


def test_a_failed_load_has_the_message_of_mlx_lm(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)  # a llama's tensors
    write_json(path / "config.json", config(model_type="phi3"))
    with pytest.raises(ModelLoadFailed, match=r"mlx-lm cannot load model_type 'phi3': ValueError"):
        load(inspect(path))


def test_a_config_without_a_vocabulary_is_named() -> None:
    with pytest.raises(ModelLoadFailed, match="no 'vocab_size'"):
        mlx_lm_models.plan({"model_type": "phi3", "max_position_embeddings": 5})
    inner = {"vocab_size": 7, "n_positions": 9}
    plan = mlx_lm_models.plan({"model_type": "x", "text_config": inner})
    assert (plan.vocab_size, plan.context) == (7, 9)
