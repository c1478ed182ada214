"""The models that can be asked for, by name, their slots, and whether they are available. Pure."""

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

    `memory` is what all workers may take together, in bytes; `restart_limit` the failures in a row
    at which a model's breaker opens.
    """

    def __init__(self, memory: int, restart_limit: int) -> None:
        self.memory = memory
        self.restart_limit = restart_limit
        self.names = Names()
        self.models: dict[str, Model] = {}  # by the name under which they run
        self.slots: dict[str, Slot] = {}

    # ---- names -------------------------------------------------------------------------------

    def add(self, name: str, config: ModelConfig, location: str = "", need: int = 0) -> None:
        """Add a name. It gets a model of its own unless it is an alias.

        `location` is where its files are ("": it is no alias), `need` the least bytes of a worker.
        """
        if name in self.names.known:
            self._reopen(name, config)
        elif self.names.add(name, config, location) == name:
            self._add_model(name, need)
        else:
            self._fit_slots(self.models[self.names.known[name].model])

    def _reopen(self, name: str, config: ModelConfig) -> None:
        """A name that was gone can be asked for again."""
        known = self.names.known[name]
        if known.gone:
            known.gone, known.config = False, config
            model = self.models[known.model]
            model.move("reopen")
            self._fit_slots(model)

    def remove(self, name: str) -> Model | None:
        """The name cannot be asked for any more; returns its model if that has no other name."""
        known = self.names.known.get(name)
        if known is None or known.gone:
            return None
        known.gone = True
        model = self.models[known.model]
        self._fit_slots(model)
        members = self.names.members(model.name)
        return model if all(self.names.known[member].gone for member in members) else None

    def change(self, name: str, config: ModelConfig, location: str, need: int) -> list[Worker]:
        """Give a name other settings; returns the workers that were started with the old ones."""
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
        """Record what the files of a name say; they may make it an alias, or end that it is one.

        A model that is in use stays what it is until it is unused and its files are read again.
        """
        known = self.names.known.get(name)
        if known is None or (about.get("partial") and known.about):
            return  # what is known of files that are read again stays until they were
        if known.fault is not None and not about.get("problems"):
            self._mend(self.models[known.model])
        known.about = about
        self._learn_size(self.models[known.model], about.get("size"))
        self._separate(known.model)
        self._join(self.models[known.model])

    def _mend(self, model: Model) -> None:
        """Its files were repaired: the error that its last worker reported holds no longer."""
        model.last_error = None
        model.move("breaker opened" if model.failures >= self.restart_limit else "mended")

    def _separate(self, model: str) -> None:
        """Give models of their own to the names that `model` can serve no longer."""
        for name in self.names.separated(model):
            self.names.known[name].model = name
            self._add_model(name, self.models[model].floor)

    def _join(self, model: Model) -> None:
        """Have the workers of another model serve all names of this one, if they can."""
        alias, members = self.names.alias(model.name), self.names.members(model.name)
        if alias is None or not model.unused:
            return
        if not all(self.names.are_aliases(member, alias) for member in members):
            return  # the files of one were not read yet; when they are, this is tried again
        del self.models[model.name]
        for slot in model.slots:
            del self.slots[slot.name]
        for member in members:
            self.names.known[member].model = alias
        self._fit_slots(self.models[alias])

    def _learn_size(self, model: Model, size: object) -> None:
        """Set the floor of a model whose files could not be weighed before."""
        if isinstance(size, int) and not model.floor and not model.workers:
            model.floor, model.need = size, max(model.need, size)

    # ---- models and slots --------------------------------------------------------------------

    def _add_model(self, name: str, need: int) -> None:
        config = self.names.known[name].config
        floor = config.memory_limit or need
        self.models[name] = Model(name, config, [], floor=floor, need=floor)
        self._fit_slots(self.models[name])

    def _fit_slots(self, model: Model) -> None:
        """As many slots as the name with the most replicas asks for."""
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
        """The slot that the next worker of this model to dial in fills; it may not exist yet."""
        known = self.names.model_of(name)
        slots = [] if known is None else self.models[known].slots
        free = (slot.name for slot in slots if slot.remote and slot.worker is None)
        return next(free, f"{known or name}/{len(slots)}")

    def remote_slot(self, slot_name: str, name: str) -> Slot:
        """The slot of a worker that dials in. An unknown model is served while it is there."""
        if name not in self.names.known:
            self.add(name, ModelConfig(replicas=0))
        model = self.model(name)
        known = self.slots.get(slot_name)
        return known or self._add_slot(model, Slot(slot_name, model.name, remote=True))

    def model(self, name: str) -> Model:
        """The model that a name means. Raises UnknownModel with the nearest name."""
        model = self.names.model_of(name)
        if model is None:
            known = self.names.offered()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {_shown(known)}"
            raise UnknownModel(f"there is no model {name!r:.80}; {hint}")
        return self.models[model]

    # ---- availability ------------------------------------------------------------------------

    def answers_calls(self, name: str) -> bool:
        """Whether the files of a model say that it answers calls, such as `embed`, and no more."""
        features = self.names.known[name].about.get("features")
        return isinstance(features, list | tuple) and any(one in features for one in TASKS)

    def may_answer_calls(self, name: str) -> bool:
        """As `answers_calls`; also of a model whose files were not read yet."""
        features = self.names.known[name].about.get("features")
        return not isinstance(features, list | tuple) or self.answers_calls(name)

    def check_task(self, name: str, kind: str) -> None:
        """Raises BadRequest for a `generate` or a call that the files of a model do not answer.

        A model whose files were not read yet passes: its worker refuses.
        """
        features = self.names.known[name].about.get("features")
        if not isinstance(features, list | tuple) or kind not in (GENERATE, DECIDE, *TASKS):
            return
        tasks = [one for one in TASKS if one in features]
        if (kind not in tasks) if tasks else (kind in TASKS):
            purpose = f"it is a model for {' and '.join(tasks)}" if tasks else "it generates text"
            raise BadRequest(f"model {name!r} does not {kind}: {purpose}")

    def check_template(self, model: Model) -> None:
        """Raises BadRequest if a model is known to have no chat template, or to make no text."""
        about = self.names.known[model.name].about
        if self.answers_calls(model.name):
            raise BadRequest(f"model {model.name!r} does not generate text, so it takes no chat")
        if "chat" in about and about["chat"] is None:
            raise BadRequest(NO_TEMPLATE)

    def fault(self, model: Model) -> str | None:
        """Why the files from which this broker would start a worker can be loaded by none."""
        known = self.names.known.get(model.name)
        startable = known is not None and model.local_slots and not model.served_soon
        return known.unusable if known is not None and startable else None

    def is_faulty(self, name: str) -> bool:
        """Whether a name is known, and its model has a fault."""
        model = self.names.model_of(name)
        return model is not None and self.fault(self.models[model]) is not None

    def check_available(self, model: Model, now: float, name: str) -> None:
        """Raises the reason for which the model, asked for as `name`, cannot be served now.

        One whose files are known to be unusable is refused with their fault: no worker is started.
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
        """The error that `check_available` raises; None if it raises none."""
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
    """Idle models whose workers free `missing` bytes, least recently used first; [] if they cannot.

    Models that the settings keep for ever and workers that dialled in are not evicted; those that
    a client keeps for ever go last.
    """
    idle = [m for m in models if m.idle_since and m.local_workers and m.config.keep_alive >= 0]
    chosen, freed = [], 0
    for model in sorted(idle, key=lambda m: (m.keep_alive < 0, m.idle_since)):
        if freed >= missing:
            break
        chosen.append(model)
        freed += model.need * len(model.local_workers)
    return chosen if freed >= missing else []
