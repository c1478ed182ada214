"""Decode and prefill of models of real shapes with random weights, beside mlx-lm 0.32, in bfloat16.

    python bench/shapes.py [--shape glm4_moe_lite] [--layers 12] [--streams 1 8 32] [--json FILE]

Ours is the engine in-process; mlx-lm is generate_step for one stream and BatchGenerator for more.
Bursts of one and of the other take turns; a ratio is that of tokens/s within a pair. `--layers`
builds fewer layers than the model has, where its weights would not fit twice. For a GPU: on a CPU
it takes for ever.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import report

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 202752,
    },
}
FOR_EVER = 10**6  # tokens
PROMPT = 128  # tokens
DRAW = np.random.default_rng(0)


def prompt(tokens: int) -> list[int]:
    ids: list[int] = DRAW.integers(0, 32000, tokens).tolist()
    return ids


def our_model(config: dict[str, Any]) -> Any:
    """Loaded (load.py) without a folder."""
    import mlx.core as mx

    from mlxpool.worker import models
    from mlxpool.worker.models.parts import Parts
    from mlxpool.worker.weights.load import Loaded

    plan = models.plan(config)
    weights = {}
    for name, shape in plan.shapes.items():
        noise = mx.random.normal(shape, dtype=mx.bfloat16) * (shape[-1] ** -0.5)
        weights[name] = 1 + noise if "norm" in name else noise
        mx.eval(weights[name])
    size = sum(one.nbytes for one in weights.values())
    folder = SimpleNamespace(
        plan=plan,
        context=plan.context,
        eos_ids=frozenset(),
        digest="",
        model_type=config["model_type"],
    )
    model = plan.build(Parts(weights, {}, mx.bfloat16))
    return Loaded(folder, model, mx.bfloat16, size)  # type: ignore[arg-type]


def their_model(config: dict[str, Any]) -> Any:
    """mlx-lm's, with the weights that it makes for itself."""
    import mlx.core as mx

    module: Any = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    model.eval()
    return model


def our_steps(loaded: Any, streams: int) -> Callable[[], object]:
    from mlxpool.common.options import Options
    from mlxpool.worker.engine.engine import ModelEngine
    from mlxpool.worker.engine.sequence import Sequence as Job

    text = SimpleNamespace(piece=lambda token: b"")
    engine = ModelEngine(loaded, text, prefix="off", context=8192, sequences=streams)  # type: ignore[arg-type]
    greedy = Options(temperature=0.0, ignore_eos=True)
    jobs = [Job(b"", 0, tuple(prompt(PROMPT)), greedy, 0, FOR_EVER) for _ in range(streams)]
    for job in jobs:
        engine.admit(job)
        while engine.prefill(job, engine.chunk):
            pass

    def step() -> None:
        for drawn in engine.decode(jobs):
            drawn.sequence.ids.append(drawn.token)

    return step


def their_steps(model: Any, streams: int) -> Callable[[], object]:
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step

    if streams == 1:
        tokens: Any = generate_step(mx.array(prompt(PROMPT)), model, max_tokens=FOR_EVER)
        return lambda: next(tokens)
    batch: Any = BatchGenerator(model, max_tokens=FOR_EVER, completion_batch_size=streams)
    batch.insert([prompt(PROMPT) for _ in range(streams)])
    while len(batch.next()[1]) < streams:
        pass
    return lambda: batch.next()


def our_prefill(loaded: Any, tokens: int) -> Callable[[], object]:
    from mlxpool.common.options import Options
    from mlxpool.worker.engine.engine import ModelEngine
    from mlxpool.worker.engine.sequence import Sequence as Job

    text = SimpleNamespace(piece=lambda token: b"")
    engine = ModelEngine(loaded, text, prefix="off", context=8192, sequences=1)  # type: ignore[arg-type]

    def once() -> None:
        job = Job(b"", 0, tuple(prompt(tokens)), Options(temperature=0.0), 0, 2)
        engine.admit(job)
        while engine.prefill(job, engine.chunk):
            pass
        engine.decode([job])
        engine.release(job)

    return once


def their_prefill(model: Any, tokens: int) -> Callable[[], object]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def once() -> None:
        next(iter(generate_step(mx.array(prompt(tokens)), model, max_tokens=1)))

    return once


def seconds(step: Callable[[], object], steps: int) -> float:
    import mlx.core as mx

    mx.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


def pairs(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int, steps: int
) -> list[tuple[float, float]]:
    """Seconds a step of each, in turn; the first burst of each is not counted."""
    for side in (ours, theirs):
        seconds(side, min(steps, 8))
    return [(seconds(ours, steps), seconds(theirs, steps)) for _ in range(rounds)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import mlx.core as mx

    config = dict(CONFIGS[options.shape])
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    loaded, model = our_model(config), their_model(config)
    figures: dict[str, Any] = {"shape": options.shape, "layers": config["num_hidden_layers"]}
    for streams in options.streams:
        found = pairs(
            our_steps(loaded, streams), their_steps(model, streams), options.rounds, options.steps
        )
        figures[f"decode, {streams} streams"] = _figure(found, streams)
        print(f"decode, {streams} streams", figures[f"decode, {streams} streams"], flush=True)
        gc.collect()
        mx.clear_cache()
    for tokens in options.prefill:
        found = pairs(our_prefill(loaded, tokens), their_prefill(model, tokens), options.rounds, 1)
        figures[f"prefill, {tokens} tokens"] = _figure(found, tokens)
        print(f"prefill, {tokens} tokens", figures[f"prefill, {tokens} tokens"], flush=True)
    return figures


def _figure(found: Sequence[tuple[float, float]], tokens: int) -> dict[str, Any]:
    return {
        "ours": [tokens / one for one, _ in found],
        "theirs": [tokens / other for _, other in found],
        "ratio": [other / one for one, other in found],
    }


def show(figures: dict[str, Any]) -> None:
    lines = [
        (name, *(report.spread(found[key], 2) for key in ("ours", "theirs", "ratio")))
        for name, found in figures.items()
        if isinstance(found, dict)
    ]
    print(f"{report.versions()}; {figures['shape']}, {figures['layers']} layers, bfloat16")
    print(report.table(("tokens/s", "ours", "mlx-lm", "ratio"), lines))
    medians = [statistics.median(one["ratio"]) for one in figures.values() if isinstance(one, dict)]
    print(f"least ratio: {min(medians):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="glm4_moe_lite")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="decode steps of a burst")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options)
    show(figures)
    report.write(options.json, figures)


if __name__ == "__main__":
    main()
