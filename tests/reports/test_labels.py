"""Names on a chart stand next to their points, on no other point and on no other name."""

from itertools import combinations

from vexport.reports.charts.labels import label_places

LETTER, WIDTH, HEIGHT = 7, 600, 200


def box(point: tuple[float, float], name: str, index: int, points: list[tuple[float, float]]) -> list[float]:
    """Left, top, right and bottom of a name in pixels, by what SVG's text-anchor, dx and dy mean."""
    place = label_places(points, NAMES)[index]
    width = LETTER * len(name)
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[place.anchor]
    left = point[0] * WIDTH / 100 + place.dx - shift * width
    baseline = point[1] * HEIGHT / 100 + place.dy
    return [left, baseline - 10, left + width, baseline + 3]


NAMES = ["W4A16_G64", "W4A16_CHANNEL", "NVFP4", "FP8_DYNAMIC", "W8A8"]
# As on SmolLM2: two pairs of nearly the same size, one of nearly the same loss, at the edges of the chart.
POINTS = [(5.0, 42.0), (5.0, 5.0), (11.0, 31.0), (94.0, 95.0), (94.0, 83.0)]


def test_no_name_covers_a_point_or_another_name() -> None:
    boxes = [box(point, NAMES[index], index, POINTS) for index, point in enumerate(POINTS)]
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    for left, top, right, bottom in boxes:
        assert left >= 0
        assert right <= WIDTH
        for x, y in POINTS:
            assert not (left < x * 6 < right and top < y * 2 < bottom)


def test_alone_a_name_stands_above_its_point() -> None:
    (place,) = label_places([(50.0, 50.0)], ["W4A16"])
    assert (place.anchor, place.dx, place.dy) == ("middle", 0, -11)
