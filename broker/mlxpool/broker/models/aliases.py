"""Every name that can be asked for, and under which of them its model runs. Pure.

Twins are names that mean the same weights under the same settings; they share their workers. The
same weights: the same place on the disk, or the same digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlxpool.common.config.schema import ModelConfig

SHARED = (  # settings that a worker is started with: those who share one must agree on them
    "context",
    "memory_limit",
    "sequences",
    "prefix_cache",
    "prefix_bytes",
    "deterministic",
    "counting",
)


@dataclass(eq=False, slots=True)
class Name:
    """One name. `about` is what a look at its files has found, see docs/protocol.md, `models`."""

    config: ModelConfig
    place: str  # where its files are; "": unlike any other
    model: str  # the name under which it runs
    about: Mapping[str, Any] = field(default_factory=dict)
    gone: bool = False  # taken out of the settings: nobody can ask for it any more

    @property
    def digest(self) -> str:
        """Of its files, "" while they have not been looked at or have none."""
        return str(self.about.get("digest") or "")

    @property
    def fault(self) -> str | None:
        """The first of what is wrong with its files, as far as they have been looked at."""
        problems = self.about.get("problems") or ()
        return str(problems[0]) if problems else None


class Names:
    """Invariant: the model of a name is a name that runs as itself."""

    def __init__(self) -> None:
        self.known: dict[str, Name] = {}

    def add(self, name: str, config: ModelConfig, place: str) -> str:
        """A new name; returns the name that it runs as."""
        self.known[name] = Name(config, place, name)
        self.known[name].model = self.twin(name) or name
        return self.known[name].model

    def model_of(self, name: str) -> str | None:
        """The name that it runs as; None for an unknown one."""
        known = self.known.get(name)
        return None if known is None or known.gone else known.model

    def offered(self) -> list[str]:
        """The names that can be asked for, in the order in which they came."""
        return [name for name, known in self.known.items() if not known.gone]

    def members(self, model: str) -> list[str]:
        """The names that run as `model`, in the order in which they came."""
        return [name for name, known in self.known.items() if known.model == model]

    def twin(self, name: str) -> str | None:
        """The first other name that runs as itself and can stand for this one."""
        for other, known in self.known.items():
            if other != name and known.model == other and self.are_twins(name, other):
                return other
        return None

    def are_twins(self, one: str, other: str) -> bool:
        """Whether workers of the one can serve the other."""
        a, b = self.known[one], self.known[other]
        if not a.place or not b.place:
            return False
        if any(getattr(a.config, key) != getattr(b.config, key) for key in SHARED):
            return False
        return a.place == b.place or bool(a.digest and a.digest == b.digest)

    def strays(self, model: str) -> list[str]:
        """Members that `model` cannot stand for any more: the files of one have changed."""
        return [n for n in self.members(model) if n != model and not self.are_twins(n, model)]

    def config_of(self, model: str) -> ModelConfig:
        """Its own settings, with the most that any member asks for."""
        members = [self.known[name] for name in self.members(model)]
        configs = [known.config for known in members if not known.gone] or [members[0].config]
        forever = any(config.keep_alive < 0 for config in configs)
        return replace(
            self.known[model].config,
            replicas=max(config.replicas for config in configs),
            keep_alive=-1.0 if forever else max(config.keep_alive for config in configs),
            pin=any(config.pin for config in configs),
        )
