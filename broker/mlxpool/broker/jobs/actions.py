"""The actions that the job manager decides on, and the outbox that collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from mlxpool.broker.core.events import Event
from mlxpool.broker.jobs.answers import unexpected
from mlxpool.broker.jobs.events import QuestionAsked
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import Result
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.frames import Content, Header
from mlxpool.common.protocol.to_client import Failed


class Store(Struct, frozen=True):
    """Gives an operation to the store; the result of the operation comes to `JobManager.stored`."""

    operation: Operation


class Tell(Struct, frozen=True):
    """Sends a message to a client."""

    link: int
    header: Header
    message: Content


class Perform(Struct, frozen=True):
    """Lets the core handle an event."""

    event: Event


class Forget(Struct, frozen=True):
    """Forgets a client's link.

    The client's next frame creates a new link, so the client notices it.
    """

    link: int


class Post(Struct, frozen=True):
    """Posts a notice to a URL. The result comes back as the event `Posted`."""

    end_seq: int
    id: str
    url: str
    body: bytes


Action = Store | Tell | Perform | Forget | Post
R = TypeVar("R", bound=Result)
Then = Callable[[Result, float], None]  # called with the result of an operation and the time


class Outbox:
    """Collects the actions of one event. Calls `then` with the result of each store operation.

    Operations are matched by identity, not by equality: the store returns the operation's own
    object.
    """

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.refused: Counter[str] = Counter()  # refused submissions by error code
        self._actions: list[Action] = []
        self._then: dict[int, tuple[Operation, Then]] = {}

    def __len__(self) -> int:
        """Returns the number of operations without a result."""
        return len(self._then)

    def take(self) -> list[Action]:
        """Returns the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def store(self, operation: Operation, then: Then) -> None:
        """Gives an operation to the store. `then` is called with its result."""
        self._then[id(operation)] = (operation, then)
        self._actions.append(Store(operation))

    def ask(
        self,
        event: QuestionAsked,
        operation: Operation,
        kind: type[R],
        then: Callable[[R, float], None],
        error: Callable[[Result], PoolError] = unexpected,
    ) -> None:
        """Gives an operation to the store for a client's question.

        `then` is called with a result of type `kind`. Any other result is sent to the client as the
        error that `error` returns.
        """

        def settle(result: Result, now: float) -> None:
            if isinstance(result, kind):
                then(result, now)
            else:
                self.refuse(event, error(result))

        self.store(operation, settle)

    def resolve(self, operation: Operation, result: Result, now: float) -> None:
        """Calls the `then` that was given with an operation, with the result of the operation."""
        _, then = self._then.pop(id(operation))
        then(result, now)

    def perform(self, event: Event) -> None:
        self._actions.append(Perform(event))

    def post(self, notice: Post) -> None:
        self._actions.append(notice)

    def forget(self, link: int) -> None:
        self._actions.append(Forget(link))

    def send(
        self, link: int, message: Content, id: bytes | None, attempt: int = 0, pos: int = 0
    ) -> None:
        header = Header(message.kind, id, self.boot, attempt, pos)
        self._actions.append(Tell(link, header, message))

    def refuse(self, event: QuestionAsked, error: PoolError) -> None:
        """Answers a question with an error. Counts the refusal if the question is a submission."""
        if event.submits:
            self.refused[error.code] += 1
        self.fail(event.link, error, event.id, event.attempt)

    def fail(self, link: int, error: PoolError, id: bytes, attempt: int, pos: int = 0) -> None:
        self.send(link, Failed.of(error), id, attempt, pos)
