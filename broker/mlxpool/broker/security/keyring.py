"""The allow-list: which public key is whose, and in which role. Pure.

A connection carries the id that the handshake gave it: `key:PUBLIC` over CURVE, `uid:N` on ipc by
the kernel's word. What it may do is looked up at every message, so a key that is taken off the list
counts no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlxpool.common.config.schema import KeyConfig

KEY = "key:"
UID = "uid:"


class Keyring:
    """The keys that count now."""

    def __init__(self, keys: Mapping[str, KeyConfig]) -> None:
        self._known: dict[str, tuple[str, str]] = {}  # public -> name, role
        self.replace(keys)

    def replace(self, keys: Mapping[str, KeyConfig]) -> dict[str, str]:
        """Let these count from now on; returns what does not any more, public -> name.

        A key that stays under another name or in another role is one that went and came.
        """
        before = self._known
        self._known = {key.public: (name, key.role) for name, key in keys.items()}
        return {
            public: name
            for public, (name, role) in before.items()
            if self._known.get(public) != (name, role)
        }

    def name(self, public: str, role: str) -> str | None:
        """The name of a key, if it has this role."""
        known = self._known.get(public)
        return known[0] if known is not None and known[1] == role else None

    def owner(self, user: str, role: str) -> str:
        """Who a connection's id is, as requests and quotas know him; "": nobody for this role."""
        if user.startswith(UID):
            return user
        name = self.name(user.removeprefix(KEY), role) if user.startswith(KEY) else None
        return "" if name is None else f"{KEY}{name}"

    def gate(self, role: str) -> Callable[[str], str]:
        """`owner` for one role."""
        return lambda user: self.owner(user, role)
