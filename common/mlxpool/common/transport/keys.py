"""Makes, writes and reads CURVE keys, in files that only their owner can read.

A secret key is always given as the path of its file, a public key as text or as a path.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import zmq
from msgspec import Struct

from mlxpool.common.paths import expanded, home

ROLES = ("client", "worker", "admin", "server")
PEERS = ROLES[:-1]  # roles of keys in an allow-list
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLIC = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # characters: 32 bytes in Z85
MAX_FILE = 4096  # the most bytes of a key file


class BadKey(ValueError):
    """A key or a key file cannot be used. The message names it, and a remedy."""


class KeyPair(Struct, frozen=True):
    """A CURVE key pair. `public` and `secret` are 40 characters of Z85 each."""

    name: str
    role: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.name!r}, {self.role!r}, {self.public!r})"


def default_folder() -> Path:
    """Returns the default folder of `mlxpool keygen`."""
    return home() / ".mlxpool" / "keys"


def make(name: str, role: str) -> KeyPair:
    """Returns a new pair. Raises BadKey if the name is not allowed or the role is unknown."""
    if not NAME.fullmatch(name):
        raise BadKey(
            f"a key's name has letters, digits, dots, dashes and underlines, at most 64;"
            f" got {name!r:.80}"
        )
    if role not in ROLES:
        raise BadKey(f"the role is {role!r:.40}, must be of {ROLES}")
    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):  # a command would parse such a key as a flag
        public, secret = zmq.curve_keypair()
    return KeyPair(name, role, public.decode(), secret.decode())


def write(pair: KeyPair, folder: Path) -> Path:
    """Writes NAME.key with mode 0600 to a folder, and returns its path.

    A missing folder is made with mode 0700. A key is never overwritten. Raises BadKey if the file
    exists, or cannot be written.
    """
    path = folder / f"{pair.name}.key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BadKey(f"there is a key {path} already; give another name, or move it away") from None
    except OSError as error:
        raise BadKey(
            f"cannot write the key {path}: {error.strerror}; name another folder with --folder"
        ) from None
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # the umask may have removed permissions
            file.write(
                f'name = "{pair.name}"\nrole = "{pair.role}"\n'
                f'public = "{pair.public}"\nsecret = "{pair.secret}"\n'
            )
    except OSError as error:
        path.unlink()
        raise BadKey(f"cannot write the key {path}: {error.strerror}") from None
    return path


def section(name: str) -> str:
    """Returns the heading of a key's section in the broker's config."""
    return f'[keys."{name}"]' if "." in name else f"[keys.{name}]"


def read(path: Path, role: str = "") -> KeyPair:
    """Returns the key pair in a file. `role`: the role that the key must have; "" allows any role.

    Raises BadKey naming the file if its key cannot be used, or if other users can read the file.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MAX_FILE)
    except OSError as error:
        raise BadKey(f"cannot read the key {path}: {error.strerror}") from None
    if mode & 0o077:
        raise BadKey(
            f"the key {path} can be read by others (mode {mode:04o}): chmod 600 it, and make a new"
            " one if somebody may have seen it"
        )
    pair = _parse(path, text)
    if role and pair.role != role:
        raise BadKey(
            f"the key {path} has the role {pair.role!r}, {role!r} is needed here;"
            f" make one with: mlxpool keygen NAME --role {role}"
        )
    return pair


def _parse(path: Path, text: bytes) -> KeyPair:
    try:
        import tomllib  # imported here: the import takes time, and few processes have a key

        table = tomllib.loads(text.decode("utf-8"))
        pair = KeyPair(*(str(table[key]) for key in ("name", "role", "public", "secret")))
    except (ValueError, KeyError):
        raise BadKey(f"{path} is no key that `mlxpool keygen` made") from None
    if not PUBLIC.fullmatch(pair.public) or not _belongs(pair):
        raise BadKey(f"{path} is damaged: its public and its secret key do not belong together")
    return pair


def _belongs(pair: KeyPair) -> bool:
    try:
        return zmq.curve_public(pair.secret.encode()).decode() == pair.public
    except (zmq.ZMQError, ValueError):
        return False


def public_of(text: str) -> str:
    """Returns a public key: `text` itself, or the content of the file with this path.

    Raises BadKey if the text is neither.
    """
    if PUBLIC.fullmatch(text):
        return text
    try:
        with expanded(text).open() as file:
            key = file.read(MAX_FILE).strip()
    except (OSError, ValueError):
        raise BadKey(
            f"{text!r:.80} is neither a public key of 40 characters nor a file that can be read"
        ) from None
    if not PUBLIC.fullmatch(key):
        raise BadKey(
            f"the file {text} must hold a public key of 40 characters and nothing else;"
            " in a key file it is the value of `public`"
        )
    return key


class Credentials(Struct, frozen=True):
    """The keys of a CURVE connection: the broker's public key, and the process's own pair."""

    server: str
    own: KeyPair

    @classmethod
    def of(cls, server_key: str | None, key: str | Path | None) -> Credentials | None:
        """Returns the credentials from two keys; None if both are absent.

        Raises BadKey if only one key is given, or if a key cannot be used.
        """
        if not server_key and not key:
            return None
        if not key:
            raise BadKey("a server key also needs this process's own key: give it with --key")
        if not server_key:
            raise BadKey(
                f"the key {key} needs the broker's public key beside it; give it with --server-key"
            )
        return cls(public_of(str(server_key)), read(expanded(key)))
