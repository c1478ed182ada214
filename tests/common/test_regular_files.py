"""Files of secrets must be regular files: a read of another file may never end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxpool.common.files import NotRegular, open_regular
from mlxpool.common.http_access import read_keys


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"text")
    link.symlink_to(file)
    with open_regular(link) as opened:
        assert opened.read() == b"text"


def test_what_is_no_regular_file_is_refused(tmp_path: Path, fifo: Path) -> None:
    for file in (tmp_path, fifo, Path("/dev/null")):
        with pytest.raises(NotRegular, match=f"it is not a regular file: '{file}'"):
            open_regular(file)


def test_keys_in_a_fifo_are_refused_without_waiting_for_a_writer(fifo: Path) -> None:
    with pytest.raises(ValueError, match=f"the keys in {fifo} cannot be read: .* regular file"):
        read_keys(fifo)
