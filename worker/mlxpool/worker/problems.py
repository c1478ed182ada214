"""Everything that is wrong with a model's files, where `inspect` stops at the first.

Invariant: what `inspect` and `Text.from_folder` say is always among it, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tokenizers import Tokenizer

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker import folder, models
from mlxpool.worker.chat import Template
from mlxpool.worker.folder import ModelFolder, inspect, read_json
from mlxpool.worker.headers import Tensor, read_header
from mlxpool.worker.models.base import Plan
from mlxpool.worker.tokenizer import Text

Step = ParamSpec("Step")
Result = TypeVar("Result")
MOST_KEYS = 64  # of config.json that are looked for one after the other
STAND_INS = (4096, 1)  # for a key that is missing: a width, a count


class Problems:
    """What went wrong so far, each once, in the order in which it was found."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def add(self, words: Iterable[str]) -> None:
        self.found.update(dict.fromkeys(words))

    def of(
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


def look(path: Path) -> tuple[ModelFolder | None, list[str]]:
    """The folder, if it is sound so far, and all that is wrong with it."""
    problems = Problems()
    sound = problems.of(inspect, path)
    if sound is None:
        _look_at_all(path, problems)
    else:
        _look_at_text(path, sound.plan, problems)
        problems.of(Text.from_folder, sound)
    return sound, list(problems.found)


def _look_at_all(path: Path, problems: Problems) -> None:
    there = Problems()
    there.of(folder.require_folder, path)
    if there.found:
        return  # `inspect` has said it; nothing else can be looked at
    config = problems.of(read_json, path / "config.json")
    plan = None if config is None else _plan(config, problems)
    if config is not None:
        problems.of(folder.refuse_quantised, path, config)
    _look_at_weights(path, plan, problems)
    _look_at_text(path, plan, problems)


def _plan(config: Mapping[str, Any], problems: Problems) -> Plan | None:
    """The plan of a sound config; else every key that cannot be used is noted."""
    try:
        return models.plan(config)
    except ModelLoadFailed as error:
        problems.add([error.message])
    except Exception as error:
        problems.add([_words(error)])
        return None
    for value in STAND_INS:
        problems.add(_bad_keys(config, value))
    return None


def _bad_keys(config: Mapping[str, Any], value: int) -> Iterator[str]:
    """What is said of one key after the other, where `value` stands for those before it."""
    replaced: dict[str, int] = {}
    while len(replaced) < MOST_KEYS:
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


def _look_at_weights(path: Path, plan: Plan | None, problems: Problems) -> None:
    complete = problems.of(folder.shards_of, path)
    files = sorted(path.glob("model*.safetensors")) if complete is None else complete
    headers = [problems.of(_tensors, file) for file in files]
    read = [tensors for tensors in headers if tensors is not None]
    if plan is None or not read:
        return
    faults = folder.tensor_faults(plan, read)
    whole = complete is not None and len(read) == len(files)
    problems.add(faults if whole else _of_single_tensors(faults))


def _tensors(file: Path) -> Mapping[str, Tensor]:
    return read_header(file)[1]


def _of_single_tensors(faults: Iterable[str]) -> Iterator[str]:
    """Without those that only say that a shard is missing."""
    return (fault for fault in faults if not fault.startswith("the weights lack"))


def _look_at_text(path: Path, plan: Plan | None, problems: Problems) -> None:
    tokenizer = problems.of(_tokenizer, path)
    if tokenizer is not None and plan is not None:
        problems.of(_require_rows, tokenizer, plan.vocab_size)
    problems.of(_require_template, path)


def _tokenizer(path: Path) -> Mapping[str, Any]:
    folder.require_tokenizer(path)
    file = path / "tokenizer.json"
    raw = read_json(file)
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
    return raw


def _require_rows(tokenizer: Mapping[str, Any], rows: int) -> None:
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = vocab.values() if isinstance(vocab, Mapping) else range(len(vocab))
    if max(ids, default=-1) >= rows:
        raise ModelLoadFailed(
            f"tokenizer.json has ids up to {max(ids)}, the model has rows for {rows} (vocab_size"
            " of config.json): the tokenizer is of another model"
        )


def _require_template(path: Path) -> None:
    template = Template.from_folder(path)
    try:
        _ = template.source and template._compiled
    except BadRequest as error:
        raise ModelLoadFailed(error.message) from error
