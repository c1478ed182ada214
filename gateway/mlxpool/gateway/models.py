"""The pool's list of models, cached for a moment so that requests need not wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct, field

from mlxpool.client import AsyncClient
from mlxpool.common.checks import nearest
from mlxpool.common.config.schema import OFF
from mlxpool.common.errors import ModelUnavailable, UnknownModel
from mlxpool.common.protocol.images import VISION
from mlxpool.gateway.formats import ChatFormats

INSPECTION_WAIT = 30.0  # seconds that a request waits for the inspection of its model's files
INSPECTION_PAUSE = 0.1  # seconds between two reads of the list during that wait
MAX_AGE = 2.0  # seconds; the background refreshes an older list
MAX_NAMES_SHOWN = 20
LATEST = ":latest"  # the tag that Ollama's users append to a name


class ModelInfo(Struct, frozen=True):
    """A model as the pool reports it; unknown numbers are 0, unknown texts empty."""

    name: str
    state: str | None
    inspected: bool  # the pool has inspected the model's files, or the model has no files
    readable: bool  # the pool could read the files, or has not tried
    architecture: str
    context: int  # tokens
    size: int  # bytes of the weights on disk
    memory: int  # bytes of memory of the model's workers
    digest: str
    quantisation: str
    chat: ChatFormats | None  # None: the model has no chat template
    features: tuple[str, ...] = ()
    parameters: int = 0
    modified: int | None = None  # seconds since 1970
    requests: int = 0  # requests that wait or run
    workers: int = 0  # workers that serve the model
    expires_in: float | None = None  # seconds until the unload; below 0: never; None: not loaded
    trouble: str = ""  # reason why new workers cannot reach the pool
    about: Mapping[str, Any] = field(default_factory=dict)  # values of the files, if requested

    @property
    def vision(self) -> bool:
        """Whether the model takes images."""
        return VISION in self.features

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Makes a ModelInfo from a row of the pool's `models` call."""
        chat = row.get("chat")
        return cls(
            name=str(row["name"]),
            state=row.get("state"),
            inspected=row.get("inspected", True),
            readable=row.get("type", "") is not None,
            architecture=row.get("type") or "",
            context=row.get("context") or 0,
            size=row.get("size") or 0,
            memory=row.get("memory") or 0,
            digest=row.get("digest") or "",
            quantisation=row.get("quantisation") or "",
            chat=chat
            and ChatFormats(
                chat.get("tools"), chat.get("thinking"), chat.get("generic_tools") or OFF
            ),
            features=tuple(row.get("features") or ()),
            parameters=row.get("parameters") or 0,
            modified=row.get("modified"),
            requests=(row.get("queued") or 0) + (row.get("running") or 0),
            workers=row.get("workers") or 0,
            expires_in=row.get("expires_in"),
            trouble=row.get("trouble") or "",
            about=row.get("about") or {},
        )


class ModelList:
    """The pool's models by name."""

    def __init__(self, client: AsyncClient, inspection_wait: float = INSPECTION_WAIT) -> None:
        """`inspection_wait`: the most seconds that `get` waits for a model's inspection."""
        self._client = client
        self._inspection_wait = inspection_wait
        self._models: dict[str, ModelInfo] = {}
        self._read_at = 0.0  # monotonic seconds
        self._refreshing: asyncio.Task[None] | None = None

    async def all(self) -> list[ModelInfo]:
        """Reads all models now. Raises PoolError if the pool does not answer."""
        await self._refresh()
        return list(self._models.values())

    async def get(self, name: str) -> ModelInfo:
        """Returns a model, after the inspection of its files; NAME:latest is NAME.

        Before the inspection the format of its chats and tool calls is unknown. Raises
        UnknownModel, ModelUnavailable for a model whose inspection takes too long, and the errors
        of `all`.
        """
        known = self.known(name)
        if known is None or not known.inspected:
            await self._refresh()
        elif time.monotonic() - self._read_at > MAX_AGE:
            self._start_refresh()
        model = self.known(name)
        if model is None:
            raise UnknownModel(f"there is no model {name!r:.80}; {self._hint(name)}")
        return model if model.inspected else await self._inspected(model.name)

    async def _inspected(self, name: str) -> ModelInfo:
        """Waits until the files of a model are inspected, and returns the model.

        Raises UnknownModel if the model disappears, and ModelUnavailable if the wait is too long.
        """
        end = time.monotonic() + self._inspection_wait
        while time.monotonic() < end:
            await asyncio.sleep(INSPECTION_PAUSE)
            await self._refresh()
            model = self.known(name)
            if model is None:
                raise UnknownModel(f"there is no model {name!r:.80} any more; {self._hint(name)}")
            if model.inspected:
                return model
        raise ModelUnavailable(
            f"the files of model {name!r:.80} have not been inspected for"
            f" {self._inspection_wait:.0f} s, so its chat format is unknown; try again later, and"
            " see `mlxpool check` if this continues",
            retry_after_ms=round(self._inspection_wait * 1000),
        )

    async def described(self, name: str) -> ModelInfo:
        """Returns a model with `about`, the data from its files, which the list lacks.

        Reads the model from the pool now. Raises the errors of `get`.
        """
        model = await self.get(name)
        return ModelInfo.from_row(await self._client.describe(model.name))

    def _hint(self, name: str) -> str:
        near = nearest(name, self._models)
        if near is not None:
            return f"did you mean {near!r}?"
        more = ", …" if len(self._models) > MAX_NAMES_SHOWN else ""
        return f"known: {', '.join(list(self._models)[:MAX_NAMES_SHOWN])}{more}"

    async def close(self) -> None:
        """Cancels a refresh that is in flight."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def known(self, name: str) -> ModelInfo | None:
        """Returns a model as of the last reading of the list; NAME:latest is NAME."""
        return self._models.get(name) or self._models.get(name.removesuffix(LATEST))

    async def _refresh(self) -> None:
        """Reads the list again. Concurrent callers share one call.

        A cancelled caller does not end the call.
        """
        await asyncio.shield(self._start_refresh())

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read())
            self._refreshing.add_done_callback(_mark_retrieved)
        return self._refreshing

    async def _read(self) -> None:
        models = map(ModelInfo.from_row, await self._client.models())
        self._models = {model.name: model for model in models}
        self._read_at = time.monotonic()


def _mark_retrieved(task: asyncio.Task[None]) -> None:
    """Reads the error of a refresh that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
