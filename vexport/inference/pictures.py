"""Pictures that are drawn from a seed, and questions with fixed choices about them."""

import base64
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 224
"""Width and height of a picture in pixels."""
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (214, 32, 32),
    "green": (24, 150, 60),
    "blue": (36, 72, 214),
    "yellow": (242, 204, 24),
    "black": (20, 20, 20),
    "purple": (140, 40, 170),
}
_GREY = (70, 70, 70)
_MOST_SHAPES = 4
# Cells in each direction of the grid on which shapes are placed, so that they never overlap.
_CELLS = 3
# Corners of the strokes of digits, in units of half the digit's height: (column, row).
_CORNERS = ((0, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 1))
# The segments of a seven-segment display, as pairs of corners.
_SEGMENTS: Mapping[str, tuple[int, int]] = {
    "a": (0, 1),
    "b": (1, 2),
    "c": (2, 3),
    "d": (3, 4),
    "e": (4, 5),
    "f": (5, 0),
    "g": (5, 2),
}
# Segments of each digit.
_DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A question about a picture, and its choices. `draw` draws a picture for a choice's index."""

    name: str
    question: str
    choices: Sequence[str]
    draw: Callable[[ImageDraw.ImageDraw, int, random.Random], None]

    @property
    def prompt(self) -> str:
        """Return the question with its choices."""
        *others, last = self.choices
        return f"{self.question} Answer with one word: {', '.join(others)} or {last}."


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureQuestion:
    """A picture, the question about it, and the index of the right choice."""

    topic: Topic
    picture: Image.Image
    answer: int


def picture_questions(count: int, seed: int | str) -> Iterator[PictureQuestion]:
    """Yield questions of all topics in turn. Each choice is right equally often.

    The same arguments give the same pictures, and a larger `count` only adds pictures.
    """
    chooser = random.Random(f"vexport-sight {seed}")
    decks: dict[str, list[int]] = {topic.name: [] for topic in TOPICS}
    for number in range(count):
        topic = TOPICS[number % len(TOPICS)]
        deck = decks[topic.name]
        if not deck:
            deck.extend(chooser.sample(range(len(topic.choices)), len(topic.choices)))
        answer = deck.pop()
        yield PictureQuestion(topic=topic, picture=_drawn(topic, answer, chooser), answer=answer)


def data_address(picture: Image.Image) -> str:
    """Return a picture as an address with its data, in PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _drawn(topic: Topic, answer: int, chooser: random.Random) -> Image.Image:
    ground = chooser.randrange(225, 256)
    picture = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    topic.draw(ImageDraw.Draw(picture), answer, chooser)
    return picture


def _draw_colour(pen: ImageDraw.ImageDraw, answer: int, chooser: random.Random) -> None:
    _draw_shapes(pen, [chooser.randrange(_CELLS**2)], [*COLOURS.values()][answer], chooser)


def _draw_count(pen: ImageDraw.ImageDraw, answer: int, chooser: random.Random) -> None:
    cells = chooser.sample(range(_CELLS**2), answer + 1)
    _draw_shapes(pen, cells, chooser.choice([*COLOURS.values()]), chooser)


def _draw_side(pen: ImageDraw.ImageDraw, answer: int, chooser: random.Random) -> None:
    column = (0, _CELLS - 1)[answer]
    cell = chooser.randrange(_CELLS) * _CELLS + column
    _draw_shapes(pen, [cell], chooser.choice([*COLOURS.values()]), chooser)


def _draw_shapes(
    pen: ImageDraw.ImageDraw, cells: Sequence[int], colour: Colour, chooser: random.Random
) -> None:
    """Draw a disc, a square or a triangle into each cell of the grid."""
    width = SIDE / _CELLS
    for cell in cells:
        radius = chooser.uniform(0.3, 0.4) * width
        slack = width / 2 - radius
        x = (cell % _CELLS + 0.5) * width + chooser.uniform(-slack, slack)
        y = (cell // _CELLS + 0.5) * width + chooser.uniform(-slack, slack)
        box = (x - radius, y - radius, x + radius, y + radius)
        kind = chooser.randrange(3)
        if kind == 0:
            pen.ellipse(box, fill=colour)
        elif kind == 1:
            pen.rectangle(box, fill=colour)
        else:
            top, right, left = (x, y - radius), (x + radius, y + radius), (x - radius, y + radius)
            pen.polygon((top, right, left), fill=colour)


def _draw_digit(pen: ImageDraw.ImageDraw, answer: int, chooser: random.Random) -> None:
    """Draw a digit like a seven-segment display."""
    half = chooser.uniform(0.28, 0.34) * SIDE
    x = (SIDE - half) / 2 + chooser.uniform(-0.12, 0.12) * SIDE
    y = SIDE / 2 - half + chooser.uniform(-0.08, 0.08) * SIDE
    colour = chooser.choice([_GREY, *COLOURS.values()])
    width = SIDE // 14
    for segment in _DIGITS[answer]:
        ends = [_CORNERS[corner] for corner in _SEGMENTS[segment]]
        points = [(x + column * half, y + row * half) for column, row in ends]
        pen.line(points, fill=colour, width=width)
        for left, top in points:
            box = (left - width / 2, top - width / 2, left + width / 2, top + width / 2)
            pen.ellipse(box, fill=colour)


TOPICS = (
    Topic(
        name="colour",
        question="What colour is the shape?",
        choices=tuple(COLOURS),
        draw=_draw_colour,
    ),
    Topic(
        name="count",
        question="How many shapes are in the picture?",
        choices=tuple(str(number + 1) for number in range(_MOST_SHAPES)),
        draw=_draw_count,
    ),
    Topic(
        name="digit",
        question="Which digit is in the picture?",
        choices=tuple(map(str, range(len(_DIGITS)))),
        draw=_draw_digit,
    ),
    Topic(
        name="side",
        question="Is the shape on the left or on the right?",
        choices=("left", "right"),
        draw=_draw_side,
    ),
)
