"""`mlxpool prefix`: lists, checks and deletes the prefixes on the disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxpool.cli.main import main
from mlxpool.worker.prefix_disk.survey import survey
from support.disk_records import DIGEST, records_of, tier_at, write_all

IDS = tuple(range(700))


@pytest.fixture
def prefixes(tmp_path: Path) -> Path:
    for model, digest in (("m", DIGEST), ("m", bytes(32)), ("org/other", DIGEST)):
        with tier_at(tmp_path, model=model, digest=digest) as tier:
            write_all(tier, records_of(IDS, states=[700]))
    return tmp_path


def run(*words: str) -> int:
    return main(["prefix", *words])


def test_ls_has_a_row_for_each_digest(prefixes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", "--prefix-dir", str(prefixes)) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", head) == [
        "MODEL",
        "DIGEST",
        "KV CACHE",
        "DEVICE",
        "RECORDS",
        "TOKENS",
        "SIZE",
        "USED",
    ]
    assert [row.split()[0] for row in rows] == ["m", "m", "org/other"]
    assert {tuple(row.split()[2:6]) for row in rows} == {("contiguous", "-", "4", "700")}
    assert {row.split()[1] for row in rows} == {"0" * 12, DIGEST.hex()[:12]}
    assert run("ls", "org/other", "--prefix-dir", str(prefixes)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_empty_folder_and_an_unknown_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", "--prefix-dir", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no prefixes\n"
    missing = tmp_path / "missing"
    for verb in ("ls", "verify"):
        assert run(verb, "--prefix-dir", str(missing)) == 0
        said = capsys.readouterr().out
        assert said == f"{missing} does not exist: no prefixes were kept there\n"
    assert run("ls", "--prefix-dir", str(tmp_path / "mistyped")) == 0
    assert "mistyped does not exist" in capsys.readouterr().out
    assert run("rm", "m", "--prefix-dir", str(tmp_path)) != 0
    assert "has no prefixes of 'm'" in capsys.readouterr().err
    assert run("verify", "m", "--prefix-dir", str(tmp_path)) != 0
    assert "it has those of: no model" in capsys.readouterr().err


def test_verify_names_what_does_not_check(
    prefixes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", "--prefix-dir", str(prefixes)) == 0
    assert capsys.readouterr().out.startswith("12 records in 3 segments")
    flipped, broken, torn = sorted(prefixes.rglob("*.seg"))
    data = bytearray(flipped.read_bytes())
    data[4000] ^= 1  # in the arrays of the first record
    flipped.write_bytes(data)
    broken.write_bytes(bytes(100))
    torn.write_bytes(torn.read_bytes()[:-100])
    assert run("verify", "--prefix-dir", str(prefixes)) == 1
    first, *faults = capsys.readouterr().out.splitlines()
    assert ": 2 bad," in first and "0 B torn" not in first
    assert len(faults) == 2
    assert f"{flipped} at " in faults[0] and "the checksum of the arrays is wrong" in faults[0]
    assert str(broken) in faults[1] and "a segment begins with" in faults[1]


def test_rm_deletes_a_model_or_a_digest(prefixes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rm", "m", "--digest", "0000", "--prefix-dir", str(prefixes)) == 0
    assert " of m deleted" in capsys.readouterr().out
    assert [(entry.model, entry.digest) for entry in survey(prefixes)] == [
        ("m", DIGEST.hex()[:32]),
        ("org/other", DIGEST.hex()[:32]),
    ]
    assert run("rm", "m", "--digest", "0000", "--prefix-dir", str(prefixes)) == 2
    error = capsys.readouterr().err
    assert "whose digest begins with '0000'" in error and DIGEST.hex()[:32] in error
    assert len(survey(prefixes)) == 2
    assert run("verify", "m", "--prefix-dir", str(prefixes)) == 0
    assert capsys.readouterr().out.startswith("4 records in 1 segment, ")
    assert run("rm", "m", "--prefix-dir", str(prefixes)) == 0
    assert [entry.model for entry in survey(prefixes)] == ["org/other"]


def test_the_folder_is_that_of_the_settings(
    prefixes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mlxpool.toml"
    config.write_text(f'[pool]\nprefix_dir = "{prefixes}"\n')
    assert run("verify", "--config", str(config)) == 0
    assert "12 records" in capsys.readouterr().out
