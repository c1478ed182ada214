"""The jobs of a lane process and the jobs' results, and their transport as msgpack maps.

Unpacking a message runs no code of the sender: chat templates are untrusted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgpack
import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict

from mlxpool.common.errors import BadRequest, Internal, PoolError, TooLarge, from_body
from mlxpool.common.protocol.frames import MAX_BLOB, MAX_BODY
from mlxpool.common.protocol.images import images_of_messages
from mlxpool.common.protocol.token_ids import ID_WIDTH, pack_ids, unpack_ids
from mlxpool.worker.decisions.prompts import AskQuestions, prompts_of
from mlxpool.worker.encoders.inputs import EncodeInputs, EncoderInput
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.literals import (
    check_literals,
    cuts_of,
    literals_of,
    parts_of,
    seamed,
)
from mlxpool.worker.media.places import check_slots, expanded_chat, expanded_text
from mlxpool.worker.preparation.limits import SHORT_TEXT
from mlxpool.worker.prompt.begun_answer import begun, marked
from mlxpool.worker.prompt.size_bound import check_bytes, check_ids, check_tokens
from mlxpool.worker.prompt.text_model import RenderedChat, TextModel

MAX_ANSWER_TEXT = MAX_BODY - 1024  # the most bytes of text in an answer
MSGPACK_HEAD = 5  # the most bytes that msgpack adds before a text
BIG_INT = 1  # the msgpack extension type of an integer beyond 64 bits, which JSON may have
READ_BYTES = 2**20  # bytes of one system call
NO_IMAGES = "this model does not support image input: it takes text only"


class Render(Struct, frozen=True):
    """A job: renders a chat, and encodes the text unless it is long.

    `now`: seconds since 1970. `context`: the most tokens of the prompt, see Encode. `images`: the
    files of the images in the messages. `continues`: the answer continues the last message.
    `plain`: control tokens in message contents are plain text.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    think: bool | str | None
    now: float
    context: int
    images: Sequence[bytes] = ()
    continues: bool = False
    plain: bool = False


class Encode(Struct, frozen=True):
    """A job: encodes a text (str or UTF-8) to token ids.

    `context`: the most tokens; 0: as many as an answer to `tokenize` may have. `chat`: the text is
    a rendered chat, so no token is put before it. `messages_end`: the number of its characters
    before the generation prompt; 0: unknown. `thinks`: the text ends inside the model's thoughts.
    `cuts`: the positions at which the text is divided before it is tokenized. `images`: files that
    the text names by [img-n]. `named`: if not empty, the indices in `images` of the images that a
    chat template's markers stand for, in order. `suffix`: the text after the gap to fill; "": no
    gap.
    """

    text: str | bytes
    context: int = 0
    messages_end: int = 0
    thinks: bool = False
    images: Sequence[bytes] = ()
    named: Sequence[int] = ()
    cuts: Sequence[int] = ()
    chat: bool = False
    suffix: str = ""


class Decode(Struct, frozen=True):
    """A job: decodes packed ids, all below `vocab_size`. `each`: also decodes each id alone."""

    packed: bytes
    vocab_size: int
    each: bool = False


class CheckFormat(Struct, frozen=True):
    """A job: checks that the format of an answer can be compiled."""

    format: Mapping[str, Any]


class Checked(Struct, frozen=True):
    """The result of CheckFormat: the format can be compiled."""


class EncodedInputs(Struct, frozen=True):
    """Inputs of an encoder model: the packed ids of all inputs, concatenated, and their lengths.

    `types`: the segment (token type) of each id, one byte for each; empty: all segments are 0.
    """

    packed: bytes
    lengths: Sequence[int]
    types: bytes = b""


class QuestionPrompts(Struct, frozen=True):
    """The prompts of several questions: packed ids of their shared beginning, and of each tail.

    `answers`: for each question and each of its labels, the token sequences that stand for the
    label.
    """

    shared: bytes
    tails: Sequence[bytes]
    answers: Sequence[Sequence[Sequence[Sequence[int]]]]


class Encoded(Struct, frozen=True):
    """The packed ids of a prompt.

    `restore_at`: the number of ids before the generation prompt, where a later conversation may
    branch off; 0: unknown. `thinks`: the prompt ends inside the model's thoughts. `images`: the
    different images of the request, see `image_fields`. `named`: for each placeholder token of an
    image among the ids, in order, the index of its image in `images`.
    """

    packed: bytes
    restore_at: int = 0
    thinks: bool = False
    images: Sequence[ImageFields] = field(default_factory=list)
    named: Sequence[int] = field(default_factory=list)


class Decoded(Struct, frozen=True):
    """The text of decoded ids. `each`: the text that each id adds, if the job has `each`."""

    text: str
    each: Sequence[str] | None = None


ImageFields = Sequence[Any]  # key, bytes of pixels, height, width, grid and count of an image
Job = Render | Encode | Decode | EncodeInputs | CheckFormat | AskQuestions
Result = Encoded | RenderedChat | Decoded | EncodedInputs | Checked | QuestionPrompts | PoolError


def reads_images(job: Job) -> bool:
    """Returns whether the job decodes images, which takes far longer than texts."""
    return isinstance(job, Render | Encode) and bool(job.images)


_KINDS = (
    Render,
    Encode,
    Decode,
    EncodeInputs,
    CheckFormat,
    AskQuestions,
    Encoded,
    RenderedChat,
    Decoded,
    EncodedInputs,
    Checked,
    QuestionPrompts,
)
_BY_NAME: Mapping[str, type[Any]] = {kind.__name__: kind for kind in _KINDS}


@runtime_checkable
class EncoderFunctions(Protocol):
    """The tokenizer of an encoder model. Calls may take any time and memory."""

    def encode_inputs(self, job: EncodeInputs) -> Sequence[EncoderInput]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


GENERATES = (
    "this model generates text: it answers `generate` and `decide`, not embed, rerank or classify"
)
ENCODES = "this model does not generate text: it answers embed, rerank or classify"

# ---- performing a job --------------------------------------------------------------------------


def perform(text: TextModel | EncoderFunctions, job: Job) -> Result:
    """Returns the result of a job, or its error, which concerns only the job's request.

    A RenderedChat is returned for a long text, which a separate job encodes.
    """
    try:
        if isinstance(job, Decode):
            return _decode(text, job)
        if isinstance(text, EncoderFunctions):
            return _for_encoder(text, job)
        if isinstance(job, EncodeInputs):
            raise BadRequest(GENERATES)
        if isinstance(job, CheckFormat):
            return _check_format(job)
        if isinstance(job, AskQuestions):
            return _ask(text, job)
        return _render(text, job) if isinstance(job, Render) else _encode(text, job)
    except PoolError as error:
        return error
    except Exception as error:
        return Internal(f"the prompt could not be read: {error!r}")


def _render(text: TextModel, job: Render) -> RenderedChat | Encoded:
    chat = _rendered(text, job)
    if len(chat.text) > MAX_BLOB:
        raise BadRequest(f"the chat has {len(chat.text)} characters, at most {MAX_BLOB} are taken")
    if len(chat.text) > SHORT_TEXT:
        return chat
    return _encode(text, encode_of(job, chat))


def _rendered(text: TextModel, job: Render) -> RenderedChat:
    """Returns the rendered chat, with cuts that divide the image markers in messages.

    With `plain`, cuts also divide control tokens. A divided marker or token is plain text.
    """
    messages, mark = marked(job.messages) if job.continues else (job.messages, "")
    markers = () if text.images is None else literals_of(text.images.places)
    special, named = text.controls if job.plain else ((), ())
    messages, seam = seamed(messages, (*markers, *special), named)
    chat = text.render(messages, job.tools, job.now, job.think, continues=job.continues)
    if mark:
        chat = begun(chat, mark, job.messages[-1])
    whole, cuts = cuts_of(chat.text, seam)
    end = chat.messages_end - (chat.text.count(seam, 0, chat.messages_end) if seam else 0)
    return RenderedChat(whole, end, chat.thinks, cuts)


def encode_of(job: Render, chat: RenderedChat) -> Encode:
    """Returns the job that encodes a chat after `job` has rendered it."""
    named = images_of_messages(job.messages) if job.images else ()
    end, cuts = chat.messages_end, chat.cuts
    return Encode(chat.text, job.context, end, chat.thinks, job.images, named, cuts, chat=True)


def _encode(text: TextModel, job: Encode) -> Encoded:
    words = _words(job)
    if job.context:
        check_bytes(len(words) + len(job.suffix), text.max_bytes_per_token, job.context)
    if job.images:
        return _encode_with_images(text, job, words)
    if text.images is not None and job.context:
        check_literals(parts_of(words, job.cuts), text.images.places)
    if job.suffix:
        ids = text.infill(words, job.suffix)
    else:
        ids = text.encode(words, job.cuts, begins=not job.chat)
    if job.context:
        check_tokens(len(ids), job.context)
    else:
        _check_answer(ids)
    restore_at = text.restore_at(words, job.messages_end, ids) if job.messages_end else 0
    return Encoded(pack_ids(ids), restore_at, job.thinks)


def _encode_with_images(text: TextModel, job: Encode, words: str) -> Encoded:
    if text.images is None:
        raise BadRequest(NO_IMAGES)
    places, named, cuts, end = text.images.places, job.named, job.cuts, job.messages_end
    if named:
        words, cuts, end = expanded_chat(words, cuts, end, places, len(named))
    else:
        words, named = expanded_text(words, places, len(job.images))
    ids = text.encode(words, cuts, begins=not job.chat)
    check_slots(ids, places, len(named))
    images = {}  # by file content: equal files are read once
    for index, data in enumerate(job.images):
        if data not in images:
            images[data] = text.read_image(data, index)
    places_of = {data: place for place, data in enumerate(images)}
    named = [places_of[job.images[place]] for place in named]
    read = [*images.values()]
    check_tokens(len(ids) + sum(read[place].count - 1 for place in named), job.context)
    restore_at = text.restore_at(words, end, ids) if end else 0
    return Encoded(pack_ids(ids), restore_at, job.thinks, [*map(image_fields, read)], named)


def image_fields(image: PreparedImage) -> ImageFields:
    """Returns an image as plain values; `image_of` makes the image from them again."""
    high, wide, _ = image.pixels.shape
    return [image.key, image.pixels.tobytes(), high, wide, list(image.grid), image.count]


def image_of(fields: ImageFields) -> PreparedImage:
    """Returns the image from `fields`; the inverse of `image_fields`."""
    key, data, high, wide, (times, rows, columns), count = fields
    pixels = np.frombuffer(data, np.uint8).reshape(high, wide, 3)
    return PreparedImage(key, pixels, (times, rows, columns), count)


def _check_format(job: CheckFormat) -> Checked:
    from mlxpool.worker.constraints.grammar import check  # few requests have a format

    check(job.format)
    return Checked()


def _ask(text: TextModel, job: AskQuestions) -> QuestionPrompts:
    prompts = prompts_of(text, job)
    return QuestionPrompts(
        pack_ids(prompts.shared),
        [pack_ids(tail) for tail in prompts.tails],
        [answer.paths for answer in prompts.answers],
    )


def _words(job: Encode) -> str:
    try:
        return job.text if isinstance(job.text, str) else job.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt is not UTF-8: {error}") from None


def _for_encoder(text: EncoderFunctions, job: Job) -> EncodedInputs | Encoded:
    if isinstance(job, EncodeInputs):
        return _pack_inputs(text.encode_inputs(job))
    if isinstance(job, Encode):
        ids = text.encode(_words(job))
        _check_answer(ids)
        return Encoded(pack_ids(ids))
    raise BadRequest(ENCODES)


def _pack_inputs(inputs: Sequence[EncoderInput]) -> EncodedInputs:
    typed = any(encoded.types for encoded in inputs)
    return EncodedInputs(
        b"".join(pack_ids(encoded.ids) for encoded in inputs),
        [len(encoded.ids) for encoded in inputs],
        b"".join(bytes(encoded.types or len(encoded.ids)) for encoded in inputs) if typed else b"",
    )


def _check_answer(ids: Sequence[int]) -> None:
    """Raises TooLarge for more ids than fit into an answer to `tokenize`."""
    if ID_WIDTH * len(ids) > MAX_BLOB:
        raise TooLarge(f"tokenize: {len(ids)} ids do not fit an answer of {MAX_BLOB} bytes")


def _decode(text: TextModel | EncoderFunctions, job: Decode) -> Decoded:
    ids = unpack_ids(job.packed)
    check_ids(ids, job.vocab_size, "detokenize")
    decoded = text.decode(ids)
    each = [_text_of(text, id) for id in ids] if job.each else None
    size = _utf8_size(decoded)
    if each is not None:
        size += sum(MSGPACK_HEAD + _utf8_size(id) for id in each)
    if size > MAX_ANSWER_TEXT:
        raise TooLarge(f"detokenize: the text has {size} bytes, an answer holds {MAX_ANSWER_TEXT}")
    return Decoded(decoded, each)


def _text_of(text: TextModel | EncoderFunctions, token: int) -> str:
    """Returns the text that a token adds inside of a text; partial characters are U+FFFD."""
    if isinstance(text, EncoderFunctions):
        return text.decode([token])
    return text.piece(token).decode("utf-8", "replace")


def _utf8_size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


# ---- messages ----------------------------------------------------------------------------------


def pack(message: Job | Result) -> bytes:
    """Packs one message. Lone surrogates and integers of any size survive the transport."""
    if isinstance(message, PoolError):
        fields: Mapping[str, Any] = {"error": message.body()}
    else:
        fields = {"kind": type(message).__name__, **asdict(message)}
    return pack_map(fields)


def unpack(fields: dict[str, Any]) -> Any:
    """Returns the job or result in a received message."""
    if "error" in fields:
        return from_body(fields["error"])
    return _BY_NAME[fields.pop("kind")](**fields)


def pack_map(fields: Mapping[str, Any]) -> bytes:
    """Packs one map. Raises BadRequest for a chat that is nested too deep."""
    try:
        data: bytes = msgpack.packb(fields, default=_pack_big_int, unicode_errors="surrogatepass")
    except (RecursionError, ValueError) as error:
        raise BadRequest(f"the chat cannot be prepared: {error}") from None
    return data


class Unpacker:
    """Unpacks the maps in a stream of bytes, which `pack_map` has packed."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(
            ext_hook=_unpack_big_int, unicode_errors="surrogatepass", max_buffer_size=2**31 - 1
        )

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._unpacker.feed(data)
        yield from self._unpacker


def receive(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yields the maps as they arrive, until the peer closes the connection."""
    unpacker = Unpacker()
    while data := connection.recv(READ_BYTES):
        yield from unpacker.feed(data)


def _pack_big_int(value: object) -> msgpack.ExtType:
    if not isinstance(value, int):
        raise TypeError(f"a chat cannot hold {type(value).__name__}")
    return msgpack.ExtType(BIG_INT, str(value).encode())


def _unpack_big_int(code: int, data: bytes) -> int:
    return int(data)
