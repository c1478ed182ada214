"""Signatures of notices, as Standard Webhooks has them, and the file of their secrets."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.regular_files import open_regular

PREFIX = "whsec_"
MIN_SECRET, MAX_SECRET = 24, 64  # bytes
MAX_SECRETS = 4  # of which each signs, while one takes the place of another
MAX_FILE = 1024  # bytes
SETTING = "pool.job_notify_secret"


def read_secrets(file: Path) -> tuple[bytes, ...]:
    """The secrets in a file, one a line. Raises ConfigError naming the file, never a secret."""
    try:
        with open_regular(file) as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(MAX_FILE + 1).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"{SETTING}: cannot read {file}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{SETTING}: {file} can be read by others (mode {mode:04o}): chmod 600 it, and write"
            " another secret if somebody may have seen it"
        )
    lines = text.split()
    if not 1 <= len(lines) <= MAX_SECRETS or len(text) > MAX_FILE:
        raise ConfigError(
            f"{SETTING}: {file} must have 1 to {MAX_SECRETS} secrets, one a line, it has"
            f" {len(lines)}"
        )
    return tuple(_secret(line, file) for line in lines)


def _secret(line: str, file: Path) -> bytes:
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not line.startswith(PREFIX) or not MIN_SECRET <= len(secret) <= MAX_SECRET:
        raise ConfigError(
            f"{SETTING}: each line of {file} must be {PREFIX} and {MIN_SECRET} to {MAX_SECRET}"
            f" bytes in base64: make one with `echo {PREFIX}$(openssl rand -base64 32)`"
        )
    return secret


def headers(secrets: Sequence[bytes], id: str, timestamp: int, body: bytes) -> Mapping[str, str]:
    """The headers that name and sign a notice; `timestamp` is seconds since 1970, of this try."""
    signed = b"%s.%d.%s" % (id.encode(), timestamp, body)
    signatures = (
        "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
        for secret in secrets
    )
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }
