"""Puts the slot tokens of images into texts, and the inputs of images into token ids. Pure.

A text has one slot token for each image: a placeholder, which the tokenizer keeps as one id.
`with_images` replaces this id by the inputs of the image. A request has images only at the
positions that it names. A user may also write a slot token, or the marker of an image in chat
templates. In the content of a message these are plain text (see `literals`); in a prompt they are
an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.images import TAG, check_named, images_of_text
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.literals import check_literals, ends_of, parts_of
from mlxpool.worker.media.settings import ImagePlaces
from mlxpool.worker.media.spans import ImageKey, MediaSpan, slot_items


def expanded_chat(
    text: str, cuts: Sequence[int], end: int, places: ImagePlaces, count: int
) -> tuple[str, list[int], int]:
    """Replaces the image markers in a rendered chat by their expansions, which the model reads.

    Returns the text, its cuts and the new position of `end`. A marker that a cut divides is plain
    text and stays. Raises BadRequest unless the number of markers is `count`, the number of images.
    """
    parts = parts_of(text, cuts)
    markers = _markers(parts, places)
    if markers != count:
        why = "leave it out of texts" if markers > count else "the chat template leaves some out"
        raise BadRequest(
            f"the chat has {count} images, but its text has {markers} times {places.marker!r},"
            f" each stands for one image: {why}"
        )
    front = parts_of(text[:end], [cut for cut in cuts if cut < end])
    end += (len(places.expansion) - len(places.marker)) * _markers(front, places)
    parts = [part.replace(places.marker, places.expansion) for part in parts]
    return "".join(parts), ends_of(parts), end


def _markers(parts: Sequence[str], places: ImagePlaces) -> int:
    return sum(part.count(places.marker) for part in parts)


def expanded_text(text: str, places: ImagePlaces, count: int) -> tuple[str, list[int]]:
    """Replaces each [img-n] in a text by the text of an image; returns text and numbers n.

    The numbers are in the order of the text; the text of an image has its slot token. Raises
    BadRequest unless the text names each of `count` images and no other image. Also raises
    BadRequest if the text itself has a slot token or an image marker.
    """
    named = images_of_text(text)
    check_named(named, count)
    check_literals([text], places)
    return TAG.sub(lambda tag: places.whole, text), named


def check_slots(ids: Sequence[int], places: ImagePlaces, count: int) -> None:
    """Raises BadRequest unless there is one slot token for each of `count` images."""
    slots = sum(token == places.slot_id for token in ids)
    if slots != count:
        raise BadRequest(
            f"the prompt has {count} places for images and {slots} times {places.slot!r}, which"
            " stands for an image: leave it out of texts"
        )


class Inputs(Struct, frozen=True):
    """The inputs that a model reads for a prompt with images.

    `items`: the inputs. `media`: the ranges of inputs that belong to images.
    """

    items: tuple[int, ...]
    media: tuple[MediaSpan, ...]
    images: Mapping[ImageKey, PreparedImage]
    slots: tuple[int, ...]  # the indices of slot tokens among the ids

    def moved(self, place: int) -> int:
        """Converts `place`, an index among the token ids, to an index among the inputs."""
        before = [span for slot, span in zip(self.slots, self.media, strict=True) if slot < place]
        return place + sum(span.count - 1 for span in before)


def with_images(
    ids: Sequence[int], places: ImagePlaces, named: Sequence[int], images: Sequence[PreparedImage]
) -> Inputs:
    """Returns ids with slot tokens replaced by the inputs of images.

    `named`: the number of the image of each slot token, in order.
    """
    items: list[int] = []
    media: list[MediaSpan] = []
    slots = tuple(place for place, token in enumerate(ids) if token == places.slot_id)
    begin = 0
    for place, number in zip(slots, named, strict=True):
        image = images[number]
        items += ids[begin:place]
        media.append(
            MediaSpan(len(items), image.count, image.key, image.grid, places.group, places.crossed)
        )
        items += slot_items(image.key, image.count)
        begin = place + 1
    items += ids[begin:]
    used = {images[number].key: images[number] for number in named}
    return Inputs(tuple(items), tuple(media), used, slots)
