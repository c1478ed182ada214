"""Checks the folder of an encoder model: its task, the layers after the encoder, its tokenizer.

Imports no MLX.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from tokenizers import Tokenizer

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.protocol.encoder_calls import Task
from mlxpool.worker.encoders import sentence_transformers as settings_files
from mlxpool.worker.encoders.sentence_transformers import (
    VectorSettings,
    answer_ids,
    asks_a_question,
    has_modules,
    pair_activation,
    pair_settings,
    vector_settings,
)
from mlxpool.worker.encoders.text import EncoderTextSource
from mlxpool.worker.layers.encoder_plan import EncoderPlan, label_count
from mlxpool.worker.models.encoders import DECODERS, ENCODERS, encoder_plan
from mlxpool.worker.models.text_decoders import Answers, require_answers
from mlxpool.worker.prompt.tokenizer import read_tokenizer
from mlxpool.worker.weights.files import ModelFiles
from mlxpool.worker.weights.inspect import ModelFolder, inspect, require_tokenizer
from mlxpool.worker.weights.json_files import optional_json, read_file, read_json

log = logging.getLogger("mlxpool.worker")

Activation: TypeAlias = Literal["", "sigmoid", "softmax"]  # of the head's logits
MAX_TOKENS = 10**9  # a greater model_max_length means no bound
# The activations that a cross-encoder's config.json names.
ACTIVATIONS: Mapping[str, Activation] = {"Identity": "", "Sigmoid": "sigmoid"}
PROBLEMS: Mapping[str, Activation] = {
    "multi_label_classification": "sigmoid",
    "regression": "",
    "single_label_classification": "softmax",
}


class EncoderFolder(Struct, frozen=True):
    """An encoder model whose files have been checked and agree with each other."""

    folder: ModelFolder
    plan: EncoderPlan
    vectors: VectorSettings
    task: Task
    labels: tuple[str, ...]  # names of classes
    activation: Activation
    source: EncoderTextSource
    digest: str  # hex digest of all files and settings that determine the results

    @property
    def dimensions(self) -> int:
        """The length of an embedding vector; 0: the model does not embed."""
        return self.vectors.dimensions(self.plan.hidden) if self.task == "embed" else 0


def is_encoder(files: ModelFiles, task: str = "") -> bool:
    """Returns whether the files belong to an encoder model.

    `task`: the model's setting; a model with any task is an encoder model. Raises ModelLoadFailed
    for a config.json that cannot be read.
    """
    config = read_json(files / "config.json")
    encodes = str(config.get("model_type")) in ENCODERS or label_count(config) > 0
    return bool(task) or encodes or has_modules(files)


def inspect_encoder(files: ModelFiles, task: str = "", context: int = 0) -> EncoderFolder:
    """Checks an encoder model; reads headers, but no weights.

    `task`, `context`: the settings of the model. Raises ModelLoadFailed with the file, the tensor
    or the value, and the remedy.
    """
    config = read_json(files / "config.json")
    require_tokenizer(files.where, files)
    tokenizer, data = read_tokenizer(files / "tokenizer.json")
    chosen = _task(files, config, task)
    asks = chosen == "rerank" and not label_count(config)
    if asks:
        plan = encoder_plan(config, answers=_answers(files, tokenizer))
    else:
        plan = encoder_plan(config)
    vectors = _settings(files, chosen)
    if chosen == "embed" and not has_modules(files):
        log.warning(
            "no modules.json: states are averaged, as sentence-transformers does then",
            extra={"model": str(files.where)},
        )
    folder = inspect(files, encoder=plan.model)
    bounds = (context, vectors.max_tokens, _tokenizer_bound(files))
    tokens = min([plan.model.context, *(bound for bound in bounds if bound)])
    _check_vocabulary(tokenizer, plan.model.vocab_size)
    config_of_text = optional_json(files / "tokenizer_config.json")
    source = EncoderTextSource(
        tokenizer=str(files / "tokenizer.json"),
        sha256=hashlib.sha256(data).hexdigest(),
        context=tokens,
        vocab_size=plan.model.vocab_size,
        prompts=vectors.prompts,
        default_prompt=vectors.default_prompt,
        lower=vectors.lower,
        keeps_end=config_of_text.get("truncation_side") == "left",
        asks=asks,
        types="token_type_ids" in config_of_text.get("model_input_names", ["token_type_ids"]),
    )
    vectors.dimensions(plan.hidden)
    return EncoderFolder(
        folder=folder,
        plan=plan,
        vectors=vectors,
        task=chosen,
        labels=_labels(config, plan.labels) if chosen == "classify" else (),
        activation=_activation(files, config, chosen),
        source=source,
        digest=_digest(files, folder.digest, vectors, chosen),
    )


def _task(files: ModelFiles, config: Mapping[str, Any], wanted: str) -> Task:
    """Returns the task of a model, from its files or the setting."""
    labels = label_count(config)
    if labels:
        own: Task = "rerank" if labels == 1 else "classify"
        if wanted not in ("", own):
            raise ModelLoadFailed(
                f"task is {wanted!r}, but config.json has a head of {labels} labels, which is for"
                f" {own!r}: leave task out"
            )
        return own
    asks = wanted == "rerank" or (not wanted and asks_a_question(files))
    if asks and config.get("model_type") == "qwen3":
        return "rerank"
    if wanted in ("rerank", "classify"):
        raise ModelLoadFailed(
            f"task is {wanted!r}, but config.json has no head of labels (an architecture named"
            " …ForSequenceClassification), nor is it a Qwen3 that answers yes or no"
        )
    if config.get("model_type") in DECODERS and not has_modules(files):
        raise ModelLoadFailed(
            f"{files.where} has no modules.json, which describes how a {config['model_type']} makes"
            " a vector of a text: download the files of sentence-transformers, too"
        )
    return "embed"


def _answers(files: ModelFiles, tokenizer: Tokenizer) -> Answers:
    """Returns the two token ids whose logits a reranker compares, for a match and for no match.

    The files of sentence-transformers name them; for models without these files they are "yes" and
    "no".
    """
    if asks_a_question(files):
        return Answers(*answer_ids(files))
    return require_answers(tokenizer.token_to_id("yes"), tokenizer.token_to_id("no"))


def _settings(files: ModelFiles, task: Task) -> VectorSettings:
    if task == "embed":
        return vector_settings(files)
    return pair_settings(files) if task == "rerank" else VectorSettings()


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Returns the label names in id2label; without id2label, LABEL_0 and so on."""
    listed = config.get("id2label") or {}
    return tuple(str(listed.get(str(index), f"LABEL_{index}")) for index in range(count))


def _activation(files: ModelFiles, config: Mapping[str, Any], task: Task) -> Activation:
    """Returns the head's activation: from a cross-encoder's files, or from its problem_type."""
    if task == "rerank":
        saved = config.get("sentence_transformers")
        names = (
            pair_activation(files),
            saved.get("activation_fn") if isinstance(saved, Mapping) else None,
            config.get("sbert_ce_default_activation_function"),
        )
        name = next(filter(None, names), "Sigmoid")
        kind = str(name).rpartition(".")[2]
        if kind not in ACTIVATIONS:
            raise ModelLoadFailed(
                f"{files.where} has the activation {name!r}, must be Sigmoid or Identity of torch"
            )
        return ACTIVATIONS[kind]
    problem = config.get("problem_type") or "single_label_classification"
    if problem not in PROBLEMS:
        raise ModelLoadFailed(
            f"config.json has problem_type {problem!r}, must be one of {', '.join(PROBLEMS)}"
        )
    return PROBLEMS[problem]


def _tokenizer_bound(files: ModelFiles) -> int:
    """Returns model_max_length of the tokenizer; 0 if the key is missing."""
    bound = optional_json(files / "tokenizer_config.json").get("model_max_length")
    return bound if isinstance(bound, int) and 0 < bound < MAX_TOKENS else 0


def _check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= rows:
        raise ModelLoadFailed(
            f"tokenizer.json has ids up to {largest}, the model has rows for {rows} (vocab_size of"
            " config.json): the tokenizer is of another model"
        )


def _digest(files: ModelFiles, folder: str, vectors: VectorSettings, task: Task) -> str:
    """Returns the digest of the folder, the task, and the layers after the encoder.

    The settings and the weights of these layers are part of the digest. `folder`:
    ModelFolder.digest.
    """
    digest = hashlib.sha256(f"{folder} {task} {vectors}".encode())
    if task == "embed" and has_modules(files):
        digest.update(read_file(files / settings_files.MODULES))
    for dense in vectors.dense:
        digest.update(read_file(files / dense.file))
    return digest.hexdigest()
