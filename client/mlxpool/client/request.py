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

Image = bytes | bytearray | memoryview | os.PathLike[str]  # the content of a file, or its path
FIRST_ONLY = frozenset({"queue_ms", "first_token_ms"})  # bounds that hold for the first sending

Answer = TypeVar("Answer")


# ---- generate ------------------------------------------------------------------------------------


def read_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """Returns the bytes of images. Raises BadRequest, and TooLarge naming the image's index."""
    if isinstance(images, bytes | bytearray | memoryview | str | os.PathLike):
        raise BadRequest(f"images must be a list of images, got {type(images).__name__}")
    check_count(len(images))
    found = tuple(_read(f"images[{index}]", image) for index, image in enumerate(images))
    check_sizes(found)
    return found


def take_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Image]
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Returns messages whose parts name images by index, and all images: the given ones first.

    A part {type: "image", image: …} gives its image away. Raises BadRequest for images of a message
    that stand outside its parts, where nobody would read them.
    """
    every, changed = [*images], []
    for number, message in enumerate(messages):
        if message.get("images"):
            raise BadRequest(
                f"messages[{number}].images is not supported: give each image as a part"
                " {type: 'image', image: …} of the content"
            )
        content = message.get("content")
        if isinstance(content, list | tuple):
            changed.append({**message, "content": [_named(part, every) for part in content]})
        else:
            changed.append(dict(message))
    return changed, every


def _named(part: Any, images: list[Image]) -> Any:
    """A part as it is sent; the image of an image part is appended to `images`."""
    if not isinstance(part, Mapping) or part.get("type") != "image" or "image" not in part:
        return part
    images.append(part["image"])
    rest = {key: value for key, value in part.items() if key != "image"}
    return {**rest, "blob": len(images) - 1}


def _read(where: str, image: object) -> bytes:
    """The bytes of one image; of a file at most so many that it is seen to be too large."""
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
    """The `generate` of a call; divides keys of the request from sampling options.

    Raises BadRequest unless exactly one of prompt, messages and tokens is given, and for a prompt
    or an image that cannot be sent. The broker checks everything else.
    """
    sampling, others = divide_options(options)
    settings = {"batch": True, **others}  # one frame a step for all streams of the client
    return GenerateDraft(model, _prompt(prompt, messages, tokens, images), sampling, settings)


def divide_options(
    options: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, object]]:
    """The sampling options among keyword arguments, and the keys of the request."""
    given = {key: value for key, value in options.items() if value is not None}
    settings = {key: value for key, value in given.items() if key in REQUEST_KEYS}
    sampling = {key: value for key, value in given.items() if key not in REQUEST_KEYS}
    biases = sampling.get("logit_bias")
    if isinstance(biases, Mapping):  # a map's keys are text on the wire
        sampling["logit_bias"] = {_digits(token): bias for token, bias in biases.items()}
    return sampling, settings


def _digits(token: object) -> str:
    """A key of logit_bias as text. Raises BadRequest for what has none."""
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
    given = [value for value in (prompt, messages, tokens) if value is not None]
    if len(given) != 1:
        raise BadRequest(f"give one of prompt, messages, tokens; got {len(given)}")
    if messages is not None:
        changed, every = take_images(_maps(messages), images)
        return ChatPrompt(changed, images=read_images(every))
    files = read_images(images)
    if tokens is not None:
        if files:
            raise BadRequest("images go with prompt or messages, got tokens")
        ids = pack_ids(tokens)
        if not ids:
            raise BadRequest("tokens has no id; a prompt is 1 or more")
        return PackedPrompt("tokens", ids)
    data = _utf8(prompt)
    if len(data) > TEXT_AS_BLOB:
        return PackedPrompt("prompt", data, files)
    return TextPrompt(str(prompt), files)


def _maps(messages: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    found = list(messages) if isinstance(messages, Iterable) else [messages]
    if not all(isinstance(one, Mapping) for one in found):
        raise BadRequest(f"messages must be a list of maps, got {shown(messages)}")
    return [dict(one) for one in found]


def _utf8(text: object) -> bytes:
    """The bytes of a text. Raises BadRequest for another type."""
    if not isinstance(text, str):
        raise BadRequest(f"a text must be a str, got {shown(text)}")
    if fault := not_unicode(text, "prompt"):
        raise BadRequest(f"cannot be sent: {fault}")
    return text.encode()


Draft = GenerateDraft | Fetch  # what begins a stream


def sent_again(draft: Draft, state: StreamState, left: float | None) -> Draft:
    """What goes on with a stream from where it is; see `resumed`."""
    if isinstance(draft, GenerateDraft):
        return resumed(draft, state, left)
    if not state.ids:
        return draft
    return replace(draft, start=state.position, gen=state.gen)


def resumed(draft: GenerateDraft, state: StreamState, left: float | None) -> GenerateDraft:
    """The same request from the ids received so far; `left`: seconds to the user's deadline.

    A request that was never accepted has no seed to go on with: it is sent as it was. Raises
    TooLarge for more ids than a message holds.
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
    """Whether the tokens of the prompt are reported; of options that the broker refuses: as is."""
    wanted = draft.options.get("prompt_logprobs")
    return draft.options.get("echo") is True or (type(wanted) is int and wanted >= 0)


def index_of(draft: GenerateDraft) -> int:
    """The number of the choice that it asks for."""
    given = draft.settings.get(choice.KEY)
    return int(given["index"]) if isinstance(given, Mapping) else 0


def is_durable(draft: Draft) -> bool:
    """Whether it is sent again after a loss."""
    return isinstance(draft, Fetch) or draft.settings.get("durable") is not False


def deadline_of(draft: Draft) -> float | None:
    """Seconds of the user's deadline; None without one, or for one that the broker refuses."""
    if isinstance(draft, Fetch):
        return None
    given = draft.settings.get("deadline_ms")
    return given / 1000 if type(given) is int and given > 0 else None


# ---- calls ---------------------------------------------------------------------------------------


class Question(Struct, Generic[Answer], frozen=True):
    """A message with one answer, the id under which it is sent, and how to read the answer."""

    id: bytes
    content: Content
    read: Callable[[Message], Answer]

    def answer(self, reply: Message | PoolError) -> Answer | PoolError:
        """The answer in a reply, or the error that the caller has to raise."""
        if isinstance(reply, PoolError):
            return reply
        try:
            return self.read(reply)
        except (PoolError, KeyError, TypeError, ValueError) as error:
            return Internal(f"the answer to {self.content.kind} cannot be read: {error!r}")


def list_models() -> Question[list[dict[str, Any]]]:
    """Ask for the models, a map each."""
    return Question(os.urandom(ID_BYTES), ListModels(), lambda a: ModelList.parse(a.body).models)


def describe(model: str) -> Question[dict[str, Any]]:
    """Ask for all that is known of one model."""
    return Question(
        os.urandom(ID_BYTES), ListModels(model), lambda a: ModelList.parse(a.body).models[0]
    )


def keep(model: str, seconds: float) -> Question[float]:
    """Ask to keep a model loaded; the answer is the seconds that hold. Raises BadRequest."""
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
    """Ask for the ids of a text. Raises BadRequest for a value that is no str."""
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
    """A chat in token ids, as the model's template renders it."""

    ids: list[int]
    thinks: bool  # the prompt ends inside the thoughts: the completion begins with them


def tokenize_chat(
    model: str,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None = None,
    think: bool | str | None = None,
) -> Question[ChatTokens]:
    """Ask for the ids of a chat. Raises BadRequest for messages that are no maps."""
    prompt = ChatPrompt(_maps(messages), tools, think)
    return Question(
        os.urandom(ID_BYTES),
        ModelCall(from_client.TOKENIZE, model, prompt.body()),
        lambda answer: ChatTokens(
            unpack_ids(answer.blobs[0]) if answer.blobs else [], answer.body.get("thinks") is True
        ),
    )


def detokenize(model: str, ids: Sequence[int]) -> Question[str]:
    """Ask for the text of ids. Raises BadRequest for an invalid token id."""
    content = ModelCall(from_client.DETOKENIZE, model, packed=(pack_ids(ids),))
    return Question(os.urandom(ID_BYTES), content, lambda answer: str(answer.body["text"]))


def token_texts(model: str, ids: Sequence[int]) -> Question[list[str]]:
    """Ask for the text of each id. Raises BadRequest for an invalid token id."""
    content = ModelCall(from_client.DETOKENIZE, model, {"each": True}, (pack_ids(ids),))
    return Question(os.urandom(ID_BYTES), content, lambda answer: [*map(str, answer.body["each"])])


def cancel(request_id: bytes | None) -> Question[dict[str, Any]]:
    """Cancel a request and ask for its fate. Raises BadRequest for an invalid id."""
    if not isinstance(request_id, bytes) or len(request_id) != ID_BYTES:
        raise BadRequest(
            f"a request's id is {ID_BYTES} bytes, got {shown(request_id)};"
            " of hexadecimal digits make them with bytes.fromhex"
        )
    return Question(request_id, Cancel(), lambda answer: dict(answer.body))
