"""The allow-list: the names and roles of public keys. Pure.

A connection carries the user id of its handshake: `key:PUBLIC` over CURVE, `uid:N` on ipc by the
kernel's credentials. Its rights are looked up at every message. So a key that is removed from the
list is refused immediately.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from mlxpool.common.config.schema import KeyConfig

KEY = "key:"
UID = "uid:"


def may_name_owners(owner: str, keys: Mapping[str, KeyConfig]) -> bool:
    """Returns whether a client may name the owner of its requests.

    Keys with the setting `may_name_owners` may, and so may the broker's own user and root, who can
    read the broker's files anyway.
    """
    if owner.startswith(KEY):
        key = keys.get(owner.removeprefix(KEY))
        return key is not None and key.may_name_owners
    return owner in (f"{UID}{os.getuid()}", f"{UID}0")


class Keyring:
    """The allowed keys."""

    def __init__(self, keys: Mapping[str, KeyConfig]) -> None:
        self._known: dict[str, tuple[str, str]] = {}  # public key -> (name, role)
        self.replace(keys)

    def replace(self, keys: Mapping[str, KeyConfig]) -> dict[str, str]:
        """Allows only these keys. Returns the revoked keys, public key -> name.

        The revoked keys include keys whose name or role has changed.
        """
        before = self._known
        self._known = {key.public: (name, key.role) for name, key in keys.items()}
        return {
            public: name
            for public, (name, role) in before.items()
            if self._known.get(public) != (name, role)
        }

    def name(self, public: str, role: str) -> str | None:
        """Returns the name of a key if the key has this role, else None."""
        known = self._known.get(public)
        return known[0] if known is not None and known[1] == role else None

    def owner(self, user: str, role: str) -> str:
        """Returns the owner of a user id; requests and quotas are counted by owner.

        Returns "" if the user's key does not have this role.
        """
        if user.startswith(UID):
            return user
        name = self.name(user.removeprefix(KEY), role) if user.startswith(KEY) else None
        return "" if name is None else f"{KEY}{name}"

    def authorize(self, role: str) -> Callable[[str], str]:
        """Returns the function `owner` for a role."""
        return lambda user: self.owner(user, role)
