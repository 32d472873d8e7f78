"""Promotions: the guiltiest groups first, in few rounds, to what loses less."""

from vexport.formats.schemes import KEEP
from vexport.sensitivity.promote import bytes_of, loss_of, next_promotions
from vexport.types import GroupSensitivity, SchemeLoss


def group(name: str, four_bits: float, eight_bits: float) -> GroupSensitivity:
    losses = {"NVFP4": (50, four_bits), "FP8_DYNAMIC": (90, eight_bits)}
    schemes = tuple(
        SchemeLoss(scheme=scheme, observer="", num_bytes=size, estimate=loss, measured=loss)
        for scheme, (size, loss) in losses.items()
    )
    return GroupSensitivity(name=name, layers=(name,), parameters=80, source_bytes=160, schemes=schemes)


def after(made: list[GroupSensitivity], schemes: dict[str, str], number: int) -> dict[str, str]:
    return schemes | {one.name: one.after for one in next_promotions(made, schemes, number)}


def test_one_guilty_group_is_all_that_is_promoted() -> None:
    made = [group("a", 0.01, 0.001), group("b", 0.9, 0.02), group("c", 0.02, 0.001)]
    (promotion,) = next_promotions(made, dict.fromkeys("abc", "NVFP4"), 1)
    assert (promotion.name, promotion.before, promotion.after) == ("b", "NVFP4", "FP8_DYNAMIC")
    assert promotion.num_bytes == 40
    assert promotion.loss == 0.88


def test_what_eight_bits_do_not_help_is_kept() -> None:
    made = [group("a", 0.9, 0.95), group("b", 0.1, 0.01)]
    (promotion,) = next_promotions(made, dict.fromkeys("ab", "NVFP4"), 1)
    assert (promotion.name, promotion.after, promotion.num_bytes) == ("a", KEEP, 110)


def test_each_round_leaves_a_smaller_part_than_the_one_before() -> None:
    made = [group(str(number), 0.1 + number / 1000, 0.005 + number / 10_000) for number in range(100)]
    schemes = {one.name: "NVFP4" for one in made}
    first = before = sum(loss_of(one, "NVFP4") for one in made)
    size = sum(bytes_of(one, "NVFP4") for one in made)
    for number in (1, 2, 3):
        schemes = after(made, schemes, number)
        left = sum(loss_of(one, schemes[one.name]) for one in made)
        larger = sum(bytes_of(one, schemes[one.name]) for one in made)
        assert left <= before / 4**number
        assert larger > size
        before, size = left, larger
    assert before < first / 4000


def test_nothing_is_left_to_promote_in_the_source_itself() -> None:
    made = [group("a", 0.9, 0.1)]
    assert next_promotions(made, {"a": KEEP}, 1) == ()
    assert next_promotions(made, {"a": "FP8_DYNAMIC"}, 1)[0].after == KEEP
