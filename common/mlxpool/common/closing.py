"""Base classes of context managers that close themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager: `with` calls `close` at its end, also after an exception."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Frees all resources."""

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
    """An asynchronous context manager: `async with` calls `close` at its end.

    `close` is also called after an exception, and does not wait.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Frees all resources, or starts to free them without waiting."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
