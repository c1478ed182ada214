"""The models that can be asked for, by name, and their slots. Part of the pure core."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mlxpool.broker.models.aliases import SHARED, Names
from mlxpool.broker.workers.worker import Model, Slot, Worker
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.errors import ModelUnavailable, PoolError, UnknownModel, from_body


class Roster:
    """Owns every Model and Slot; who fills the slots is the fleet's affair."""

    def __init__(self, config: PoolConfig, memory: int) -> None:
        self.config = config
        self.memory = memory  # bytes that all workers may take together
        self.names = Names()
        self.models: dict[str, Model] = {}  # by the name under which they run
        self.slots: dict[str, Slot] = {}

    def add(self, name: str, config: ModelConfig, place: str = "", need: int = 0) -> None:
        """A name that can be asked for. It gets a model of its own unless a twin has one.

        `place` is where its files are ("": it has no twin), `need` the bytes of a worker at least.
        """
        if name in self.names.known:
            self._take_back(name, config)
            return
        if self.names.add(name, config, place) == name:
            self._found(name, need)
        else:
            self._fit(self.models[self.names.known[name].model])

    def _take_back(self, name: str, config: ModelConfig) -> None:
        """A name that was gone can be asked for again."""
        known = self.names.known[name]
        if known.gone:
            known.gone, known.config = False, config
            model = self.models[known.model]
            model.closed = False
            self._fit(model)

    def gone(self, name: str) -> Model | None:
        """Nobody can ask for this name any more; its model, if it has no other name."""
        known = self.names.known.get(name)
        if known is None or known.gone:
            return None
        known.gone = True
        model = self.models[known.model]
        self._fit(model)
        members = self.names.members(model.name)
        return model if all(self.names.known[member].gone for member in members) else None

    def changed(self, name: str, config: ModelConfig, place: str, need: int) -> list[Worker]:
        """A name has other settings; returns the workers that were started with the old ones."""
        known = self.names.known.get(name)
        if known is None or known.gone:
            return []
        before, known.config, known.place = known.config, config, place
        model = self.models[known.model]
        renewed = any(getattr(before, key) != getattr(config, key) for key in (*SHARED, "path"))
        if renewed:
            known.about = {}
            model.floor = model.need = config.memory_limit or need
            model.failures, model.retry_at, model.last_error = 0, 0.0, None
        for stray in self.names.strays(model.name):
            self.names.known[stray].model = stray
            self._found(stray, self.models[model.name].floor)
        self._fit(model)
        kept = self.own_slots(model)
        own = [slot for slot in model.slots if slot.worker is not None and not slot.remote]
        return [slot.worker for slot in own if slot.worker and (renewed or slot not in kept)]

    def own_slots(self, model: Model) -> list[Slot]:
        """The slots that we fill: fewer than there are when replicas were taken away."""
        return [slot for slot in model.slots if not slot.remote][: model.config.replicas]

    def described(self, name: str, about: Mapping[str, Any]) -> None:
        """What a look at its files has found; they may turn out to be another name's, or no more.

        A model that anybody wants stays what it is until it is quiet and looked at again.
        """
        known = self.names.known.get(name)
        if known is None:
            return
        if known.fault is not None and not about.get("problems"):
            self.models[known.model].last_error = None  # its files have been mended since
        known.about = about
        self._learn_size(self.models[known.model], about.get("size"))
        for stray in self.names.strays(known.model):
            need = self.models[known.model].floor
            self.names.known[stray].model = stray
            self._found(stray, need)
        self._join(self.models[known.model])

    def _join(self, model: Model) -> None:
        """Have the workers of another model serve all names of this one, if they can."""
        twin, members = self.names.twin(model.name), self.names.members(model.name)
        if twin is None or not model.quiet:
            return
        if not all(self.names.are_twins(member, twin) for member in members):
            return  # one that has not been looked at yet; its own look comes here again
        del self.models[model.name]
        for slot in model.slots:
            del self.slots[slot.name]
        for member in members:
            self.names.known[member].model = twin
        self._fit(self.models[twin])

    def _learn_size(self, model: Model, size: object) -> None:
        """What a model takes at least, where its files could not be weighed before."""
        if isinstance(size, int) and not model.floor and not model.workers:
            model.floor, model.need = size, max(model.need, size)

    def _found(self, name: str, need: int) -> None:
        config = self.names.known[name].config
        floor = config.memory_limit or need
        self.models[name] = Model(name, config, [], floor=floor, need=floor)
        self._fit(self.models[name])

    def _fit(self, model: Model) -> None:
        """As many slots as the one asks for that asks for most."""
        model.config = self.names.config_of(model.name)
        own = sum(not slot.remote for slot in model.slots)
        for number in range(len(model.slots), len(model.slots) + model.config.replicas - own):
            slot = Slot(f"{model.name}/{number}", model.name)
            model.slots.append(slot)
            self.slots[slot.name] = slot

    def model(self, name: str) -> Model:
        """The model that a name means. Raises UnknownModel naming the nearest name."""
        model = self.names.model_of(name)
        if model is None:
            known = self.names.offered()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {_few(known)}"
            raise UnknownModel(f"there is no model {name!r:.80}; {hint}")
        return self.models[model]

    def refuse_if_broken(self, model: Model, now: float, name: str) -> None:
        """Raises why the model, asked for as `name`, cannot be had until `retry_at`, or ever."""
        if model.hopeful:
            return
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
        if model.failures >= self.config.restart_limit:
            raise self.broken(model, wait_ms, name)

    def broken(self, model: Model, wait_ms: int, name: str) -> ModelUnavailable:
        causes = [slot.last_exit for slot in model.slots if slot.last_exit]
        return ModelUnavailable(
            f"model {name!r} failed {model.failures} times in a row"
            f" (last: {causes[-1] if causes else 'unknown'}); it is tried again"
            f" in {wait_ms / 1000:.0f} s",
            details={"model": name},
            retry_after_ms=wait_ms,
        )

    def verdict(self, model: Model, now: float, name: str = "") -> PoolError | None:
        """Why what waits for the model should not go on waiting; None when it should."""
        try:
            self.refuse_if_broken(model, now, name or model.name)
        except PoolError as error:
            return error
        return None


def _few(names: Iterable[str], most: int = 20) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")
