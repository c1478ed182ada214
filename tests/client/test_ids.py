"""The client refuses an invalid request id, because the broker would not answer it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest


@pytest.mark.parametrize("ident", ["0" * 32, "0" * 16, b"", b"abc", b"0" * 17])
def test_cancel_takes_the_sixteen_bytes_of_an_id(ident: Any, tmp_path: Path) -> None:
    with Client(tmp_path) as client, pytest.raises(BadRequest, match="id is 16 bytes, got"):
        client.cancel(ident)
