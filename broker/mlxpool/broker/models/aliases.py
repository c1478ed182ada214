"""The names of models, and the name under which each model runs. Pure.

Several names are aliases if their weights and their settings are equal. Aliases share workers.
Weights are equal if they have the same location on the disk or equal digests.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.common.config.schema import ModelConfig

SHARED_SETTINGS = (  # settings of a worker; names that share workers must have equal values
    "context",
    "devices",
    "device_sums",
    "gpu_ids",
    "memory_limit",
    "sequences",
    "batch",
    "engine",
    "task",
    "prefix_cache",
    "prefix_bytes",
    "kv",
    "prefix_disk",
    "prefix_scope",
    "step_target",
    "speculation",
    "draft",
    "deterministic",
    "counting",
)


class Name(Struct, eq=False):
    """A name of a model. `about` describes the model's files, see docs/protocol.md, `models`."""

    config: ModelConfig
    location: str  # the location of its files; "": not shared with other names
    model: str  # the name under which its model runs
    about: Mapping[str, object] = field(default_factory=dict)
    gone: bool = False  # removed from the settings: requests with it are refused

    @property
    def digest(self) -> str:
        """The digest of the model's files; "" if there are no files or they were not read."""
        return str(self.about.get("digest") or "")

    @property
    def fault(self) -> str | None:
        """The first problem that was found in the model's files.

        Parts of them may not be read yet.
        """
        problems = self.about.get("problems")
        return str(problems[0]) if isinstance(problems, list | tuple) and problems else None

    @property
    def unusable(self) -> str | None:
        """The first problem of the files, if it keeps every worker from loading them.

        None if parts of the files were not read: a worker may still load them.
        """
        return None if self.about.get("unread") else self.fault


class Names:
    """All names of models. In each `Name`, `model` is the name under which its model runs.

    Invariant: a name that is the `model` of another name is also its own `model`.
    """

    def __init__(self) -> None:
        self.known: dict[str, Name] = {}

    def add(self, name: str, config: ModelConfig, location: str) -> str:
        """Adds a name. Returns the name under which its model runs."""
        self.known[name] = Name(config, location, name)
        self.known[name].model = self.alias(name) or name
        return self.known[name].model

    def model_of(self, name: str) -> str | None:
        """Returns the name under which the model of `name` runs; None if unknown or removed."""
        known = self.known.get(name)
        return None if known is None or known.gone else known.model

    def offered(self) -> list[str]:
        """Returns the names that were not removed, in the order of their addition."""
        return [name for name, known in self.known.items() if not known.gone]

    def members(self, model: str) -> list[str]:
        """Returns the names that run under the name `model`, in the order of their addition."""
        return [name for name, known in self.known.items() if known.model == model]

    def alias(self, name: str) -> str | None:
        """Returns the first other name whose workers can serve `name`; None without one.

        A name that is an alias itself has no workers, and is skipped.
        """
        for other, known in self.known.items():
            if other != name and known.model == other and self.are_aliases(name, other):
                return other
        return None

    def are_aliases(self, one: str, other: str) -> bool:
        """Returns whether two names can share workers: their settings and weights are equal."""
        a, b = self.known[one], self.known[other]
        if not a.location or not b.location:
            return False
        if any(getattr(a.config, key) != getattr(b.config, key) for key in SHARED_SETTINGS):
            return False
        return a.location == b.location or bool(a.digest and a.digest == b.digest)

    def separated(self, model: str) -> list[str]:
        """Returns the names that ran as `model` and cannot any more: their files have changed."""
        return [n for n in self.members(model) if n != model and not self.are_aliases(n, model)]

    def config_of(self, model: str) -> ModelConfig:
        """Returns the settings for the workers of `model`, which serve several names.

        They are the settings of the name `model`, with the largest `replicas`, `scaling` and
        `keep_alive` of all its names; `pin` is true if any of the names has it.
        """
        members = [self.known[name] for name in self.members(model)]
        configs = [known.config for known in members if not known.gone] or [members[0].config]
        forever = any(config.keep_alive < 0 for config in configs)
        return replace(
            self.known[model].config,
            replicas=max(config.replicas for config in configs),
            scaling=max((config.scaling for config in configs), key=lambda scaling: scaling.max),
            keep_alive=-1.0 if forever else max(config.keep_alive for config in configs),
            pin=any(config.pin for config in configs),
        )
