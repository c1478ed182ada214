"""Models in the form of Ollama's interface. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlxpool.common.answer_format import FORMAT
from mlxpool.common.config.schema import ALWAYS
from mlxpool.common.protocol.encoder_calls import TASKS
from mlxpool.gateway.formats import NO_CHAT
from mlxpool.gateway.models import ModelInfo

FOREVER = 292 * 365.25 * 86_400  # seconds: the longest duration of Ollama, shown as "Forever"
MIN_DIGEST = 12  # least digits that Ollama's command line shows
UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))  # units of numbers of parameters
LAYOUT = re.compile(r"(\d+)-bit (\w+)")  # the start of the pool's description of quantised weights
FLOATS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
LEVELS = {2: "Q2_K", 3: "Q3_K_M", 6: "Q6_K"}  # bits for which Ollama has no level Qn_0
# detail of a model, see docs/models.md -> end of a key of `model_info`, after the architecture
DETAILS = {
    "width": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
}


def time_text(seconds: float) -> str:
    """Returns a time, given in seconds since 1970, in Ollama's form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def details(model: ModelInfo) -> dict[str, Any]:
    """Returns the `details` of a model; unknown values are empty."""
    family = model.architecture
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameter_size(model.parameters),
        "quantization_level": quantization_level(model.quantisation),
    }


def quantization_level(quantisation: str) -> str:
    """Translates the name of a layout, such as `4-bit affine g64`, into Ollama's, such as Q4_0."""
    match = LAYOUT.match(quantisation)
    if match is None:
        return FLOATS.get(quantisation, quantisation)
    bits, mode = int(match[1]), match[2]
    return LEVELS.get(bits, f"Q{bits}_0") if mode == "affine" else mode.upper()


def _parameter_size(count: int) -> str:
    """Returns a number of parameters such as 3.7M; "" for 0, which is unknown."""
    for unit, letter in UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count or "")


def _head(model: ModelInfo) -> dict[str, Any]:
    name = model.name
    return {
        "name": name,
        "model": name,
        "size": model.size,
        "digest": model.digest.ljust(MIN_DIGEST, "0"),
        "details": details(model),
    }


def tag(model: ModelInfo, fallback: int) -> dict[str, Any]:
    """Returns an entry of /api/tags.

    `fallback`: the time to show for a model without files, in seconds since 1970.
    """
    modified = fallback if model.modified is None else model.modified
    return {**_head(model), "modified_at": time_text(modified)}


def running(model: ModelInfo, now: float) -> dict[str, Any]:
    """Returns an entry of /api/ps: the sizes are the present memory of the model's workers."""
    seconds_left = FOREVER if model.expires_in is None or model.expires_in < 0 else model.expires_in
    return {
        **_head(model),
        "size": model.memory,
        "size_vram": model.memory,
        "expires_at": time_text(now + seconds_left),
        "context_length": model.context,
    }


def capabilities(model: ModelInfo) -> list[str]:
    """Returns the abilities of a model under Ollama's names."""
    chat = model.chat or NO_CHAT
    encodes = any(task in model.features for task in TASKS)
    abilities = {
        "completion": not encodes,
        "embedding": "embed" in model.features,
        "tools": chat.tools is not None or chat.generic_tools == ALWAYS,
        "thinking": chat.thinking is not None,
        "vision": model.vision,
        "format": FORMAT in model.features,  # Ollama has no such capability
    }
    return [name for name, there in abilities.items() if there]


def show(model: ModelInfo, fallback: int, *, verbose: bool = False) -> dict[str, Any]:
    """Returns the response of /api/show.

    `verbose` adds further values of the pool under `mlxpool.`.
    """
    about = model.about
    own = about.get("details")
    known: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
    family = model.architecture
    values = {
        "context_length": model.context or None,
        "block_count": about.get("layers"),
        "vocab_size": about.get("vocabulary"),
        **{key: known.get(name) for name, key in DETAILS.items()},
    }
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": model.parameters,
        **{f"{family}.{key}": value for key, value in values.items() if value},
    }
    if verbose:
        info |= {f"mlxpool.{key}": value for key, value in about.items() if key != "details"}
    modified = fallback if model.modified is None else model.modified
    return {
        "modelfile": f"# {model.name} is a model of an mlxpool; it has no Modelfile\n",
        "parameters": _parameters(known.get("sampling")),
        "template": known.get("template") or "",
        "license": known.get("license") or "",
        "details": details(model),
        "model_info": info,
        "capabilities": capabilities(model),
        "modified_at": time_text(modified),
    }


def _parameters(sampling: object) -> str:
    """Returns the options that a model's makers recommend, in lines as Ollama writes them."""
    options = sampling if isinstance(sampling, Mapping) else {}
    return "\n".join(f"{name:<30} {value:g}" for name, value in options.items())


def pull_statuses(model: ModelInfo) -> list[dict[str, Any]]:
    """Returns the stream of /api/pull for a model of the pool; the last status is `success`."""
    digest = str(model.about.get("digest") or model.digest)
    statuses: list[dict[str, Any]] = [{"status": "pulling manifest"}]
    if digest and model.size:
        sizes = {"digest": f"sha256:{digest}", "total": model.size, "completed": model.size}
        statuses.append({"status": f"pulling {digest[:MIN_DIGEST]}", **sizes})
    texts = ("verifying sha256 digest", "writing manifest", "success")
    return [*statuses, *({"status": status} for status in texts)]
