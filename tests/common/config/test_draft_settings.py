"""`speculation` and `draft`: what contradicts each other is refused, with the ways out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.loading import load


def loaded(tmp_path: Path, model: str) -> None:
    file = tmp_path / "mlxpool.toml"
    file.write_text(f'[models.m]\npath = "/m"\n{model}')
    load(file)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (
            'speculation = "draft"',
            "models.m.speculation is 'draft', but no draft model is set: name one that has the"
            " tokenizer of this model",
        ),
        ('draft = "/d"', "models.m.draft is '/d', but speculation is 'off': set that to"),
        ('draft = "/d"\nspeculation = "ngram"', "speculation is 'ngram'"),
        ('draft = "/d"\nspeculation = "mtp"', "or leave draft out"),
    ],
)
def test_settings_of_drafts_that_contradict_each_other(
    tmp_path: Path, model: str, fault: str
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, model)
    assert fault in str(error.value)


@pytest.mark.parametrize("speculation", ["draft", "auto"])
def test_a_draft_model_that_is_used(tmp_path: Path, speculation: str) -> None:
    loaded(tmp_path, f'draft = "/d"\nspeculation = "{speculation}"')
