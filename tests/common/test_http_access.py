"""Two headers of browsers show that a request comes from a page of another site."""

from __future__ import annotations

import pytest

from mlxpool.common.http_access import foreign_page

HOST = "127.0.0.1:11434"
OWN, OTHER = f"http://{HOST}", "https://evil.example"


@pytest.mark.parametrize(
    ("origins", "sites"),
    [
        ([], []),  # a program, not a browser
        ([OWN], []),
        ([OWN.upper()], ["same-origin"]),
        ([f"https://{HOST}"], ["same-origin"]),  # behind a proxy with TLS
        ([], ["none"]),
        ([], ["same-origin"]),
        (["https://app.example"], ["cross-site"]),
    ],
)
def test_programs_and_pages_of_this_or_an_allowed_origin_may(
    origins: list[str], sites: list[str]
) -> None:
    assert foreign_page("POST", HOST, origins, sites, ("https://app.example",)) is None


@pytest.mark.parametrize(
    ("origins", "sites", "words"),
    [
        ([OTHER], [], "a page of 'https://evil.example'"),
        ([OTHER], ["none"], "a page of"),
        (["null"], [], "a page of 'null'"),  # from a sandboxed frame or a file
        ([""], [], "a page of ''"),
        (["http://127.0.0.1:8080"], ["same-site"], "a page of"),
        (["http://localhost:11434"], [], "a page of"),
        (["http://[::1"], [], "a page of"),
        ([f"{OWN}@evil.example"], [], "a page of"),
        ([], ["cross-site"], "Sec-Fetch-Site: 'cross-site'"),
        ([], ["same-site"], "another origin"),
        ([], ["new-word"], "another origin"),
        ([OWN], ["cross-site"], "another origin"),
        ([OWN, OTHER], [], "two headers"),
        ([], ["none", "cross-site"], "two headers"),
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH", "get", "PURGE"])
def test_pages_of_other_origins_may_not(
    method: str, origins: list[str], sites: list[str], words: str
) -> None:
    reason = foreign_page(method, HOST, origins, sites)
    assert reason is not None and words in reason
    assert foreign_page("GET", HOST, origins, sites) is None
    assert foreign_page(method, HOST, origins, sites, ("*",)) is None
