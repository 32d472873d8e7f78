"""The audit of copies on hand-written loaders, and reports made from cells, without vLLM."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.texts import assert_contains
from vexport.engine.dry.audit import Audit
from vexport.engine.dry.load import judge
from vexport.engine.dry.worker import merge_ranks
from vexport.engine.messages import Cell, CellResult, LayerKind, Miscopy

Loader = Callable[[torch.nn.Module, torch.Tensor], None]


FP8 = torch.float8_e4m3fn


def stored(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Layer(torch.nn.Module):
    """Fused weight of two members, and weights of three experts, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        tensors = {"fused": stored(8, 4), "experts": stored(3, 2, 4, dtype=FP8), "scale": stored(1)}
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def faults(
    *steps: tuple[torch.Tensor, Loader], optional: tuple[str, ...] = (), ranks: int = 1
) -> list[Miscopy]:
    """Load each stored tensor (t0, t1, ...), and return the audit's faults."""
    model, audit = Layer(), Audit(ranks)
    with audit:
        for number, (form, load) in enumerate(steps):
            tensor = torch.empty_like(form)
            audit.record_source(f"t{number}", tensor)
            load(model, tensor)
    return list(audit.faults(model, optional=frozenset(optional)))


def load_rows(start: int, stop: int) -> Loader:
    def load(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        model.get_parameter("fused").data[start:stop].copy_(tensor[: stop - start])

    return load


def load_expert(index: int) -> Loader:
    def load(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        model.get_parameter("experts").data[index].copy_(tensor)

    return load


def load_scale(model: torch.nn.Module, tensor: torch.Tensor) -> None:
    model.get_parameter("scale").data.fill_(tensor.item())


EXPERTS = [(stored(2, 4, dtype=FP8), load_expert(index)) for index in range(3)]
WHOLE = [
    (stored(4, 4), load_rows(0, 4)),
    (stored(4, 4), load_rows(4, 8)),
    *EXPERTS,
    (stored(1), load_scale),
]


def test_missing_tensors() -> None:
    (fault,) = faults(WHOLE[0], *WHOLE[2:])
    assert (fault.kind, fault.where, fault.got) == ("missing", "fused", "16 of 32 elements from t0")
    (fault,) = faults(*WHOLE[:3], *WHOLE[4:])
    assert fault.where == "experts"
    assert_contains(fault.got, "16 of 24 elements", "experts: 1")
    assert faults(*WHOLE[:-1], optional=("scale",)) == []
    assert [fault.where for fault in faults(*WHOLE[:-1])] == ["scale"]
    assert faults(*WHOLE) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_width_is_no_fault(dtype: torch.dtype) -> None:
    assert faults((stored(4, 4, dtype=dtype), load_rows(0, 4)), *WHOLE[1:]) == []


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.uint8, torch.float8_e5m2, torch.float8_e8m0fnu]
)
def test_cast_to_other_kind_is_fault(dtype: torch.dtype) -> None:
    (fault,) = faults(*WHOLE[:2], (stored(2, 4, dtype=dtype), load_expert(0)), *WHOLE[3:])
    assert (fault.kind, fault.where, fault.layer) == ("cast", "t2", "")
    assert (fault.got, fault.expected) == (str(dtype).removeprefix("torch."), "float8_e4m3fn")


def test_views_and_computed_values_are_no_fault() -> None:
    def view(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        load_expert(0)(model, tensor.view(FP8))

    assert faults(*WHOLE[:2], (stored(2, 4, dtype=torch.uint8), view), *WHOLE[3:]) == []

    def transposed(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        load_rows(0, 4)(model, tensor.t().contiguous() + 1)

    assert faults((stored(4, 4), transposed), *WHOLE[1:]) == []

    def replace(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        model.get_parameter("fused").data = tensor

    assert faults((stored(8, 4), replace), *WHOLE[2:]) == []


def test_narrowed_and_unused_tensors() -> None:
    (fault,) = faults((stored(6, 4), load_rows(0, 4)), *WHOLE[1:])
    assert (fault.kind, fault.where, fault.got) == ("narrowed", "t0", "shape [6, 4]")
    assert fault.expected == "16 elements"
    split = (stored(8, 4), load_rows(0, 4))
    assert faults(split, *WHOLE[1:], ranks=2) == []
    (fault,) = faults((stored(9, 4), load_rows(0, 4)), *WHOLE[1:], ranks=2)
    assert (fault.kind, fault.where, fault.expected) == ("narrowed", "t0", "32 elements")
    (fault,) = faults(*WHOLE, (stored(5), lambda model, tensor: None))
    assert (fault.kind, fault.where, fault.got) == ("unused", "t6", "float32 [5]")


def test_padding_of_the_last_rank_is_not_narrowed() -> None:
    """VocabParallelEmbedding fills the rows after the vocabulary with zeros."""

    def padded(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        fused = model.get_parameter("fused").data
        fused[:3].copy_(tensor[8:11])
        fused[3:].fill_(0)

    assert faults((stored(11, 4), padded), *WHOLE[2:], ranks=2) == []
    (fault,) = faults((stored(17, 4), padded), *WHOLE[2:], ranks=2)
    assert (fault.kind, fault.expected) == ("narrowed", "64 elements")


def test_absent_values_do_not_differ() -> None:
    """Tensors without values compare as equal, as vLLM expects of the input scales of w1 and w3."""

    def load(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        held = model.get_parameter("scale").data
        assert not torch.ne(held, tensor)
        assert not torch.gt((held - tensor).abs(), 1e-5)
        assert torch.isfinite(tensor).all()
        held.copy_(tensor)

    assert faults((stored(1), load), optional=("fused", "experts")) == []


CELLS = tuple(Cell(tp=tp, sm=sm) for tp in (1, 2) for sm in (80, 90))
DOWN, FP8_KERNEL = "model.layers.*.mlp.down_proj", "FP8ScaledMMLinearKernel"
MARLIN = LayerKind(
    name=DOWN, count=2, scheme="W8A8Fp8", stored="W8A8", runs="W8A16", kernel=f"Marlin{FP8_KERNEL}"
)
CUTLASS = replace(MARLIN, runs="W8A8", kernel=f"Cutlass{FP8_KERNEL}")
NARROWED = Miscopy(
    kind="narrowed", where="a.weight", layer=MARLIN.name, got="shape [9]", expected="8 elements"
)
UNUSED = Miscopy(kind="unused", where="b.weight", layer="", got="float32 [1]", expected="")


def loaded(cell: Cell, *faults: Miscopy) -> CellResult:
    """Return a cell with the kernel of its capability."""
    kernel = CUTLASS if cell.sm >= 89 else MARLIN
    return CellResult(cell=cell, outcome="loaded", layers=(kernel,), faults=faults)


def refused(cell: Cell, reason: str = "ValueError: no") -> CellResult:
    return CellResult(cell=cell, outcome="refused", reason=reason)


def test_other_precision_is_one_finding() -> None:
    report = judge("x", "0", [loaded(cell) for cell in CELLS], "all")
    assert report.ok
    assert [cell.status for cell in report.cells] == ["other precision", "loads"] * 2
    (finding,) = report.findings
    assert (finding.severity, finding.where) == ("info", f"{MARLIN.name} (tp 1/2, sm 80)")
    (row,) = report.rows
    assert [cell.precision for cell in row.cells] == ["W8A16", "W8A8"] * 2
    report = judge("x", "0", [loaded(CELLS[1], UNUSED)], "all")
    assert report.ok
    assert [finding.severity for finding in report.findings] == ["warning"]
    assert report.cells[0].status == "loads"
    unknown = CellResult(cell=CELLS[0], outcome="unknown", reason="NeedsDevice: x")
    report = judge("x", "0", [unknown], "any")
    assert (report.ok, report.cells[0].status, report.rows) == (False, "not shown", ())


def test_refused_cell_fails_if_all_required() -> None:
    results = [refused(cell) if cell.sm == 80 else loaded(cell) for cell in CELLS]
    assert not judge("x", "0", results, "all").ok
    report = judge("x", "0", results, "any")
    assert report.ok
    (finding,) = report.findings
    assert (finding.severity, finding.where) == ("warning", "checkpoint (tp 1/2, sm 80)")
    assert [cell.status for cell in report.rows[0].cells] == ["refused", "loads"] * 2
    assert not any(cell.needed for cell in report.cells)
    results = [refused(cell) if cell.tp == 2 else loaded(cell) for cell in CELLS]
    report = judge("x", "0", results, "any")
    errors = [finding.where for finding in report.findings if finding.severity == "error"]
    assert errors == ["checkpoint (tp 2, sm 80/90)"]
    assert [cell.needed for cell in report.cells] == [False, False, True, True]


def test_fault_names_layer_and_cells() -> None:
    results = [loaded(cell, *([NARROWED] if cell.tp == 2 else [])) for cell in CELLS]
    report = judge("x", "0", results, "all")
    for cells in (report.cells, report.rows[0].cells):
        assert [cell.status for cell in cells] == ["other precision", "loads", "faulty", "faulty"]
    assert report.findings[0].where == "a.weight (tp 2, sm 80/90)"
    last = refused(CELLS[3], "RuntimeError: too small")
    assert merge_ranks([loaded(CELLS[3]), last]) == last
    both = merge_ranks([loaded(CELLS[3], NARROWED), loaded(CELLS[3], NARROWED, UNUSED)])
    assert {fault.kind for fault in both.faults} == {"narrowed", "unused"}
    assert len(both.faults) == 2


def test_stretched_tensor_is_fault() -> None:
    """A copy repeats values because no loader compared the shapes."""

    def repeat(model: torch.nn.Module, tensor: torch.Tensor) -> None:
        model.get_parameter("experts").data.copy_(tensor)

    (fault,) = faults(*WHOLE[:2], (stored(1, 1, 4, dtype=FP8), repeat), WHOLE[-1])
    assert (fault.kind, fault.where) == ("stretched", "t2")
    assert (fault.got, fault.expected) == ("shape [1, 1, 4]", "shape [3, 2, 4]")
    assert judge("x", "0", [replace(loaded(CELLS[1]), faults=(fault,))], "all").ok
