"""Everything that is wrong with a model's files, where `inspect` stops at the first.

Invariant: what `inspect` and `Text.from_folder` say is always among it, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tokenizers import Tokenizer

from mlxpool.common.errors import ModelLoadFailed, sendable
from mlxpool.worker import models
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.prompt.chat_template.templates import Chat
from mlxpool.worker.prompt.tokenizer import Text, check_vocabulary, read_tokenizer
from mlxpool.worker.weights import match
from mlxpool.worker.weights.files import (
    ModelFiles,
    find_shards,
    merge_tensors,
    require_model_folder,
)
from mlxpool.worker.weights.inspect import ModelFolder, inspect, quant_config_of, require_tokenizer
from mlxpool.worker.weights.json_files import read_json
from mlxpool.worker.weights.safetensors_header import read_header
from mlxpool.worker.weights.special_tokens import SpecialTokens

Step = ParamSpec("Step")
Result = TypeVar("Result")
MAX_KEYS = 64  # of config.json that are looked for one after the other
PLACEHOLDERS = (4096, 1)  # for a key that is missing: a width, a count


class Problems:
    """What went wrong so far, each once, in the order in which it was found."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def add(self, words: Iterable[str]) -> None:
        self.found.update(dict.fromkeys(map(sendable, words)))

    def attempt(
        self, step: Callable[Step, Result], *args: Step.args, **kwargs: Step.kwargs
    ) -> Result | None:
        """What the step returns, or None after its failure was noted."""
        try:
            return step(*args, **kwargs)
        except OSError as error:
            self.add([f"{error.filename}: {error.strerror}" if error.filename else str(error)])
        except Exception as error:  # files are foreign: whatever they provoke is their fault
            self.add([_words(error)])
        return None


def _words(error: Exception) -> str:
    if isinstance(error, ModelLoadFailed):
        return error.message
    return f"{type(error).__name__}: {error}"


def find_problems(place: Path | ModelFiles) -> tuple[ModelFolder | None, list[str]]:
    """The model, if its files agree with each other, and all that is wrong with them."""
    problems = Problems()
    sound = problems.attempt(inspect, place)
    if sound is None:
        _look_at_all(place, problems)
    else:
        _look_at_text(sound.files, sound.path, sound.plan, problems)
        problems.attempt(Text.from_folder, sound)
    return sound, list(problems.found)


def _look_at_all(place: Path | ModelFiles, problems: Problems) -> None:
    files = _files(place, problems)
    if files is None:
        return  # `inspect` has said it; nothing else can be looked at
    config = problems.attempt(read_json, files / "config.json")
    plan = None if config is None else _plan(config, problems)
    _look_at_weights(files, config or {}, plan, problems)
    if config is not None:
        problems.attempt(SpecialTokens.read, files, config)
    _look_at_text(files, files.where, plan, problems)


def _files(place: Path | ModelFiles, problems: Problems) -> ModelFiles | None:
    """What there is of the files, None for no model's folder."""
    if isinstance(place, ModelFiles):
        return place
    there = Problems()
    there.attempt(require_model_folder, place)
    if there.found:
        return None
    shards = problems.attempt(find_shards, place)
    return ModelFiles(
        place, tuple(sorted(place.glob("model*.safetensors"))) if shards is None else shards
    )


def _plan(config: Mapping[str, Any], problems: Problems) -> ModelPlan | None:
    """The plan of a sound config; else every key that cannot be used is noted."""
    try:
        return models.plan(config)
    except ModelLoadFailed as error:
        problems.add([error.message])
    except Exception as error:
        problems.add([_words(error)])
        return None
    for value in PLACEHOLDERS:
        problems.add(_bad_keys(config, value))
    return None


def _bad_keys(config: Mapping[str, Any], value: int) -> Iterator[str]:
    """What is said of one key after the other, where `value` stands for those before it."""
    replaced: dict[str, int] = {}
    while len(replaced) < MAX_KEYS:
        try:
            models.plan({**config, **replaced})
        except ModelLoadFailed as error:
            key = error.details.get("key")
            if key is None or key in replaced:
                return  # it may be `value` that does not fit
            yield error.message
            replaced[key] = value
        except Exception:
            return
        else:
            return


def _look_at_weights(
    files: ModelFiles, config: Mapping[str, Any], plan: ModelPlan | None, problems: Problems
) -> None:
    before = len(problems.found)
    headers = {shard: problems.attempt(read_header, shard) for shard in files.shards}
    contents = problems.attempt(files.read, {s: h for s, h in headers.items() if h is not None})
    found = None if contents is None else problems.attempt(merge_tensors, contents)
    known = (
        None
        if contents is None
        else problems.attempt(quant_config_of, files, config, contents.values())
    )
    if plan is None or not found or known is None:
        return
    whole = len(problems.found) == before and not any("shard" in words for words in problems.found)
    faults = match.mismatches(plan, found, known)
    problems.add(faults if whole else _of_single_tensors(faults))


def _of_single_tensors(faults: Iterable[str]) -> Iterator[str]:
    """Without those that only say that a shard is missing."""
    return (fault for fault in faults if not fault.startswith("the weights lack"))


def _look_at_text(
    files: ModelFiles, where: Path, plan: ModelPlan | None, problems: Problems
) -> None:
    chat = problems.attempt(Chat.from_folder, files)
    tokenizer = problems.attempt(_tokenizer, files, where)
    if tokenizer is not None and plan is not None:
        problems.attempt(check_vocabulary, tokenizer, plan.vocab_size, (), chat or Chat({}))


def _tokenizer(files: ModelFiles, where: Path) -> Tokenizer:
    require_tokenizer(where, files)
    read_json(files / "tokenizer.json")
    return read_tokenizer(files / "tokenizer.json")
