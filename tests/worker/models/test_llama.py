"""Our llama against mlx-lm's, on small random checkpoints: the same logits, the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.attention import Span, Step  # noqa: E402
from mlxpool.worker.cache import Row, RowShape  # noqa: E402
from mlxpool.worker.engine import ModelEngine  # noqa: E402
from mlxpool.worker.load import Loaded, inspect, load  # noqa: E402
from mlxpool.worker.sequence import Sequence  # noqa: E402

STEPS = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-query": {"num_key_value_heads": 1},
    "all heads": {"num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10, "vocab_size": 261},
    "mistral": {"model_type": "mistral", "num_hidden_layers": 3},
}

# In a process of its own: importing mlx_lm.utils lowers RLIMIT_NOFILE for good.
PEER = """
import json, sys
import mlx.core as mx
import numpy as np
from pathlib import Path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

for path, prompt, steps in json.load(sys.stdin):
    model, _ = load_model(Path(path))
    model.set_dtype(mx.float32)
    cache, ids, lines = make_prompt_cache(model), list(prompt), []
    logits = model(mx.array([prompt]), cache=cache)
    for _ in range(steps):
        lines.append(np.array(logits[0, -1]))
        ids.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([[ids[-1]]]), cache=cache)
    np.savez(Path(path) / "peer.npz", logits=np.stack(lines), ids=ids[len(prompt):])
"""


def run_peer(jobs: list[tuple[str, list[int], int]]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEER], input=json.dumps(jobs), text=True, capture_output=True
    )
    if done.returncode and "No module named 'mlx_lm'" in done.stderr:
        pytest.skip("mlx-lm is not installed")
    assert done.returncode == 0, done.stderr


def prompt_of(size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, 256, size)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All cases, with the peer's answers beside them; one process, since its import is slow."""
    root = tmp_path_factory.mktemp("llama")
    paths = {
        case: write_checkpoint(root / case.replace(" ", "-"), seed=number, **changes)
        for number, (case, changes) in enumerate(CASES.items())
    }
    run_peer([(str(path), prompt_of(45), STEPS) for path in paths.values()])
    return paths


def our_logits(loaded: Loaded, prompt: list[int], ids: list[int]) -> np.ndarray:
    """[steps, V]: the prompt in one chunk, then one token after the other."""
    plan = loaded.folder.plan
    row = Row(RowShape(plan.caches, loaded.dtype, plan.context))
    lines = []
    for chunk in [prompt, *([token] for token in ids[:-1])]:
        step = Step([Span(row, len(chunk))], logits=True)
        logits = loaded.model(mx.array(chunk), step)
        step.done()
        lines.append(np.array(logits[0]))
    return np.stack(lines)


def our_tokens(loaded: Loaded, prompt: list[int], steps: int) -> list[int]:
    engine = ModelEngine(loaded)
    seq = Sequence(b"", 1, tuple(prompt), Options(temperature=0.0), 0, steps)
    engine.admit(seq)
    while engine.prefill(seq, 2048):
        pass
    for _ in range(steps):
        seq.ids += [drawn.token for drawn in engine.decode([seq])]
    return seq.ids


def assert_same(path: Path, prompt: list[int], steps: int) -> None:
    peer = np.load(path / "peer.npz")
    loaded = load(inspect(path))
    ids = peer["ids"].tolist()
    ours = our_logits(loaded, prompt, ids)
    assert np.abs(ours - peer["logits"]).max() < 1e-4 * np.abs(peer["logits"]).max()
    assert our_tokens(loaded, prompt, steps) == ids


@pytest.mark.parametrize("case", CASES)
def test_equals_mlx_lm(case: str, checkpoints: dict[str, Path]) -> None:
    assert_same(checkpoints[case], prompt_of(45), STEPS)


def test_the_demo_model_equals_mlx_lm(tmp_path: Path) -> None:
    demo = Path(models.__file__).parent.parent / "demo"
    if not (demo / "config.json").is_file():
        pytest.skip("the demo model is not built yet")
    path = tmp_path / "demo"
    path.mkdir()
    for file in demo.iterdir():
        (path / file.name).symlink_to(file)
    prompt = prompt_of(20)
    run_peer([(str(path), prompt, STEPS)])
    assert_same(path, prompt, STEPS)


def test_batched_rows_equal_single_ones(tmp_path: Path) -> None:
    loaded = load(inspect(write_checkpoint(tmp_path)))
    prompts = [prompt_of(size) for size in (3, 40, 300)]
    alone = [our_tokens(loaded, prompt, 12) for prompt in prompts]
    engine = ModelEngine(loaded)
    seqs = [Sequence(b"", 1, tuple(p), Options(temperature=0.0), 0, 12) for p in prompts]
    for seq in seqs:
        engine.admit(seq)
        while engine.prefill(seq, 64):
            pass
    for _ in range(12):
        for drawn in engine.decode(seqs):
            drawn.sequence.ids.append(drawn.token)
    assert [seq.ids for seq in seqs] == alone


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"max_position_embeddings": None}, "no 'max_position_embeddings'"),
        ({"num_attention_heads": 0}, "'num_attention_heads': 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"vocab_size": "many"}, "'vocab_size': 'many'"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(changes: dict[str, Any], words: str) -> None:
    settings = {**_config(), **changes}
    with pytest.raises(ModelLoadFailed, match=words):
        models.plan({key: value for key, value in settings.items() if value is not None})


def _config() -> dict[str, Any]:
    from worker_checkpoints import config

    return config()


def test_a_sliding_window_is_a_mistrals() -> None:
    def seen(**changes: Any) -> list[int]:
        plan = models.plan({**_config(), "sliding_window": 64, **changes})
        return [cache.window for cache in plan.caches]  # type: ignore[union-attr]

    assert seen() == [0, 0]
    assert seen(model_type="mistral") == [64, 64]
    types = ["sliding_attention", "full_attention"]
    assert seen(model_type="mistral", layer_types=types) == [64, 0] == seen(layer_types=types)
