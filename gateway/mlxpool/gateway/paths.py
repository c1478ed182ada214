"""Second paths of routes: with slashes too many, with `v1` left out or doubled, of other servers.

Clients join a base URL and a path, and either may have the slash, or the `v1`. Pure, but for the
ASGI application at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

V1 = "v1"
OTHER_PATHS: Mapping[str, str] = {
    "/v2/rerank": "/v1/rerank",  # Cohere's
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}


def canonical_paths(routes: Iterable[str]) -> Callable[[str], str]:
    """Makes the function from a path that was asked for to that of a route, from their paths."""
    every = [path.split("/") for path in routes]
    of_v1 = {parts[2] for parts in every if parts[1] == V1 and len(parts) > 2}
    others = {parts[1] for parts in every if parts[1] != V1}

    def canonical(path: str) -> str:
        if path == "*":  # OPTIONS of the whole server
            return "/"
        if not path.startswith("/"):  # of CONNECT and absolute URLs: this is no proxy
            return path
        parts = [part for part in path.split("/") if part]
        if parts[:2] == [V1, V1]:
            del parts[0]
        if parts and parts[0] in of_v1 and parts[0] not in others:
            parts.insert(0, V1)
        short = "/" + "/".join(parts)
        return OTHER_PATHS.get(short, short)

    return canonical


class CanonicalPaths:
    """An ASGI application: gives another one the path of a route in place of a second one."""

    def __init__(self, app: ASGIApp, canonical: Callable[[str], str]) -> None:
        self._app = app
        self._canonical = canonical

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = self._canonical(scope["path"])
        await self._app(scope, receive, send)
