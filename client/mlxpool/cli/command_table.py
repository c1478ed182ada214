"""The commands of `mlxpool`: their groups in the help, in its order, and the module of each.

Only the module of the command that is given is imported, so that `ps` is quick.
"""

from __future__ import annotations

from types import MappingProxyType

_COMMANDS = "mlxpool.cli.commands"

GROUPS = MappingProxyType(
    {
        "run a pool": {
            "serve": f"{_COMMANDS}.serve",
            "broker": f"{_COMMANDS}.serve",
            "worker": f"{_COMMANDS}.worker",
            "gateway": f"{_COMMANDS}.gateway",
            "ray": f"{_COMMANDS}.ray",
            "stop": f"{_COMMANDS}.pool",
        },
        "use its models": {
            "run": f"{_COMMANDS}.run",
            "chat": f"{_COMMANDS}.chat",
            "embed": f"{_COMMANDS}.embed",
            "rerank": f"{_COMMANDS}.embed",
            "classify": f"{_COMMANDS}.embed",
            "decide": f"{_COMMANDS}.decide",
        },
        "jobs that outlive their clients": {
            "submit": f"{_COMMANDS}.jobs",
            "fetch": f"{_COMMANDS}.jobs",
            "jobs": f"{_COMMANDS}.jobs",
            "retry": f"{_COMMANDS}.jobs",
            "release": f"{_COMMANDS}.jobs",
        },
        "see what it does": {
            "ps": f"{_COMMANDS}.reports",
            "top": f"{_COMMANDS}.top",
            "models": f"{_COMMANDS}.reports",
            "requests": f"{_COMMANDS}.reports",
            "stats": f"{_COMMANDS}.stats",
            "logs": f"{_COMMANDS}.logs",
        },
        "operate it": {
            "load": f"{_COMMANDS}.pool",
            "unload": f"{_COMMANDS}.pool",
            "drain": f"{_COMMANDS}.pool",
            "restart": f"{_COMMANDS}.pool",
            "cancel": f"{_COMMANDS}.pool",
            "reload": f"{_COMMANDS}.pool",
        },
        "models, settings, keys": {
            "pull": f"{_COMMANDS}.pull",
            "check": f"{_COMMANDS}.check",
            "config": f"{_COMMANDS}.settings",
            "prefix": f"{_COMMANDS}.prefix",
            "keygen": f"{_COMMANDS}.keygen",
            "revoke": f"{_COMMANDS}.revoke",
        },
        "more": {
            "bench": "mlxpool.bench.cli",
            "completion": f"{_COMMANDS}.about",
            "help": f"{_COMMANDS}.about",
            "version": f"{_COMMANDS}.about",
        },
    }
)
COMMAND_MODULES = {name: module for group in GROUPS.values() for name, module in group.items()}

# The modules whose commands take --endpoint, --server-key and --key. Others add them by
# themselves: the --key of `submit` is a job's, and a gateway has several endpoints.
REMOTE_MODULES = frozenset(
    COMMAND_MODULES[name]
    for name in (
        "run",
        "chat",
        "embed",
        "decide",
        "ps",
        "stats",
        "top",
        "load",
        "revoke",
    )
)
