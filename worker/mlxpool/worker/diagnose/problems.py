"""Finds all problems of a model's files; `inspect` raises only the first.

Invariant: the error of `inspect` or `ChatTokenizer.from_folder` is always among these problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace
from tokenizers import Tokenizer

from mlxpool.common.errors import ModelLoadFailed, sendable
from mlxpool.worker import models
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.prompt.tokenizer import ChatTokenizer, check_vocabulary, read_tokenizer
from mlxpool.worker.weights import match
from mlxpool.worker.weights.files import (
    ModelFiles,
    find_shards,
    merge_tensors,
    require_model_folder,
)
from mlxpool.worker.weights.inspect import (
    ModelFolder,
    find_vision,
    inspect,
    quant_config_of,
    require_tokenizer,
)
from mlxpool.worker.weights.json_files import read_json
from mlxpool.worker.weights.special_tokens import SpecialTokens

Step = ParamSpec("Step")
Result = TypeVar("Result")
MAX_KEYS = 64  # the most reported unusable keys of config.json
PLACEHOLDERS = (4096, 1)  # values in place of an unusable key: a plausible width, a plausible count


class Problems:
    """The problems found so far, each once, in the order of their discovery."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def add(self, messages: Iterable[str]) -> None:
        self.found.update(dict.fromkeys(map(sendable, messages)))

    def attempt(
        self, step: Callable[Step, Result], *args: Step.args, **kwargs: Step.kwargs
    ) -> Result | None:
        """Calls `step` and returns its result; if it raises, adds the error and returns None."""
        try:
            return step(*args, **kwargs)
        except OSError as error:
            self.add([f"{error.filename}: {error.strerror}" if error.filename else str(error)])
        except Exception as error:  # files are untrusted: any error is a problem of the files
            self.add([_message(error)])
        return None


def _message(error: Exception) -> str:
    if isinstance(error, ModelLoadFailed):
        return error.message
    return f"{type(error).__name__}: {error}"


def find_problems(
    location: Path | ModelFiles,
    engine: str = "auto",
    *,
    predicts: bool = False,
    on_weights: Callable[[ModelFolder], None] | None = None,
) -> tuple[ModelFolder | None, list[str]]:
    """Returns the model, or None if `inspect` raises, and all problems of its files.

    `on_weights` is called before the tokenizer is read, which takes the most time.
    """
    problems = Problems()
    folder = problems.attempt(partial(inspect, predicts=predicts), location, engine)
    if folder is None:
        _check_files(location, problems)
    else:
        if on_weights is not None:
            problems.attempt(on_weights, folder)
        _check_text(folder.files, folder.path, folder.plan, problems)
        text = problems.attempt(ChatTokenizer.from_folder, folder)
        if text is not None:
            folder = replace(folder, notes=(*folder.notes, *text.notes))
    return folder, list(problems.found)


def _check_files(location: Path | ModelFiles, problems: Problems) -> None:
    files = _files(location, problems)
    if files is None:
        return  # `inspect` has reported the error, and there are no files to check
    config = problems.attempt(read_json, files / "config.json")
    plan = None if config is None else _plan(config, problems)
    _check_weights(files, config or {}, plan, problems)
    if config is not None:
        problems.attempt(SpecialTokens.read, files, config)
    _check_text(files, files.where, plan, problems)


def _files(location: Path | ModelFiles, problems: Problems) -> ModelFiles | None:
    """Returns the existing files; None if `location` is not a model folder."""
    if isinstance(location, ModelFiles):
        return location
    folder_problems = Problems()
    folder_problems.attempt(require_model_folder, location)
    if folder_problems.found:
        return None
    shards = problems.attempt(find_shards, location)
    return ModelFiles(
        location, tuple(sorted(location.glob("model*.safetensors"))) if shards is None else shards
    )


def _plan(config: Mapping[str, Any], problems: Problems) -> ModelPlan | None:
    """Returns the plan of a valid config; else None, with a problem for every unusable key."""
    try:
        return models.plan(config)
    except ModelLoadFailed as error:
        problems.add([error.message])
    except Exception as error:
        problems.add([_message(error)])
        return None
    for value in PLACEHOLDERS:
        problems.add(_bad_keys(config, value))
    return None


def _bad_keys(config: Mapping[str, Any], value: int) -> Iterator[str]:
    """Yields the errors of unusable keys.

    After each error, sets the unusable key to `value` and checks the config again.
    """
    replaced: dict[str, int] = {}
    while len(replaced) < MAX_KEYS:
        try:
            models.plan({**config, **replaced})
        except ModelLoadFailed as error:
            key = error.details.get("key")
            if key is None or key in replaced:
                return  # the error may be due to `value`
            yield error.message
            replaced[key] = value
        except Exception:
            return
        else:
            return


def _check_weights(
    files: ModelFiles, config: Mapping[str, Any], plan: ModelPlan | None, problems: Problems
) -> None:
    before = len(problems.found)
    headers = {shard: problems.attempt(files.format.header, shard) for shard in files.shards}
    contents = problems.attempt(files.read, {s: h for s, h in headers.items() if h is not None})
    if contents is None:
        return
    tensors = problems.attempt(merge_tensors, contents)
    quantisation = problems.attempt(quant_config_of, files, config, contents.values())
    if plan is None or not tensors or quantisation is None:
        return
    shard_missing = any("shard" in message for message in problems.found)
    complete = len(problems.found) == before and not shard_missing
    vision = problems.attempt(find_vision, files, plan, tensors)
    messages = match.mismatches(
        plan if vision is None else vision.plan.whole, tensors, quantisation
    )
    problems.add(messages if complete else _without_missing(messages))


def _without_missing(messages: Iterable[str]) -> Iterator[str]:
    """Yields the messages without those about missing tensors, which a missing shard explains."""
    return (message for message in messages if not message.startswith("the weights lack"))


def _check_text(files: ModelFiles, where: Path, plan: ModelPlan | None, problems: Problems) -> None:
    chat = problems.attempt(ChatTemplates.from_folder, files)
    tokenizer = problems.attempt(_tokenizer, files, where)
    if tokenizer is not None and plan is not None:
        problems.attempt(
            check_vocabulary, tokenizer, plan.embedding_rows, (), chat or ChatTemplates({})
        )


def _tokenizer(files: ModelFiles, where: Path) -> Tokenizer:
    require_tokenizer(where, files)
    read_json(files / "tokenizer.json")
    return read_tokenizer(files / "tokenizer.json")[0]
