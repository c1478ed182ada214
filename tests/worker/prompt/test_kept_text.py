"""Tests stored tokenizer results: a later load reads the same results from the store."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.prompt import kept_text
from mlxpool.worker.prompt.kept_text import KeptText, text_of
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.system.kept_files import KeptFile
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from support.seeing_models import write_qwen
from support.worker_checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(folder))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns a list that gets the folder of each tokenizer which is read."""
    paths: list[Path] = []

    class Counted(ChatTokenizer):
        @classmethod
        def from_folder(cls, folder):  # type: ignore[no-untyped-def]
            paths.append(folder.path)
            return super().from_folder(folder)

    monkeypatch.setattr(kept_text, "ChatTokenizer", Counted)
    return paths


def test_a_second_load_reads_no_tokenizer(tmp_path: Path, reads: list[Path]) -> None:
    folder = inspect(write_checkpoint(tmp_path / "model", vocab_size=300))
    assert text_of(folder) == text_of(folder)
    assert reads == [folder.path]
    table, source, _ = text_of(folder)
    text = ChatTokenizer.from_folder(folder)
    assert source == text.source and len(table.pieces) == 300
    assert all(table.piece(token) == text.piece(token) for token in range(300))


def test_changed_files_are_read(tmp_path: Path, reads: list[Path]) -> None:
    path = write_checkpoint(tmp_path / "model")
    text_of(inspect(path))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    _, source, _ = text_of(inspect(path))
    assert "content" in str(source.templates)
    (path / "added_tokens.json").write_text(json.dumps({"a": 7}))
    _, _, notes = text_of(inspect(path))
    assert "added_tokens.json" in str(notes) and len(reads) == 3
    assert text_of(inspect(path))[2] == notes and len(reads) == 3


@pytest.mark.parametrize("name", ["chat_template.jinja", "added_tokens.json"])
def test_what_is_read_of_files_that_changed_after_the_check_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The tokenizer's files change between the check of the model and the load of the tokenizer.

    The loaded result is not stored: it would be wrong once the files have their old contents again.
    """
    path = write_checkpoint(tmp_path / "model")
    file, folder, read = path / name, inspect(path), kept_text._read

    def changed(folder: ModelFolder) -> KeptText:
        file.write_text(json.dumps({"a": 7}))
        return read(folder)

    with monkeypatch.context() as patch:
        patch.setattr(kept_text, "_read", changed)
        stale_text = text_of(folder)
    file.unlink()
    _, source, notes = text_of(folder)
    text = ChatTokenizer.from_folder(folder)
    assert (source, notes) == (text.source, tuple(text.notes)) != stale_text[1:]


@pytest.mark.parametrize("name", ["tokenizers", "jinja2"])
def test_another_library_reads_again(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = inspect(write_checkpoint(tmp_path / "model"))
    text_of(folder)
    monkeypatch.setattr(kept_text, "version_of", lambda library: "9.9" if library == name else "1")
    text_of(folder)
    monkeypatch.setattr(kept_text, "version_of", lambda library: "1")
    text_of(folder)
    assert len(reads) == 3


def test_a_model_that_was_moved_has_the_paths_of_its_new_place(
    tmp_path: Path, reads: list[Path]
) -> None:
    path = write_checkpoint(tmp_path / "model")
    text_of(inspect(path))
    moved = path.rename(tmp_path / "moved")
    _, source, _ = text_of(inspect(moved))
    assert source.tokenizer == str(moved / "tokenizer.json") and len(reads) == 1


def test_how_a_model_reads_images_is_kept(tmp_path: Path, reads: list[Path]) -> None:
    folder = inspect(write_qwen(tmp_path / "model"))
    (_, first, _), (_, second, _) = text_of(folder), text_of(folder)
    assert first.images is not None and first.images == second.images and len(reads) == 1


def test_a_tokenizer_that_is_refused_is_refused_again(tmp_path: Path, reads: list[Path]) -> None:
    path = write_checkpoint(tmp_path / "model")
    (path / "tokenizer.json").write_text('{"version": "9"}')
    for _ in range(2):
        with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json"):
            text_of(inspect(path))
    assert len(reads) == 2


def test_a_template_that_is_not_unicode_is_read_at_each_load(
    tmp_path: Path, reads: list[Path]
) -> None:
    path = write_checkpoint(tmp_path / "model")
    settings = path / "tokenizer_config.json"
    template = "{{ messages[0].content }}\ud83d"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    for _ in range(2):
        _, source, _ = text_of(inspect(path))
        assert source.templates == {"default": template}
    assert len(reads) == 2


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_that_is_a_link_to_nothing_is_refused_after_a_load_without_it(
    tmp_path: Path, name: str
) -> None:
    """A broken link does not change the model's digest, under which a result is stored.

    The load must still fail, and not use the stored result of a load without the link.
    """
    path = write_checkpoint(tmp_path / "model")
    settings = path / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    fields.pop("chat_template", None)
    settings.write_text(json.dumps(fields))
    text_of(inspect(path))
    (path / name).symlink_to("nowhere")
    with pytest.raises(ModelLoadFailed, match="nowhere"):
        text_of(inspect(path))


def test_a_broken_file_is_logged_and_the_tokenizer_read(
    tmp_path: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = inspect(write_checkpoint(tmp_path / "model"))
    first = text_of(folder)
    KeptFile(kept_text.KIND, kept_text.key_of(folder)).write(b"\x93")
    with caplog.at_level(logging.WARNING):
        assert text_of(folder) == first
    assert "not used" in caplog.text and len(reads) == 2
