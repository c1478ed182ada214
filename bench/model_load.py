"""Measures loading a model against a plain read of its files: GB/s in pairs, and peak memory.

    python bench/model_load.py [--gigabytes 1.5] [--rounds 5] [--json FILE]

Random llamas whose files have that size, in three shards, are written to a temporary folder. Each
side runs in a process of its own, one after the other. One side reads every file, into one buffer
and then into memory that it keeps, as any loader must; the other inspects and loads the model. The
files are in the page cache, since the first pair is dropped. Imports are not counted. The peak is
that of the whole process with MLX and Python, beside the allowed bytes: the weights in memory, the
largest shard and 512 MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlxpool.bench import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

STORED_AS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "f32": {},
    "affine, 4 bits": {"quantization": {"bits": 4, "group_size": 64}},
}
HIDDEN_SIZE = 2048
SHARDS = 3
ALLOWED_OVERHEAD = 512 * 10**6  # bytes above the weights and the largest shard
BUFFER_BYTES = 8 * 2**20
NOISE = np.random.default_rng(0).bytes(64 * 2**20)


def settings(kind: str, size: float) -> dict[str, Any]:
    """A llama's config, of about `size` bytes as stored."""
    bytes_per_weight = {"bf16": 2.0, "f32": 4.0}.get(kind, 0.5625)
    shape = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 4 * HIDDEN_SIZE,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
    }
    layers = max(1, round(size / bytes_per_weight / (16 * HIDDEN_SIZE * HIDDEN_SIZE)))
    return {**shape, **STORED_AS[kind], "num_hidden_layers": layers}


def tensors(kind: str, config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor as stored."""
    from mlxpool.worker import models
    from mlxpool.worker.layers.quantisation import parse_quant_config

    layout = parse_quant_config(config).default
    for name, shape in models.plan(config).shapes.items():
        if layout is None or len(shape) < 2:
            yield name, "F32" if kind == "f32" else "BF16", shape
            continue
        for part, packed in layout.tensors(shape):
            yield name.replace("weight", part), "U32" if part == "weight" else "BF16", packed


def write(folder: Path, kind: str, size: float) -> Path:
    """Write a complete model folder with random weights."""
    from support.worker_checkpoints import config, write_json, write_tokenizer

    folder.mkdir()
    whole = config(**settings(kind, size))
    write_json(folder / "config.json", whole)
    write_tokenizer(folder)
    found = list(tensors(kind, whole))
    for number in range(SHARDS):
        part = found[number * len(found) // SHARDS : (number + 1) * len(found) // SHARDS]
        _write_shard(folder / f"model-{number}.safetensors", part)
    return folder


def _write_shard(file: Path, found: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Writes piece by piece; the library would need all of the file in memory."""
    header, end = {}, 0
    for name, dtype, shape in found:
        begin, end = end, end + int(np.prod(shape)) * (2 if dtype == "BF16" else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for begin in range(0, end, len(NOISE)):
            stream.write(NOISE[: end - begin])


def read(folder: Path) -> dict[str, float]:
    """GB/s of reading every shard into one buffer (`rate`), and into memory that stays (`kept`)."""
    shards = sorted(folder.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    started = time.perf_counter()
    for shard in shards:
        _read_into_buffer(shard)
    between = time.perf_counter()
    kept = [shard.read_bytes() for shard in shards]
    ended = time.perf_counter()
    assert sum(map(len, kept)) == size
    return {"rate": size / (between - started) / 1e9, "kept": size / (ended - between) / 1e9}


def _read_into_buffer(shard: Path) -> None:
    buffer = bytearray(BUFFER_BYTES)
    with shard.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def load(folder: Path) -> dict[str, float]:
    """Load the model as a worker does: GB/s, and peak bytes of the process."""
    from mlxpool.worker.weights.inspect import inspect
    from mlxpool.worker.weights.load import load as load_model

    started = time.perf_counter()
    loaded = load_model(inspect(folder))
    took = time.perf_counter() - started
    largest = max(shard.stat().st_size for shard in loaded.folder.shards)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rate": loaded.folder.weight_bytes / took / 1e9,
        "peak": peak * (1 if sys.platform == "darwin" else 1024),
        "weights": loaded.weight_bytes,
        "allowed": loaded.weight_bytes + largest + ALLOWED_OVERHEAD,
    }


def run_side(side: str, folder: Path) -> dict[str, float]:
    """The figures of one side, measured in a process of its own."""
    line = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    pairs = [(run_side("read", folder), run_side("load", folder)) for _ in range(rounds + 1)][1:]
    return {
        "read": [one["rate"] for one, _ in pairs],
        "kept": [one["kept"] for one, _ in pairs],
        "load": [other["rate"] for _, other in pairs],
        "ratio": [other["rate"] / one["rate"] for one, other in pairs],
        "ratio, kept": [other["rate"] / one["kept"] for one, other in pairs],
        "peak": [other["peak"] for _, other in pairs],
        **{key: pairs[0][1][key] for key in ("weights", "allowed")},
    }


def show(figures: dict[str, Any], rounds: int) -> None:
    print(f"{report.versions()}; {report.machine()}. {rounds} pairs.\n")
    head = ("as stored", "read, GB/s", "kept", "load", "load / read", "load / kept", "peak, GB")
    rows = [
        (
            kind,
            report.spread(found["read"], 2),
            *(report.spread(found[key], 2) for key in ("kept", "load", "ratio", "ratio, kept")),
            f"{max(found['peak']) / 1e9:.2f} of {found['allowed'] / 1e9:.2f}",
        )
        for kind, found in figures.items()
    ]
    print(report.table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("read", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"read": read, "load": load}[options.side](options.folder)))
        return
    figures = {}
    for kind in STORED_AS:
        with tempfile.TemporaryDirectory(prefix="mlxpool-") as root:
            folder = write(Path(root) / "model", kind, options.gigabytes * 1e9)
            figures[kind] = measure(folder, options.rounds)
    show(figures, options.rounds)
    report.save(options.json, figures)


if __name__ == "__main__":
    main()
