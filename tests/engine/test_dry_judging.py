"""From cells to a report, without vLLM."""

from dataclasses import replace

from vexport.engine.dry.load import judge
from vexport.engine.dry.worker import merge_ranks
from vexport.engine.messages import Cell, CellResult, LayerKind, Miscopy

CELLS = tuple(Cell(tp=tp, sm=sm) for tp in (1, 2) for sm in (80, 90))
MARLIN = LayerKind(
    name="model.layers.*.mlp.down_proj",
    count=2,
    scheme="W8A8Fp8",
    stored="W8A8",
    runs="W8A16",
    kernel="MarlinFP8ScaledMMLinearKernel",
)
CUTLASS = replace(MARLIN, runs="W8A8", kernel="CutlassFP8ScaledMMLinearKernel")
NARROWED = Miscopy(
    kind="narrowed", where="a.weight", layer=MARLIN.name, got="shape [9]", expected="8 elements"
)
UNUSED = Miscopy(kind="unused", where="b.weight", layer="", got="float32 [1]", expected="")


def loaded(cell: Cell, *faults: Miscopy) -> CellResult:
    """A cell whose kernel is that of its capability."""
    return CellResult(
        cell=cell, outcome="loaded", layers=(CUTLASS if cell.sm >= 89 else MARLIN,), faults=faults
    )


def refused(cell: Cell, reason: str = "ValueError: no") -> CellResult:
    return CellResult(cell=cell, outcome="refused", reason=reason)


def test_precision_is_told_once_with_its_cells() -> None:
    report = judge("x", "0", [loaded(cell) for cell in CELLS], "all")
    assert report.ok
    assert [cell.status for cell in report.cells] == ["other precision", "loads"] * 2
    (finding,) = report.findings
    assert (finding.severity, finding.where) == ("info", f"{MARLIN.name} (tp 1/2, sm 80)")
    (row,) = report.rows
    assert [cell.precision for cell in row.cells] == ["W8A16", "W8A8"] * 2


def test_a_refused_cell_fails_where_every_one_is_required() -> None:
    results = [refused(cell) if cell.sm == 80 else loaded(cell) for cell in CELLS]
    assert not judge("x", "0", results, "all").ok
    report = judge("x", "0", results, "any")
    assert report.ok
    assert [(finding.severity, finding.where) for finding in report.findings] == [
        ("warning", "checkpoint (tp 1/2, sm 80)")
    ]
    assert [cell.status for cell in report.rows[0].cells] == ["refused", "loads"] * 2
    assert not any(cell.needed for cell in report.cells)


def test_a_size_that_no_device_loads_fails_in_any_case() -> None:
    results = [refused(cell) if cell.tp == 2 else loaded(cell) for cell in CELLS]
    report = judge("x", "0", results, "any")
    assert [finding.where for finding in report.findings if finding.severity == "error"] == [
        "checkpoint (tp 2, sm 80/90)"
    ]
    assert [cell.needed for cell in report.cells] == [False, False, True, True]


def test_what_cannot_be_followed_does_not_pass() -> None:
    unknown = CellResult(cell=CELLS[0], outcome="unknown", reason="NotFollowed: x")
    report = judge("x", "0", [unknown], "any")
    assert (report.ok, report.cells[0].status, report.rows) == (False, "not shown", ())


def test_a_fault_is_at_its_layer_and_its_cells() -> None:
    results = [loaded(cell, *([NARROWED] if cell.tp == 2 else [])) for cell in CELLS]
    report = judge("x", "0", results, "all")
    assert [cell.status for cell in report.cells] == ["other precision", "loads", "faulty", "faulty"]
    assert [cell.status for cell in report.rows[0].cells] == ["other precision", "loads", "faulty", "faulty"]
    assert report.findings[0].where == "a.weight (tp 2, sm 80/90)"


def test_an_unused_tensor_is_a_warning() -> None:
    report = judge("x", "0", [loaded(CELLS[1], UNUSED)], "all")
    assert report.ok
    assert [finding.severity for finding in report.findings] == ["warning"]
    assert report.cells[0].status == "loads"


def test_the_ranks_of_a_cell_are_one_result() -> None:
    last = refused(CELLS[3], "RuntimeError: too small")
    assert merge_ranks([loaded(CELLS[3]), last]) == last
    both = merge_ranks([loaded(CELLS[3], NARROWED), loaded(CELLS[3], NARROWED, UNUSED)])
    assert {fault.kind for fault in both.faults} == {"narrowed", "unused"}
    assert len(both.faults) == 2
