"""The models by name, their slots, and their availability. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping

from mlxpool.broker.models.aliases import SHARED_SETTINGS, Names
from mlxpool.broker.models.model import FAILING, Model
from mlxpool.broker.workers.worker import Slot, Worker
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import (
    BadRequest,
    ModelLoadFailed,
    ModelUnavailable,
    PoolError,
    UnknownModel,
    from_body,
)
from mlxpool.common.protocol.chat import NO_TEMPLATE
from mlxpool.common.protocol.decisions import DECIDE
from mlxpool.common.protocol.encoder_calls import TASKS
from mlxpool.common.protocol.from_client import Generate

GENERATE = Generate.kind
MAX_NAMES_SHOWN = 20


class Registry:
    """Owns every Model and Slot; the worker pool fills the slots.

    `memory` is the bound on the bytes of all workers together. `restart_limit` is the number of
    consecutive failures that opens a model's breaker.
    """

    def __init__(self, memory: int, restart_limit: int) -> None:
        self.memory = memory
        self.restart_limit = restart_limit
        self.names = Names()
        self.models: dict[str, Model] = {}  # by the name under which they run
        self.slots: dict[str, Slot] = {}

    # ---- names -------------------------------------------------------------------------------

    def add(self, name: str, config: ModelConfig, location: str = "", need: int = 0) -> None:
        """Adds a name. The name gets a model of its own unless it is an alias.

        `location`: the path of the model's files, or "" if the name cannot be an alias. `need`: the
        least bytes of memory that a worker needs.
        """
        if name in self.names.known:
            self._reopen(name, config)
        elif self.names.add(name, config, location) == name:
            self._add_model(name, need)
        else:
            self._fit_slots(self.models[self.names.known[name].model])

    def _reopen(self, name: str, config: ModelConfig) -> None:
        """Adds a removed name again."""
        known = self.names.known[name]
        if known.gone:
            known.gone, known.config = False, config
            model = self.models[known.model]
            model.move("reopen")
            self._fit_slots(model)

    def remove(self, name: str) -> Model | None:
        """Marks a name as removed. Returns its model if the model has no other name."""
        known = self.names.known.get(name)
        if known is None or known.gone:
            return None
        known.gone = True
        model = self.models[known.model]
        self._fit_slots(model)
        members = self.names.members(model.name)
        return model if all(self.names.known[member].gone for member in members) else None

    def change(self, name: str, config: ModelConfig, location: str, need: int) -> list[Worker]:
        """Changes the settings of a name.

        Returns the workers that were started with the old settings.
        """
        known = self.names.known.get(name)
        if known is None or known.gone:
            return []
        before, known.config, known.location = known.config, config, location
        model = self.models[known.model]
        restart_keys = (*SHARED_SETTINGS, "path")
        renewed = any(getattr(before, key) != getattr(config, key) for key in restart_keys)
        if renewed:
            known.about = {}
            model.floor = model.need = config.memory_limit or need
            model.failures, model.retry_at, model.last_error = 0, 0.0, None
            failed = model.state in FAILING
            model.move("mended")
            if failed and config.pin:
                model.move("want")
        self._separate(model.name)
        self._fit_slots(model)
        kept = model.local_slots
        local = [slot for slot in model.slots if slot.worker is not None and not slot.remote]
        return [slot.worker for slot in local if slot.worker and (renewed or slot not in kept)]

    def describe(self, name: str, about: Mapping[str, object]) -> None:
        """Records the description of a name's files.

        The name may become an alias, or stop being an alias.

        A model in use does not become an alias until it is unused and its files are read again.
        """
        known = self.names.known.get(name)
        if known is None or (about.get("partial") and known.about):
            return  # keeps the known description while files are read again
        if known.fault is not None and not about.get("problems"):
            self._mend(self.models[known.model])
        known.about = about
        self._learn_size(self.models[known.model], about.get("size"))
        self._separate(known.model)
        self._join(self.models[known.model])

    def _mend(self, model: Model) -> None:
        """Drops the error of a model's last worker: the files were repaired."""
        model.last_error = None
        model.move("breaker opened" if model.failures >= self.restart_limit else "mended")

    def _separate(self, model: str) -> None:
        """Gives a model of its own to each name that the workers of `model` can no longer serve."""
        for name in self.names.separated(model):
            self.names.known[name].model = name
            self._add_model(name, self.models[model].floor)

    def _join(self, model: Model) -> None:
        """Lets the workers of another model serve all names of this model, if they can."""
        alias, members = self.names.alias(model.name), self.names.members(model.name)
        if alias is None or not model.unused:
            return
        if not all(self.names.are_aliases(member, alias) for member in members):
            return  # some files were not read yet; tried again after they were
        del self.models[model.name]
        for slot in model.slots:
            del self.slots[slot.name]
        for member in members:
            self.names.known[member].model = alias
        self._fit_slots(self.models[alias])

    def _learn_size(self, model: Model, size: object) -> None:
        """Sets the least memory of a model whose files had no known size before."""
        if isinstance(size, int) and not model.floor and not model.workers:
            model.floor, model.need = size, max(model.need, size)

    # ---- models and slots --------------------------------------------------------------------

    def _add_model(self, name: str, need: int) -> None:
        config = self.names.known[name].config
        floor = config.memory_limit or need
        self.models[name] = Model(name, config, [], floor=floor, need=floor)
        self._fit_slots(self.models[name])

    def _fit_slots(self, model: Model) -> None:
        """Adds slots, up to the largest number of replicas of the model's names."""
        model.config = self.names.config_of(model.name)
        local = sum(not slot.remote for slot in model.slots)
        config = model.config
        most = max(config.replicas, config.scaling.max) if config.replicas else 0
        for number in range(len(model.slots), len(model.slots) + most - local):
            self._add_slot(model, Slot(f"{model.name}/{number}", model.name))

    def _add_slot(self, model: Model, slot: Slot) -> Slot:
        model.slots.append(slot)
        self.slots[slot.name] = slot
        return slot

    def remote_slot_name(self, name: str) -> str:
        """Returns the name of a slot for a worker of another supervisor that serves this model.

        The slot is free, or does not exist yet.
        """
        known = self.names.model_of(name)
        slots = [] if known is None else self.models[known].slots
        free = (slot.name for slot in slots if slot.remote and slot.worker is None)
        return next(free, f"{known or name}/{len(slots)}")

    def remote_slot(self, slot_name: str, name: str) -> Slot:
        """Returns the slot of a worker of another supervisor; creates a missing slot.

        The worker may serve a model that the settings lack; the model is then added.
        """
        if name not in self.names.known:
            self.add(name, ModelConfig(replicas=0))
        model = self.model(name)
        known = self.slots.get(slot_name)
        return known or self._add_slot(model, Slot(slot_name, model.name, remote=True))

    def model(self, name: str) -> Model:
        """Returns the model of a name. Raises UnknownModel with the nearest name."""
        model = self.names.model_of(name)
        if model is None:
            known = self.names.offered()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {_shown(known)}"
            raise UnknownModel(f"there is no model {name!r:.80}; {hint}")
        return self.models[model]

    # ---- availability ------------------------------------------------------------------------

    def answers_calls(self, name: str) -> bool:
        """Returns whether the files show that a model only answers calls, such as `embed`."""
        features = self.names.known[name].about.get("features")
        return isinstance(features, list | tuple) and any(task in features for task in TASKS)

    def may_answer_calls(self, name: str) -> bool:
        """Returns whether a model may answer calls. True if its files were not read yet."""
        features = self.names.known[name].about.get("features")
        return not isinstance(features, list | tuple) or self.answers_calls(name)

    def check_task(self, name: str, kind: str) -> None:
        """Raises BadRequest for a `generate` or a call that the model does not support.

        A model whose files were not read yet passes; its worker refuses the request.
        """
        features = self.names.known[name].about.get("features")
        if not isinstance(features, list | tuple) or kind not in (GENERATE, DECIDE, *TASKS):
            return
        tasks = [task for task in TASKS if task in features]
        if (kind not in tasks) if tasks else (kind in TASKS):
            purpose = f"it is a model for {' and '.join(tasks)}" if tasks else "it generates text"
            raise BadRequest(f"model {name!r} does not {kind}: {purpose}")

    def check_template(self, model: Model) -> None:
        """Raises BadRequest if a model is known to have no chat template or no text output."""
        about = self.names.known[model.name].about
        if self.answers_calls(model.name):
            raise BadRequest(f"model {model.name!r} does not generate text, so it takes no chat")
        if "chat" in about and about["chat"] is None:
            raise BadRequest(NO_TEMPLATE)

    def fault(self, model: Model) -> str | None:
        """Returns why no worker of this broker could load the model; None if a worker could."""
        known = self.names.known.get(model.name)
        startable = known is not None and model.local_slots and not model.served_soon
        return known.unusable if known is not None and startable else None

    def is_faulty(self, name: str) -> bool:
        """Returns whether a name is known and its model's files have a fault."""
        model = self.names.model_of(name)
        return model is not None and self.fault(self.models[model]) is not None

    def check_available(self, model: Model, now: float, name: str) -> None:
        """Raises PoolError if the model, requested as `name`, cannot be served now.

        If the model's files are unusable, the error names their fault, and no worker is started.
        """
        if model.served_soon:
            return
        if (fault := self.fault(model)) is not None:
            raise ModelLoadFailed(fault, details={"model": name})
        if model.floor > self.memory:
            raise ModelUnavailable(
                f"model {name!r} needs {model.floor} bytes, the pool's memory_limit is"
                f" {self.memory}; raise memory_limit or take a smaller model",
                details={"model": name, "need": model.floor, "memory_limit": self.memory},
            )
        if now >= model.retry_at:
            return
        wait_ms = math.ceil((model.retry_at - now) * 1000)
        if model.last_error is not None:
            error = from_body(model.last_error)
            error.retry_after_ms = wait_ms
            raise error
        if model.failures >= self.restart_limit:
            raise _broken(model, wait_ms, name)

    def unavailable(self, model: Model, now: float, name: str = "") -> PoolError | None:
        """Returns the error that `check_available` would raise; None if it would raise none."""
        try:
            self.check_available(model, now, name or model.name)
        except PoolError as error:
            return error
        return None


def _broken(model: Model, wait_ms: int, name: str) -> ModelUnavailable:
    causes = [slot.last_exit for slot in model.slots if slot.last_exit]
    return ModelUnavailable(
        f"model {name!r} failed {model.failures} times in a row"
        f" (last: {causes[-1] if causes else 'unknown'}); it is tried again"
        f" in {wait_ms / 1000:.0f} s",
        details={"model": name},
        retry_after_ms=wait_ms,
    )


def _shown(names: Iterable[str]) -> str:
    shown = list(names)
    more = ", …" if len(shown) > MAX_NAMES_SHOWN else ""
    return ", ".join(shown[:MAX_NAMES_SHOWN]) + more


# ---- eviction ------------------------------------------------------------------------------------


def to_evict(models: Iterable[Model], missing: int) -> list[Model]:
    """Returns idle models to unload, so that `missing` bytes become free.

    The least recently used models come first. Returns [] if all idle models together would free too
    few bytes. Models that the settings keep for ever, and workers of other supervisors, are not
    evicted. Models that a client keeps for ever come last.
    """
    idle = [m for m in models if m.idle_since and m.local_workers and m.config.keep_alive >= 0]
    chosen, freed = [], 0
    for model in sorted(idle, key=lambda m: (m.keep_alive < 0, m.idle_since)):
        if freed >= missing:
            break
        chosen.append(model)
        freed += model.need * len(model.local_workers)
    return chosen if freed >= missing else []
