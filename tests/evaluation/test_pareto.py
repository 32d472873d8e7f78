"""Which of several schemes is taken: by cost among those that pass, or by none where cost does not decide."""

from vexport.evaluation.pareto import decide, marked
from vexport.types import ComparedScheme, Outcome


def scheme(
    name: str, num_bytes: int, kl: float, rates: tuple[float, ...] = (), outcome: Outcome | None = "PASS"
) -> ComparedScheme:
    at = tuple(zip((1, 8), rates, strict=False))
    return ComparedScheme(scheme=name, outcome=outcome, num_bytes=num_bytes, mean_kl=kl, rates=at)


def grey(*rows: ComparedScheme) -> dict[str, str]:
    return {row.scheme: row.dominated_by for row in marked(rows) if row.dominated_by}


def test_a_scheme_that_is_worse_in_everything_is_dominated() -> None:
    small, large = scheme("small", 50, 0.01, (100, 200)), scheme("large", 80, 0.02, (90, 150))
    assert grey(small, large) == {"large": "small"}
    assert grey(small, scheme("near", 80, 0.001, (90, 150))) == {}
    assert grey(small, scheme("fast", 80, 0.02, (90, 250))) == {}


def test_what_failed_or_is_not_comparable_dominates_nothing() -> None:
    large = scheme("large", 80, 0.02, (90, 150))
    assert grey(scheme("failed", 50, 0.01, (100, 200), outcome="FAIL"), large) == {}
    assert grey(scheme("emulated", 50, 0.01), large) == {}
    # What passed and may be taken is not drawn back for one that may lose too much.
    better = scheme("open", 50, 0.01, (100, 200), outcome="INCONCLUSIVE")
    assert grey(better, large) == {}
    assert grey(better, scheme("other", 80, 0.02, (90, 150), outcome="INCONCLUSIVE")) == {"other": "open"}
    assert grey(scheme("a", 50, 0.01, (100, 200)), scheme("a twin", 50, 0.01, (100, 200))) == {}


def test_speeds_within_the_noise_are_the_same() -> None:
    assert grey(scheme("a", 50, 0.01, (99, 198)), scheme("b", 80, 0.02, (100, 200))) == {"b": "a"}


def test_the_smallest_that_is_as_fast_is_taken() -> None:
    rows = [
        scheme("W4A16", 50, 0.02, (200, 400)),
        scheme("FP8", 80, 0.001, (150, 300)),
        scheme("NVFP4", 40, 0.5, (300, 600), outcome="FAIL"),
    ]
    found = decide(rows)
    assert found.scheme == "W4A16"
    assert found.reasons == (
        "Of 2 schemes that pass, W4A16 is the smallest and at least as fast at every number of requests "
        "(measured)",
        "FP8 loses less: KL 0.001, not 0.02",
    )
    found = decide([*rows[:2], scheme("INT3", 30, 0.3, (250, 500), outcome="INCONCLUSIVE")])
    assert found.scheme == "W4A16"
    assert found.reasons[-1].startswith("INT3 is smaller or faster and inconclusive")


def test_the_data_does_not_decide_where_size_and_speed_disagree() -> None:
    found = decide([scheme("W4A16", 50, 0.02, (200, 300)), scheme("FP8", 80, 0.001, (150, 600))])
    assert found.scheme == ""
    (reason,) = found.reasons
    assert "W4A16 is the smallest, W4A16 is the fastest with 1 at once, FP8 is the fastest with 8" in reason
    found = decide([scheme("W4A16", 50, 0.02, (200, 300)), scheme("NVFP4", 40, 0.03)])
    assert found.scheme == ""
    assert "the speed of some that passed is not known" in found.reasons[0]


def test_of_two_that_cost_the_same_the_one_that_loses_less_is_taken() -> None:
    rows = [scheme("FP8", 80, 0.002, (100, 200)), scheme("W8A8", 80, 0.0004, (101, 199))]
    assert decide(rows).scheme == decide(rows[::-1]).scheme == "W8A8"


def test_a_size_that_is_hardly_smaller_does_not_decide() -> None:
    found = decide([scheme("MXFP4", 1340, 0.0228, (225, 260)), scheme("W4A16", 1343, 0.0017, (225, 260))])
    assert found.scheme == "W4A16"
    assert found.reasons[0].startswith(
        "Of 2 schemes that pass, W4A16 is within 3% of the smallest and at least"
    )
    assert decide([scheme("small", 95, 0.02, (9, 9)), scheme("large", 100, 0.001, (9, 9))]).scheme == "small"


def test_one_that_passes_and_is_slower_than_the_baseline_says_so() -> None:
    baseline = ComparedScheme(scheme="unquantized", num_bytes=160, rates=((1, 90.0), (8, 500.0)))
    found = decide([scheme("W4A16", 50, 0.02, (100, 200))], baseline)
    assert found.scheme == "W4A16"
    assert found.reasons == (
        "W4A16 is the only scheme that passes",
        "The unquantized model is faster with 8 at once",
    )


def test_nothing_is_taken_where_nothing_passed() -> None:
    open_ = scheme("W4A16", 50, 0.1, outcome="INCONCLUSIVE")
    failed = scheme("INT3", 30, 0.5, outcome="FAIL")
    assert decide([open_, failed]).reasons == (
        "no scheme passed, and W4A16 inconclusive: evaluate more documents or text",
    )
    assert decide([failed]).reasons[0].startswith("no scheme passed: try one with more bits")
    assert decide([ComparedScheme(scheme="W4A16", reason="a shape")]).scheme == ""
