"""`--format` of `run` and `chat`: json, a schema in a file, or a format in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli.request_flags import add_options, format_of, options_of


@pytest.mark.parametrize(
    ("content", "format"),
    [
        ({"type": "object"}, {"type": "json_schema", "schema": {"type": "object"}}),
        ({"type": ["null"]}, {"type": "json_schema", "schema": {"type": ["null"]}}),
        (True, {"type": "json_schema", "schema": True}),
        ({"type": "regex", "pattern": "a"}, {"type": "regex", "pattern": "a"}),
    ],
)
def test_a_file_has_a_schema_or_a_format(
    tmp_path: Path, content: Any, format: dict[str, Any]
) -> None:
    file = tmp_path / "format.json"
    file.write_text(json.dumps(content))
    assert format_of(str(file)) == format


def test_json_is_no_file() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert options_of(parser.parse_args(["--format", "json"]))["format"] == {"type": "json"}
    assert options_of(parser.parse_args([]))["format"] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "Expecting"), ("[]", "must be a JSON schema"), ('{"type": "regex"}', "needs the key")],
)
def test_a_file_without_a_format_is_told(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "format.json"
    file.write_text(content)
    with pytest.raises(argparse.ArgumentTypeError, match=r"format\.json: ") as caught:
        format_of(str(file))
    assert words in str(caught.value)
    with pytest.raises(argparse.ArgumentTypeError, match="No such file"):
        format_of(str(tmp_path / "absent"))
