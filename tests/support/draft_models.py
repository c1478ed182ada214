"""A draft model of the demo model: the demo model without its last layers."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

from mlxpool.worker.weights.locate import DEMO_FOLDER

LAYERS, CONTEXT = 5, 256  # layers of the draft model; the demo model has six
BFLOAT16_BYTES, LENGTH_BYTES = 2, 8


def write_draft(folder: Path) -> Path:
    """Writes the draft model to a new folder, and returns the folder.

    Some of the model's drafts are right.
    """
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    whole = json.loads((DEMO_FOLDER / "config.json").read_text())
    kept = {name: value for name, value in whole.items() if not name.startswith("mtp_")}
    own = {**kept, "num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "model.safetensors").write_bytes(_first_layers())
    return folder


def _first_layers() -> bytes:
    """Returns the safetensors file of the demo without its last layers."""
    data = (DEMO_FOLDER / "model.safetensors").read_bytes()
    begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    tensors: dict[str, dict[str, Any]] = json.loads(data[LENGTH_BYTES:begin])
    header, parts, size = {}, list[bytes](), 0
    for name, tensor in tensors.items():
        if name == "__metadata__" or _layer(name) >= LAYERS:
            continue
        first, end = tensor["data_offsets"]
        assert end - first == BFLOAT16_BYTES * prod(tensor["shape"])
        header[name] = {**tensor, "data_offsets": [size, size + end - first]}
        parts.append(data[begin + first : begin + end])
        size += end - first
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + b"".join(parts)


def _layer(name: str) -> int:
    """Returns the layer number of a tensor; -1 if it belongs to no layer."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1
