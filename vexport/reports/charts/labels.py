"""Where the names of points stand: on none of the points, and not on each other, where there is room."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Anchor = Literal["start", "middle", "end"]
Box = tuple[float, float, float, float]
# Pixels: a chart is as wide as the page, 200 high (style.css); of its letters, and of a point.
_WIDTH, _HEIGHT = 600.0, 200.0
_LETTER, _ABOVE_LINE, _BELOW_LINE, _RADIUS = 7.0, 10.0, 3.0, 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a name stands relative to its point, in pixels, as SVG's text says it."""

    anchor: Anchor = "middle"
    dx: int = 0
    dy: int = -11


_PLACES = (
    Place(),
    Place(anchor="end", dx=-11, dy=4),
    Place(anchor="start", dx=11, dy=4),
    Place(dy=20),
    Place(anchor="end", dx=-4, dy=-11),
    Place(anchor="start", dx=4, dy=-11),
)


def label_places(points: Sequence[tuple[float, float]], names: Sequence[str]) -> tuple[Place, ...]:
    """A place for the name of each point, which is given in per cent from the left and the top."""
    centers = [(x * _WIDTH / 100, y * _HEIGHT / 100) for x, y in points]
    taken = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in centers]
    found: list[Place] = []
    for number, (center, name) in enumerate(zip(centers, names, strict=True)):
        others = [box for index, box in enumerate(taken) if index != number]
        place = next(_free(center, name, others), _PLACES[0])
        taken.append(_box(center, name, place))
        found.append(place)
    return tuple(found)


def _free(center: tuple[float, float], name: str, others: Sequence[Box]) -> Iterator[Place]:
    for place in _PLACES:
        left, top, right, bottom = box = _box(center, name, place)
        inside = left >= 0 and right <= _WIDTH and top >= -_ABOVE_LINE and bottom <= _HEIGHT
        if inside and not any(_overlap(box, other) for other in others):
            yield place


def _box(center: tuple[float, float], name: str, place: Place) -> Box:
    width = _LETTER * len(name)
    x = center[0] + place.dx - {"start": 0.0, "middle": width / 2, "end": width}[place.anchor]
    y = center[1] + place.dy
    return x, y - _ABOVE_LINE, x + width, y + _BELOW_LINE


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
