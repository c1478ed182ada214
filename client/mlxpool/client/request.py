"""Makes the messages of a client from the arguments of its methods."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.client.stream import StreamState
from mlxpool.common.checks import is_number, shown
from mlxpool.common.errors import BadRequest, Internal, PoolError
from mlxpool.common.options import REQUEST_KEYS, GenerateOptions
from mlxpool.common.protocol import choice, from_client
from mlxpool.common.protocol.frames import ID_BYTES, TEXT_AS_BLOB, Content, Message
from mlxpool.common.protocol.from_client import (
    KEEP_FOREVER,
    MAX_KEEP_MS,
    Cancel,
    GenerateDraft,
    Keep,
    ListModels,
    ModelCall,
)
from mlxpool.common.protocol.images import MAX_IMAGE, check_count, check_sizes
from mlxpool.common.protocol.kept.job_messages import Fetch
from mlxpool.common.protocol.prompts import ChatPrompt, PackedPrompt, Prompt, TextPrompt
from mlxpool.common.protocol.resume import Resume, check_size
from mlxpool.common.protocol.to_client import Kept, ModelList
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from mlxpool.common.protocol.unicode_text import not_unicode

Image = bytes | bytearray | memoryview | os.PathLike[str]  # an image's content, or its file's path
FIRST_ONLY = frozenset({"queue_ms", "first_token_ms"})  # bounds for the first attempt only

Answer = TypeVar("Answer")


# ---- generate ------------------------------------------------------------------------------------


def read_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """Returns the contents of images. Raises BadRequest, and TooLarge naming the image's index."""
    if isinstance(images, bytes | bytearray | memoryview | str | os.PathLike):
        raise BadRequest(f"images must be a list of images, got {type(images).__name__}")
    check_count(len(images))
    files = tuple(_read(f"images[{index}]", image) for index, image in enumerate(images))
    check_sizes(files)
    return files


def take_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Image]
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Returns messages whose parts name images by index, and a list of all images, `images` first.

    The image in a part {type: "image", image: …} is replaced by its index. Raises BadRequest if a
    message has images outside its parts, which the pool would not read.
    """
    collected, changed = [*images], []
    for number, message in enumerate(messages):
        if message.get("images"):
            raise BadRequest(
                f"messages[{number}].images is not supported: give each image as a part"
                " {type: 'image', image: …} of the content"
            )
        content = message.get("content")
        if isinstance(content, list | tuple):
            changed.append({**message, "content": [_named(part, collected) for part in content]})
        else:
            changed.append(dict(message))
    return changed, collected


def _named(part: Any, images: list[Image]) -> Any:
    """Returns a part in the protocol's form. The image of an image part is appended to `images`."""
    if not isinstance(part, Mapping) or part.get("type") != "image" or "image" not in part:
        return part
    images.append(part["image"])
    rest = {key: value for key, value in part.items() if key != "image"}
    return {**rest, "blob": len(images) - 1}


def _read(where: str, image: object) -> bytes:
    """Returns the bytes of an image; of a file, reads at most MAX_IMAGE + 1 bytes.

    A longer file is refused later as too large. Raises BadRequest if the image cannot be read.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, os.PathLike):
        raise BadRequest(
            f"{where} must be the bytes of an image file, or its path as a pathlib.Path,"
            f" got {shown(image)}"
        )
    try:
        with open(image, "rb") as file:
            return file.read(MAX_IMAGE + 1)
    except OSError as error:
        raise BadRequest(f"{where} cannot be read: {error}") from None


def generate(
    model: str,
    prompt: str | None,
    messages: Sequence[Mapping[str, object]] | None,
    tokens: Sequence[int] | None,
    options: GenerateOptions,
    images: Sequence[Image] = (),
) -> GenerateDraft:
    """Returns a `generate`, with separate maps for sampling options and for the other keys.

    Raises BadRequest if not exactly one of prompt, messages and tokens is given, or if a prompt or
    an image cannot be sent. The broker checks everything else.
    """
    sampling, others = divide_options(options)
    settings = {"batch": True, **others}  # one frame per step for all streams of the client
    return GenerateDraft(model, _prompt(prompt, messages, tokens, images), sampling, settings)


def divide_options(
    options: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns two maps of keyword arguments: sampling options, and the request's other keys."""
    values = {key: value for key, value in options.items() if value is not None}
    settings = {key: value for key, value in values.items() if key in REQUEST_KEYS}
    sampling = {key: value for key, value in values.items() if key not in REQUEST_KEYS}
    biases = sampling.get("logit_bias")
    if isinstance(biases, Mapping):  # keys of maps in the protocol are texts
        sampling["logit_bias"] = {_digits(token): bias for token, bias in biases.items()}
    return sampling, settings


def _digits(token: object) -> str:
    """Returns a key of logit_bias as text. Raises BadRequest if it cannot be written as text."""
    try:
        return str(token)
    except (RecursionError, ValueError):
        raise BadRequest(f"logit_bias has the key {shown(token)}, which is no token id") from None


def _prompt(
    prompt: str | None,
    messages: Sequence[Mapping[str, object]] | None,
    tokens: Sequence[int] | None,
    images: Sequence[Image],
) -> Prompt:
    count = sum(value is not None for value in (prompt, messages, tokens))
    if count != 1:
        raise BadRequest(f"give one of prompt, messages, tokens; got {count}")
    if messages is not None:
        changed, collected = take_images(_maps(messages), images)
        return ChatPrompt(changed, images=read_images(collected))
    files = read_images(images)
    if tokens is not None:
        if files:
            raise BadRequest("images require prompt or messages, got tokens")
        ids = pack_ids(tokens)
        if not ids:
            raise BadRequest("tokens has no id; a prompt is 1 or more")
        return PackedPrompt("tokens", ids)
    data = _utf8(prompt)
    if len(data) > TEXT_AS_BLOB:
        return PackedPrompt("prompt", data, files)
    return TextPrompt(str(prompt), files)


def _maps(messages: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    items = list(messages) if isinstance(messages, Iterable) else [messages]
    if not all(isinstance(message, Mapping) for message in items):
        raise BadRequest(f"messages must be a list of maps, got {shown(messages)}")
    return [dict(message) for message in items]


def _utf8(text: object) -> bytes:
    """Returns the bytes of a text. Raises BadRequest if it is not a str, or not Unicode."""
    if not isinstance(text, str):
        raise BadRequest(f"a text must be a str, got {shown(text)}")
    if fault := not_unicode(text, "prompt"):
        raise BadRequest(f"cannot be sent: {fault}")
    return text.encode()


Draft = GenerateDraft | Fetch  # the message that starts a stream


def sent_again(draft: Draft, state: StreamState, left: float | None) -> Draft:
    """Returns the message that continues a stream after its last token id; see `resumed`."""
    if isinstance(draft, GenerateDraft):
        return resumed(draft, state, left)
    if not state.ids:
        return draft
    return replace(draft, start=state.position, gen=state.gen)


def resumed(draft: GenerateDraft, state: StreamState, left: float | None) -> GenerateDraft:
    """Returns the request that continues after the ids received so far.

    `left` is the number of seconds until the user's deadline. A request that was never accepted has
    no known seed, so it is returned unchanged. Raises TooLarge if a message cannot hold the ids.
    """
    settings = {key: value for key, value in draft.settings.items() if key not in FIRST_ONLY}
    if left is not None:
        settings["deadline_ms"] = max(1, math.ceil(left * 1000))
    if not state.boot:
        return replace(draft, settings=settings)
    ids = pack_ids(state.ids)
    check_size(ids)
    reported = len(state.prompt)
    resume = Resume(ids, state.facts, state.seed, state.barren_boots, reported)
    return replace(draft, settings=settings, resume=resume)


def reports_prompt(draft: GenerateDraft) -> bool:
    """Returns whether a request asks for the tokens of its prompt.

    An option with an invalid value counts as absent.
    """
    alternatives = draft.options.get("prompt_logprobs")
    asks = type(alternatives) is int and alternatives >= 0
    return draft.options.get("echo") is True or asks


def index_of(draft: GenerateDraft) -> int:
    """Returns the index of a request's choice; 0 if the request has no `choice`."""
    body = draft.settings.get(choice.KEY)
    return int(body["index"]) if isinstance(body, Mapping) else 0


def is_durable(draft: Draft) -> bool:
    """Returns whether a stream is sent again after the loss of its connection or broker."""
    return isinstance(draft, Fetch) or draft.settings.get("durable") is not False


def deadline_of(draft: Draft) -> float | None:
    """Returns the user's deadline in seconds; None if it is absent or invalid."""
    if isinstance(draft, Fetch):
        return None
    deadline_ms = draft.settings.get("deadline_ms")
    return deadline_ms / 1000 if type(deadline_ms) is int and deadline_ms > 0 else None


# ---- calls ---------------------------------------------------------------------------------------


class Question(Struct, Generic[Answer], frozen=True):
    """A call: a message with one answer, its id, and the function that reads the answer."""

    id: bytes
    content: Content
    read: Callable[[Message], Answer]

    def answer(self, reply: Message | PoolError) -> Answer | PoolError:
        """Returns the answer in a reply, or the error for the caller to raise."""
        if isinstance(reply, PoolError):
            return reply
        try:
            return self.read(reply)
        except (PoolError, KeyError, TypeError, ValueError) as error:
            return Internal(f"the answer to {self.content.kind} cannot be read: {error!r}")


def list_models() -> Question[list[dict[str, Any]]]:
    """Returns the call for the list of models; each model is a map."""
    return Question(os.urandom(ID_BYTES), ListModels(), lambda a: ModelList.parse(a.body).models)


def describe(model: str) -> Question[dict[str, Any]]:
    """Returns the call for the map of one model, with the content of the model's files."""
    return Question(
        os.urandom(ID_BYTES), ListModels(model), lambda a: ModelList.parse(a.body).models[0]
    )


def keep(model: str, seconds: float) -> Question[float]:
    """Returns the call that keeps a model loaded. Its answer is the applied time in seconds.

    Raises BadRequest if the seconds are out of bounds.
    """
    if not is_number(seconds) or not -math.inf <= seconds <= MAX_KEEP_MS / 1000:
        raise BadRequest(
            f"seconds is {shown(seconds)}, must be at most {MAX_KEEP_MS // 1000}, or below 0: for"
            " ever"
        )
    keep_ms = KEEP_FOREVER if seconds < 0 else math.ceil(seconds * 1000)
    return Question(
        os.urandom(ID_BYTES),
        Keep(model, keep_ms),
        lambda answer: _seconds_kept(Kept.parse(answer.body)),
    )


def _seconds_kept(kept: Kept) -> float:
    return -1.0 if kept.keep_ms < 0 else kept.keep_ms / 1000


def tokenize(model: str, text: str) -> Question[list[int]]:
    """Returns the call for the token ids of a text. Raises BadRequest if it is not a str."""
    data = _utf8(text)
    if len(data) > TEXT_AS_BLOB:
        content = ModelCall(from_client.TOKENIZE, model, {"text": True}, (data,))
    else:
        content = ModelCall(from_client.TOKENIZE, model, {"text": text})
    return Question(
        os.urandom(ID_BYTES),
        content,
        lambda answer: unpack_ids(answer.blobs[0]) if answer.blobs else [],
    )


class ChatTokens(Struct, frozen=True):
    """The token ids of a chat that the model's template has formatted."""

    ids: list[int]  # the token ids of the prompt
    thinks: bool  # True if the prompt ends within thoughts, which the completion then continues


def tokenize_chat(
    model: str,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None = None,
    think: bool | str | None = None,
) -> Question[ChatTokens]:
    """Returns the call for the token ids of a chat. Raises BadRequest unless messages are maps."""
    prompt = ChatPrompt(_maps(messages), tools, think)
    return Question(
        os.urandom(ID_BYTES),
        ModelCall(from_client.TOKENIZE, model, prompt.body()),
        lambda answer: ChatTokens(
            unpack_ids(answer.blobs[0]) if answer.blobs else [], answer.body.get("thinks") is True
        ),
    )


def detokenize(model: str, ids: Sequence[int]) -> Question[str]:
    """Returns the call for the text of token ids. Raises BadRequest if an id is invalid."""
    content = ModelCall(from_client.DETOKENIZE, model, packed=(pack_ids(ids),))
    return Question(os.urandom(ID_BYTES), content, lambda answer: str(answer.body["text"]))


def token_texts(model: str, ids: Sequence[int]) -> Question[list[str]]:
    """Returns the call for the text of each token id. Raises BadRequest if an id is invalid."""
    content = ModelCall(from_client.DETOKENIZE, model, {"each": True}, (pack_ids(ids),))
    return Question(os.urandom(ID_BYTES), content, lambda answer: [*map(str, answer.body["each"])])


def cancel(request_id: bytes | None) -> Question[dict[str, Any]]:
    """Returns the call that cancels a request. Its answer is the request's state and sent ids.

    Raises BadRequest if the id is invalid.
    """
    if not isinstance(request_id, bytes) or len(request_id) != ID_BYTES:
        raise BadRequest(
            f"a request's id is {ID_BYTES} bytes, got {shown(request_id)};"
            " of hexadecimal digits make them with bytes.fromhex"
        )
    return Question(request_id, Cancel(), lambda answer: dict(answer.body))
