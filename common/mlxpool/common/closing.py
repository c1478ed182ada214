"""Base classes of context managers that close themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """`with` calls `close` at its end, also after an exception."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Free all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClosing(ABC):
    """`async with` calls `close`, which does not wait, at its end, also after an exception."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Free all resources, or begin to."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
