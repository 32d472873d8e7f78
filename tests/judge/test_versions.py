"""Changes between versions of vLLM, the search for the first change, and the outcome."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from vexport.judge.versions import (
    changes,
    conclude,
    judge_alone,
    judge_change,
    search,
    text_findings,
)
from vexport.records import (
    ComparedVariant,
    ComparedVersion,
    DryLoadReport,
    Finding,
    MatrixCell,
    MatrixRow,
    VariantOutcome,
    VersionOutcome,
)
from vexport.rules import changes as rules
from vexport.rules import dry_load, faults

DOWN = "model.layers.*.mlp.down_proj"
MARLIN, HUMMING = "MarlinNvFp4LinearKernel", "HummingNvFp4LinearKernel"


def cells(kernels: Sequence[str], precision: str = "W4A16") -> tuple[MatrixCell, ...]:
    return tuple(
        MatrixCell(tp=1, sm=sm, status="other precision", precision=precision, kernel=kernel)
        for sm, kernel in zip((80, 90), kernels, strict=True)
    )


def load(version: str, *kernels: str, precision: str = "W4A16") -> DryLoadReport:
    row = MatrixRow(
        name=DOWN, count=3, scheme="W4A4Fp4", stored="W4A4", cells=cells(kernels, precision)
    )
    return DryLoadReport(
        checkpoint="out",
        ok=True,
        findings=(),
        vllm=version,
        cells=tuple(replace(cell, precision="", kernel="") for cell in row.cells),
        rows=(row,),
        blind_spots=(),
    )


OLD = load("0.31.0", MARLIN, MARLIN)


def refused(report: DryLoadReport, *capabilities: int) -> DryLoadReport:
    """Return a report in which vLLM refuses some cells. The checkpoint must load in one cell."""
    found = tuple(
        replace(cell, status="refused", reason="ValueError: no", needed=True)
        if cell.sm in capabilities
        else cell
        for cell in report.cells
    )
    if len(capabilities) < len(found):
        return replace(report, cells=found)
    error = Finding.at(dry_load.REFUSED, "checkpoint", reason="ValueError: no")
    return replace(report, ok=False, cells=found, rows=(), findings=(error,))


def test_equal_loads_have_no_change() -> None:
    assert changes(OLD, replace(OLD, vllm="0.32.0")) == []
    assert judge_change(OLD, replace(OLD, vllm="0.32.0")).outcome == "SAME"


def test_another_kernel_is_a_warning() -> None:
    new = load("0.32.0", MARLIN, HUMMING)
    (change,) = changes(OLD, new)
    assert (change.rule, change.severity) == (rules.KERNEL.id, "warning")
    assert change.where == f"{DOWN} (sm 90)"
    assert (change.facts["before"], change.facts["after"]) == (MARLIN, HUMMING)
    answer = judge_change(OLD, new)
    assert answer.outcome == "SAME"
    assert HUMMING in answer.reason


def test_another_precision_differs() -> None:
    new = load("0.32.0", MARLIN, MARLIN, precision="W4A4")
    (change,) = changes(OLD, new)
    assert change.rule == rules.PRECISION.id
    assert change.where == DOWN
    assert judge_change(OLD, new).outcome == "DIFFERS"
    assert judge_change(new, OLD).outcome == "DIFFERS"


def test_refusals() -> None:
    new = load("0.32.0", MARLIN, MARLIN)
    whole = judge_change(OLD, refused(new, 80, 90))
    assert whole.outcome == "REFUSED"
    assert [finding.rule for finding in whole.findings] == [rules.REFUSED.id]
    part = judge_change(OLD, refused(new, 90))
    assert part.outcome == "DIFFERS"
    assert "(sm 90)" in part.reason
    better = judge_change(refused(OLD, 90), new)
    assert better.outcome == "SAME"
    assert [finding.rule for finding in better.findings] == [rules.LOADS.id]
    assert judge_change(refused(OLD, 90), refused(new, 90)).findings == ()


def test_errors_of_loaders_differ() -> None:
    missing = Finding.at(dry_load.MISSING, f"{DOWN}.weight_scale", found="none", expected="[1]")
    broken = replace(OLD, vllm="0.32.0", ok=False, findings=(missing,))
    answer = judge_change(OLD, broken)
    assert (answer.outcome, answer.findings) == ("DIFFERS", (missing,))
    assert judge_alone(broken).outcome == "REFUSED"
    stretched = Finding.at(dry_load.STRETCHED, DOWN, found="[1]", expected="[3]")
    warned = replace(OLD, findings=(stretched,))
    assert judge_change(warned, replace(warned, vllm="0.32.0")).findings == ()
    assert judge_alone(warned) == ("BASELINE", judge_alone(OLD).reason, (stretched,))


def test_known_fault_that_crashes_is_a_refusal() -> None:
    crash = Finding.at(
        faults.CRASH,
        "lm_head",
        kernel=HUMMING,
        version="0.30.0",
        gpus=["Hopper"],
        what="it crashes",
        repaired="0.31",
        remedy="update",
        thread="a thread",
    )
    faulty = replace(OLD, vllm="0.30.0", ok=False, findings=(crash,))
    assert judge_alone(faulty).outcome == "REFUSED"
    assert judge_change(OLD, faulty).outcome == "REFUSED"


def test_cell_that_cannot_be_judged_is_a_warning() -> None:
    unknown = tuple(
        replace(cell, status="not shown", reason="crashed") if cell.sm == 90 else cell
        for cell in OLD.cells
    )
    answer = judge_change(OLD, replace(OLD, vllm="0.32.0", cells=unknown))
    assert answer.outcome == "SAME"
    assert [finding.rule for finding in answer.findings] == [rules.NOT_SHOWN.id]
    nothing = tuple(replace(cell, status="not shown", reason="crashed") for cell in OLD.cells)
    error = Finding.at(dry_load.NOT_SHOWN, "checkpoint", reason="crashed")
    lost = replace(OLD, ok=False, cells=nothing, rows=(), findings=(error,))
    assert judge_change(OLD, lost).outcome == "NOT JUDGED"


@pytest.mark.parametrize(
    ("outcome", "kl", "rule"),
    [
        ("PASS", 0.0, None),
        ("PASS", 0.2, rules.KL.id),
        ("FAIL", 0.2, rules.KL.id),
        ("FAIL", 0.0, rules.TEXT.id),
        ("INCONCLUSIVE", None, None),
    ],
)
def test_log_probabilities(outcome: VariantOutcome, kl: float | None, rule: str | None) -> None:
    row = ComparedVariant(setting="default", outcome=outcome, reason="why", mean_kl=kl)
    found = text_findings(row, "0.31.0", 0.1)
    assert [finding.rule for finding in found] == [rule] * (rule is not None)
    answer = judge_change(OLD, replace(OLD, vllm="0.32.0"), found)
    assert answer.outcome == ("SAME" if rule is None else "DIFFERS")


def test_other_kinds_of_layers_are_a_warning() -> None:
    (row,) = OLD.rows
    other = replace(OLD, vllm="0.33.0", rows=(row, replace(row, name="lm_head")))
    (change,) = changes(OLD, other)
    assert (change.rule, change.where) == (rules.LAYERS.id, "lm_head")


@pytest.mark.parametrize(
    ("states", "tried"),
    [
        ("++++++++", [0, 7]),
        ("+-------", [0, 7, 4, 2, 1]),
        ("+++++++-", [0, 7, 4, 6]),
        ("++++----", [0, 7, 4, 2, 3]),
        ("++?----", [0, 6, 3, 2, 1]),
        ("?++-?", [0, 1, 4, 3, 2]),
        ("????", [0, 1, 2, 3]),
    ],
)
def test_search_tries_few_versions(states: str, tried: list[int]) -> None:
    asked: list[int] = []

    def is_like_first(number: int) -> bool | None:
        if number not in asked:
            asked.append(number)
        return {"+": True, "-": False, "?": None}[states[number]]

    search(len(states), is_like_first)
    assert asked == tried


def rows(*outcomes: VersionOutcome) -> list[ComparedVersion]:
    return [
        ComparedVersion(vllm=f"0.{30 + number}.0", outcome=outcome, reason=f"reason {number}")
        for number, outcome in enumerate(outcomes)
    ]


@pytest.mark.parametrize(
    ("outcomes", "outcome", "first", "words"),
    [
        (("BASELINE", "SAME", "SAME"), "PASS", "", "vLLM 0.30.0 to 0.32.0 load it alike"),
        (("BASELINE", "NOT TRIED", "SAME"), "PASS", "", "0.31.0 not tried"),
        (
            ("BASELINE", "SAME", "DIFFERS", "DIFFERS"),
            "FAIL",
            "0.32.0",
            "vLLM 0.32.0 is the first version that differs: reason 2",
        ),
        (("BASELINE", "REFUSED"), "FAIL", "0.31.0", "first version that refuses it: reason 1"),
        (
            ("REFUSED", "BASELINE", "SAME"),
            "FAIL",
            "0.31.0",
            "vLLM 0.31.0 is the first version that loads it; vLLM 0.30.0 does not: reason 0",
        ),
        (
            ("REFUSED", "BASELINE", "DIFFERS"),
            "FAIL",
            "0.32.0",
            "0.32.0 is the first version that",
        ),
        (("REFUSED", "REFUSED"), "FAIL", "", "no version loads it"),
        (("BASELINE", "NOT JUDGED"), "INCONCLUSIVE", "", "0.31.0 could not be judged"),
        (("NOT JUDGED", "NOT JUDGED"), "INCONCLUSIVE", "", "0.30.0 could not be judged"),
        (
            ("BASELINE", "NOT JUDGED", "DIFFERS"),
            "FAIL",
            "0.32.0",
            "(or vLLM 0.31.0, which could not be judged)",
        ),
    ],
)
def test_conclusion(
    outcomes: Sequence[VersionOutcome], outcome: str, first: str, words: str
) -> None:
    found = conclude(
        [replace(row, reason="") if row.outcome == "SAME" else row for row in rows(*outcomes)]
    )
    assert (found.outcome, found.first) == (outcome, first)
    assert words in found.reason


def test_pass_names_versions_with_warnings() -> None:
    same, changed = rows("BASELINE", "SAME")
    found = conclude([same, changed])
    assert found.reason == "vLLM 0.30.0 to 0.31.0 load it alike, with warnings in 0.31.0"
