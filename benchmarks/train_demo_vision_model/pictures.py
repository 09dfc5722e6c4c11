"""Pictures of coloured shapes, and questions about them with their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

COLOURS = {"red": "#d02020", "green": "#20a030", "blue": "#2040d0", "yellow": "#f0d010", "black": "#101010"}
FORMS = ("circle", "square", "triangle")
PLACES = ("on the left", "in the middle", "on the right")
NUMBERS = ("zero", "one", "two", "three")


@dataclass(frozen=True, slots=True)
class Shape:
    """`place` is an index into PLACES; `size` and `height` are parts of the picture's side, `height` of its middle."""

    colour: str
    form: str
    place: int
    size: float = 0.26
    height: float = 0.5

    def __str__(self) -> str:
        return f"a {self.colour} {self.form}"


def draw(shapes: Sequence[Shape], side: int = 240) -> Image.Image:
    """A white square of `side` pixels with these shapes on it."""
    picture = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        x, y, half = (shape.place * 2 + 1) / 6 * side, shape.height * side, shape.size / 2 * side
        box, fill = (x - half, y - half, x + half, y + half), COLOURS[shape.colour]
        if shape.form == "circle":
            pen.ellipse(box, fill)
        elif shape.form == "square":
            pen.rectangle(box, fill)
        else:
            pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill)
    return picture


def random_shapes(random: Random) -> list[Shape]:
    """One to three shapes, from left to right."""
    places = sorted(random.sample(range(len(PLACES)), random.randint(1, len(PLACES))))
    return [
        Shape(
            random.choice(list(COLOURS)),
            random.choice(FORMS),
            place,
            random.uniform(0.24, 0.3),
            random.uniform(0.3, 0.7),
        )
        for place in places
    ]


def questions(shapes: Sequence[Shape], random: Random) -> list[tuple[str, str]]:
    """Questions about a picture of these shapes with their answers, in a random order."""
    names = [str(shape) for shape in shapes]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    found = [
        ("What is in the picture?", f"{listed.capitalize()}."),
        ("How many shapes are there?", f"{NUMBERS[len(shapes)].capitalize()}."),
    ]
    colour = random.choice(list(COLOURS))
    found.append((f"Is anything {colour}?", "Yes." if any(shape.colour == colour for shape in shapes) else "No."))
    place = random.randrange(len(PLACES))
    there = next((str(shape) for shape in shapes if shape.place == place), "nothing")
    found.append((f"What is {PLACES[place]}?", f"{there.capitalize()}."))
    random.shuffle(found)
    return found
