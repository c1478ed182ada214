"""Reads the sentence-transformers files of a model: the modules after the encoder.

modules.json lists the modules, such as pooling and linear layers; each has a folder. An unknown
module is an error with the name of the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from msgspec import Struct, field

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.activations import FUNCTIONS
from mlxpool.worker.layers.config_fields import flag, integer
from mlxpool.worker.layers.encoder_plan import Pooling
from mlxpool.worker.weights.files import ModelFiles
from mlxpool.worker.weights.json_files import optional_json, read_json, read_json_list

MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
POOLINGS = get_args(Pooling)
OLD_POOLINGS: Mapping[str, Pooling] = {  # keys of older files, in the order of their vectors
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
LOGIT_SCORE = "LogitScore"  # the step of a language model that rates by its yes/no answer
NO_STEP = ("Dropout",)  # modules that do nothing when a text is embedded
assert all(name in {"", "tanh", *FUNCTIONS} for name in DENSE_ACTIVATIONS.values())


class Dense(Struct, frozen=True):
    """A linear layer after the pooling: `file` has linear.weight and, with a bias, linear.bias.

    `activation`: a name in activations.FUNCTIONS, or tanh; "": no activation.
    """

    file: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


class VectorSettings(Struct, frozen=True):
    """The settings by which an embedding model makes a vector of a text's hidden states.

    `poolings`: the vectors of several poolings are concatenated. `max_tokens`: the most tokens of a
    text; 0: the model's own bound.
    """

    poolings: tuple[Pooling, ...] = ("mean",)
    dense: tuple[Dense, ...] = ()
    normalises: bool = False
    max_tokens: int = 0
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    similarity: str = "cosine"

    def dimensions(self, hidden: int) -> int:
        """Returns the length of a vector.

        Raises ModelLoadFailed if a dense layer's input length differs from the length of the
        vectors that it gets.
        """
        size = hidden * len(self.poolings)
        for dense in self.dense:
            if dense.inputs != size:
                raise ModelLoadFailed(
                    f"{dense.file} takes {dense.inputs} numbers, the step before it gives {size}"
                )
            size = dense.outputs
        return size


def has_modules(files: ModelFiles) -> bool:
    """Returns whether modules.json exists, sentence-transformers' list of modules."""
    return (files / MODULES).is_file()


def asks_a_question(files: ModelFiles) -> bool:
    """Returns whether a language model rates pairs, by the logits of two possible answers."""
    return has_modules(files) and any(kind == LOGIT_SCORE for kind, _ in _listed(files))


def answer_ids(files: ModelFiles) -> tuple[int, int]:
    """Returns the ids of the two compared tokens: for a match, and for no match.

    Raises ModelLoadFailed if the files do not name two tokens.
    """
    (path,) = (path for kind, path in _listed(files) if kind == LOGIT_SCORE)
    config = read_json(files / f"{path}/config.json")
    if config.get("false_token_id") is None:
        raise ModelLoadFailed(
            f"{files / path}/config.json has no false_token_id, must name two tokens to compare"
        )
    return integer(config, "true_token_id"), integer(config, "false_token_id")


def pair_settings(files: ModelFiles) -> VectorSettings:
    """Returns the settings of a model that rates pairs: its prompts, and otherwise the defaults."""
    return VectorSettings(**_prompts(optional_json(files / PROMPTS)))


def pair_activation(files: ModelFiles) -> str:
    """Returns the activation of a model that rates pairs, if its files name one, else ""."""
    return str(optional_json(files / PROMPTS).get("activation_fn") or "")


def vector_settings(files: ModelFiles) -> VectorSettings:
    """Returns a folder's settings; without modules.json, the defaults of sentence-transformers.

    Raises ModelLoadFailed with the file and the value that cannot be used.
    """
    steps: dict[str, Any] = {}
    dense: list[Dense] = []
    if has_modules(files):
        for kind, path in _modules(files):
            if kind == "Pooling":
                steps["poolings"] = _poolings(files, path)
            elif kind == "Dense":
                dense.append(_dense(files, path))
            elif kind == "Normalize":
                steps["normalises"] = True
        if "poolings" not in steps:
            raise ModelLoadFailed(
                f"{files / MODULES} lists no Pooling, so the model cannot embed texts"
            )
    settings = optional_json(files / SETTINGS)
    prompts = optional_json(files / PROMPTS)
    return VectorSettings(
        dense=tuple(dense),
        max_tokens=integer(settings, "max_seq_length") if settings.get("max_seq_length") else 0,
        lower=flag(settings, "do_lower_case"),
        similarity=str(prompts.get("similarity_fn_name") or "cosine"),
        **_prompts(prompts),
        **steps,
    )


def _listed(files: ModelFiles) -> list[tuple[str, str]]:
    """Returns the type and folder of each module in modules.json, supported or not."""
    return [
        (str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", "")))
        for entry in read_json_list(files / MODULES)
    ]


def _modules(files: ModelFiles) -> list[tuple[str, str]]:
    """Returns the type and folder of each module of an embedding model, the model itself first."""
    steps = []
    for kind, path in _listed(files):
        if kind == "Transformer":
            if path:
                raise ModelLoadFailed(
                    f"{files / MODULES} has the model in the folder {path!r}, must be beside it:"
                    " move its files there and set the path to ''"
                )
        elif kind not in ("Pooling", "Dense", "Normalize", *NO_STEP):
            raise ModelLoadFailed(
                f"{files / MODULES} has the step {kind!r}; supported are Transformer, Pooling,"
                " Dense and Normalize"
            )
        steps.append((kind, path))
    kinds = [kind for kind, _ in steps if kind not in NO_STEP]
    ordered = sorted(kinds, key=("Transformer", "Pooling", "Dense", "Normalize").index)
    if kinds != ordered or kinds.count("Transformer") != 1 or kinds.count("Pooling") > 1:
        raise ModelLoadFailed(
            f"{files / MODULES} has the steps {', '.join(kinds)}; supported are one Transformer,"
            " one Pooling, Dense, Normalize, in this order"
        )
    return steps


def _poolings(files: ModelFiles, path: str) -> tuple[Pooling, ...]:
    config = read_json(files / f"{path}/config.json")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_POOLINGS.items() if config.get(key)]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in POOLINGS for mode in modes):
        raise ModelLoadFailed(
            f"{files / path}/config.json has the pooling {modes!r}, must be of"
            f" {', '.join(POOLINGS)}"
        )
    if not flag(config, "include_prompt", True):
        raise ModelLoadFailed(
            f"{files / path}/config.json has include_prompt false, which is not supported: tokens"
            " of a prompt are pooled as the others"
        )
    return tuple(cast(Pooling, mode) for mode in modes)


def _dense(files: ModelFiles, path: str) -> Dense:
    config = read_json(files / f"{path}/config.json")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in DENSE_ACTIVATIONS:
        raise ModelLoadFailed(
            f"{files / path}/config.json has activation_function {name!r}, must be one of"
            f" {', '.join(DENSE_ACTIVATIONS)}"
        )
    file = f"{path}/model.safetensors"
    if not (files / file).is_file():
        raise ModelLoadFailed(f"{files / file} is missing, the weights of a Dense; download again")
    return Dense(
        file,
        integer(config, "in_features"),
        integer(config, "out_features"),
        flag(config, "bias", True),
        DENSE_ACTIVATIONS[name],
    )


def _prompts(config: Mapping[str, Any]) -> dict[str, Any]:
    prompts = config.get("prompts") or {}
    default = config.get("default_prompt_name") or ""
    if not isinstance(prompts, Mapping) or not all(isinstance(x, str) for x in prompts.values()):
        raise ModelLoadFailed(f"{PROMPTS} has prompts {prompts!r:.60}, must map names to texts")
    if default and default not in prompts:
        raise ModelLoadFailed(
            f"{PROMPTS} has default_prompt_name {default!r}, which is not one of its prompts"
        )
    return {"prompts": dict(prompts), "default_prompt": default}
