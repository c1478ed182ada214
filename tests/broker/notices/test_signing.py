"""Signatures of notices: Standard Webhooks' own example, several secrets, the file of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.broker.notices.sender import headers, read_secrets
from mlxpool.common.config.bounds import ConfigError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "notify.secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_example_of_standard_webhooks(tmp_path: Path) -> None:
    secrets = read_secrets(secret_file(tmp_path, SECRET + "\n"))
    signed = headers(secrets, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_each_secret_signs(tmp_path: Path) -> None:
    other = "whsec_" + "A" * 32
    secrets = read_secrets(secret_file(tmp_path, f"{SECRET}\n{other}\n"))
    both = headers(secrets, "id", 1, b"body")["webhook-signature"].split(" ")
    assert both == [headers([one], "id", 1, b"body")["webhook-signature"] for one in secrets]


@pytest.mark.parametrize(
    "text", ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_c2hvcnQ=", "whsec_!", f"{SECRET}\n" * 5]
)
def test_what_is_no_secret_is_refused_and_not_told(tmp_path: Path, text: str) -> None:
    file = secret_file(tmp_path, text)
    with pytest.raises(ConfigError, match=r"job_notify_secret.*notify\.secret") as error:
        read_secrets(file)
    assert "MfKQ" not in str(error.value)


def test_a_file_that_others_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secrets(secret_file(tmp_path, SECRET, 0o640))
    with pytest.raises(ConfigError, match="cannot read"):
        read_secrets(tmp_path / "none")
