"""How a store fails as a whole, and `Damaged`. Other failures are results of one operation."""

from __future__ import annotations


class StoreError(OSError):
    """Base of these errors; the message says what to do."""


class StoreUnusable(StoreError):
    """The store cannot be opened as it is: nothing was changed."""


class StoreUnwritable(StoreUnusable):
    """The folder of the store cannot be made, or this user cannot write in it."""


class StoreInUse(StoreUnusable):
    """Another broker has the store."""


class StoreFenced(StoreError):
    """Another broker has written into the store since this one opened it: this one must end."""


class StoreFailed(StoreError):
    """The disk or the connection failed. Whether the last transaction is durable is unknown."""


class OutOfSpace(StoreError):
    """No room for the transaction, which was undone; the store is as it was."""


class Damaged(Exception):
    """What is stored does not match its checksum; the message names the job and the range."""
