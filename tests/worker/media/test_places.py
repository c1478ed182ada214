"""Tests the positions of images in texts and among token ids."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.media import places
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.settings import ImageInput, ImagePlaces, ImageSettings
from mlxpool.worker.media.spans import slot_items

PLACES = ImagePlaces("<img>", "\n<img><slot></img>\n", "\n<img><slot></img>\n", "<slot>", 9, True)
A, B = (
    PreparedImage.of(np.full((2, 2, 3), value, np.uint8), (1, 2, 2), count, b"")
    for value, count in ((1, 4), (2, 2))
)


def test_markers_of_a_chat_are_expanded() -> None:
    text, cuts, end = places.expanded_chat("a<img>b<img>c", (), 6, PLACES, 2)
    assert text == "a\n<img><slot></img>\nb\n<img><slot></img>\nc"
    assert cuts == [] and text[:end] == "a\n<img><slot></img>\n"


def test_a_marker_with_a_cut_is_text() -> None:
    text, cuts, end = places.expanded_chat("<img>a<img>b", (1,), 11, PLACES, 1)
    assert text == "<img>a\n<img><slot></img>\nb"
    assert cuts == [1] and text[end:] == "b"
    text, cuts, end = places.expanded_chat("<img>a<img>b", (7,), 5, PLACES, 1)
    assert text == "\n<img><slot></img>\na<img>b"
    assert text[: cuts[0]].endswith("a<") and text[end:] == "a<img>b"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a<img>b<img>c<img>", "has 2 images, but its text has 3 times '<img>', each stands for"),
        ("a<img>", "has 2 images, but its text has 1 times '<img>'.*template leaves some out"),
    ],
)
def test_another_number_of_markers_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        places.expanded_chat(text, (), 0, PLACES, 2)


def test_tags_of_a_text_are_expanded() -> None:
    text, named = places.expanded_text("[img-1] and [img-0], [img-1]", PLACES, 2)
    image_text = "\n<img><slot></img>\n"
    assert (text, named) == (f"{image_text} and {image_text}, {image_text}", [1, 0, 1])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[img-0] <img>", "has the text '<img>', which this model reads as the place of an image"),
        ("[img-0] <slot>", "has the text '<slot>'"),
        ("[img-0] [img-1]", "invalid image index: 1"),
        ("no name", r"images\[0\] is named nowhere"),
    ],
)
def test_a_text_names_each_image_by_its_tag_alone(text: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        places.expanded_text(text, PLACES, 1)


def test_a_slot_token_in_a_text_is_refused() -> None:
    places.check_slots([1, 9, 2], PLACES, 1)
    with pytest.raises(BadRequest, match="1 places for images and 2 times '<slot>'"):
        places.check_slots([1, 9, 9], PLACES, 1)


def test_images_stand_in_place_of_slots() -> None:
    inputs = places.with_images([1, 9, 2, 9, 3, 9], PLACES, [1, 0, 1], [A, B])
    a, b = slot_items(A.key, 4), slot_items(B.key, 2)
    assert inputs.items == (1, *b, 2, *a, 3, *b)
    assert [(span.start, span.count, span.image) for span in inputs.media] == [
        (1, 2, B.key),
        (4, 4, A.key),
        (9, 2, B.key),
    ]
    assert inputs.images == {A.key: A, B.key: B}
    assert [inputs.moved(place) for place in (0, 1, 2, 3, 4, 6)] == [0, 1, 3, 4, 8, 11]


def test_settings_survive_the_way_to_another_process() -> None:
    settings = ImageSettings(4, 2, 2, 0.1, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), 8, 8)
    given = ImageInput(settings, PLACES)
    fields = given.as_map()
    fields["settings"] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in fields["settings"].items()
    }
    assert ImageInput.from_map(fields) == given
