"""Load checkpoints dry: start the worker, pass it the cells, and turn its results into reports."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

from vexport.architectures.faults import FAULTS, FaultyLayer
from vexport.architectures.faulty import fault_finding
from vexport.checkpoint.index import require_checkpoint, require_weights_found
from vexport.checkpoint.source import resolve_drafter, resolve_source
from vexport.checks import header_findings
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.precision import layer_kinds, other_precision
from vexport.checks.vllm.stored_schemes import config_groups_of
from vexport.engine.arguments import require_arguments, require_layers
from vexport.engine.dry.causes import with_cause
from vexport.engine.dry.controls import is_shared_refusal, not_judged, without_shared_errors
from vexport.engine.dry.host import compiled_kernels
from vexport.engine.messages import (
    REASONS,
    Cell,
    CellResult,
    DryRequest,
    DryResult,
    DryTry,
    FailureKind,
    LayerKind,
    Miscopy,
    MiscopyKind,
    Outcome,
)
from vexport.engine.session import NO_EMULATION, EngineFault, Worker, log_folder
from vexport.formats.gpus import UTILIZATION, Card
from vexport.names import SourceRef
from vexport.records import (
    CellStatus,
    DryLoadReport,
    Finding,
    GpuRoom,
    MatrixCell,
    MatrixRow,
    OnProgress,
    RankMemory,
    silent,
)
from vexport.rules import dry_load as rules
from vexport.rules.book import Rule
from vexport.scenario.serve import EngineArguments, Serve
from vexport.words import first_and_more

CHECK = "dry-load"
# Arguments of vLLM without a meaning in a dry load, and the reasons.
NOT_DRY = {
    "tensor_parallel_size": "use --tp for the number of ranks",
    "pipeline_parallel_size": "it loads all layers on each rank",
    "quantization_config": "vLLM quantizes when it reads values, which --dry does not",
}
# The cells that must load. all: every cell. any: at least one cell for each tensor parallel size.
Require = Literal["all", "any"]
LIMITATIONS = (
    "kernels, and vLLM's processing of loaded weights, did not run; values were only read if vLLM "
    "casts them to another dtype",
    "the kernels are those of vLLM's CUDA wheel and of the packages that it requires, on a host "
    "with a CUDA toolkit",
)
# Word in messages of vLLM and transformers about a checkpoint that needs remote code.
TRUST = "trust_remote_code"
_FAULTS: dict[MiscopyKind, Rule] = {
    "missing": rules.MISSING,
    "unused": rules.UNUSED,
    "cast": rules.CAST,
    "narrowed": rules.NARROWED,
    "stretched": rules.STRETCHED,
}
# Ampere, Ada, Hopper and Blackwell in data centers. vLLM chooses different kernels for each.
CAPABILITIES = (80, 89, 90, 100)
# Cells that show whether an unquantized model loads at all: a single rank of each common GPU.
_PLAIN_CELLS = tuple(Cell(tp=1, sm=sm) for sm in CAPABILITIES)
SECONDS = 600.0
# Kinds of faults that do not depend on the checkpoint.
_CHECKPOINT_INDEPENDENT: tuple[FailureKind, ...] = ("missing", "no space", "mismatched build")


def judge(
    name: str,
    vllm: str,
    results: Sequence[CellResult],
    require: Require,
    *,
    groups: Sequence[ConfigGroup] = (),
    requested: bool = False,
    cuda: bool = False,
) -> DryLoadReport:
    """Make the report on one checkpoint from the results of its cells.

    `groups` are the config groups of the checkpoint. Messages use them to name its schemes. An
    error of the checkpoint does not count if the unquantized model was tried and has the same
    error.

    `requested` is True if the user chose the cells. A refusal then stays an error if the
    unquantized model loads in another cell, because the chosen GPU or number of ranks is the cause.
    `cuda` is True if the loaders are those of a CUDA build.
    """
    left_out = not_judged(results)
    without_toolkit = [each for each in results if not each.cell.toolkit]
    results = [each for each in results if each.cell.toolkit] or results
    results = [
        without_shared_errors(result, reason_with_cause, requested=requested)
        for result, reason_with_cause in zip(
            results, _reasons_with_cause(results, groups, vllm), strict=True
        )
    ]
    # Memory does not depend on the capability, so the first loaded cell of each tensor parallel
    # size is used.
    memory = {each.memory.tp: each.memory for each in reversed(results) if each.memory is not None}
    needed = _needed_cells(results, require)
    rows = tuple(_rows(results))
    changed = tuple(_changed_rows(rows, without_toolkit))
    findings = (
        *_not_loaded(results, needed),
        *_faults(results),
        *_known_faults(results, require, vllm),
        *_precisions(results),
    )
    return DryLoadReport(
        checkpoint=name,
        ok=all(finding.severity != "error" for finding in findings),
        findings=findings,
        vllm=vllm,
        cuda=cuda,
        cells=tuple(_cell(result, needed=result.cell in needed) for result in results),
        rows=rows,
        without_toolkit=changed,
        compiled=tuple(compiled_kernels(each.compiled for each in (*results, *without_toolkit))),
        memory=tuple(memory[tp] for tp in sorted(memory)),
        not_judged=left_out,
        log=next((each.log for each in results if each.log), ()),
        blind_spots=LIMITATIONS,
    )


def _reasons_with_cause(
    results: Sequence[CellResult], groups: Sequence[ConfigGroup], vllm: str
) -> Iterator[str]:
    """Yield each result's reason with the cause in front.

    Cells with the same cause get the same text.
    """
    alike = defaultdict[tuple[Outcome, str, str], list[CellResult]](list)
    for result in results:
        alike[_kind_of_refusal(result)].append(result)
    for result in results:
        same = alike[_kind_of_refusal(result)]
        capabilities = list(dict.fromkeys(each.cell.sm for each in same))
        yield with_cause(same[0].reason, capabilities, groups, vllm) if result.reason else ""


def _kind_of_refusal(result: CellResult) -> tuple[Outcome, str, str]:
    """Return a key that is equal for results with the same cause.

    The key contains the cause without the GPU's capability.
    """
    words = result.reason.partition(REASONS)[0]
    return result.outcome, result.where, re.sub(r"\bSM \d+|\b[Cc]apability: \d+", "#", words)


def errors_or_uncertainty(report: DryLoadReport, require: Require = "any") -> list[Finding] | str:
    """Return the errors that make a checkpoint fail, or the reason why they are uncertain.

    A refusal is uncertain if the dry load could not judge a cell of the same group (see
    `_group_key`), because vLLM may load the checkpoint in that cell. Faulty tensors are always
    errors. Errors are also uncertain if the checkpoint needs remote code.
    """
    needed = [cell for cell in report.cells if cell.needed and cell.reason]
    doubts = {
        _group_key(cell, require): cell.reason for cell in needed if cell.status == "not shown"
    }
    doubtful_reasons = {cell.reason for cell in needed if _group_key(cell, require) in doubts}
    certain = {cell.reason for cell in needed if _group_key(cell, require) not in doubts}
    errors = [each for each in report.findings if each.severity == "error"]
    errors = [each for each in errors if each.got in certain or each.got not in doubtful_reasons]
    if doubts and not errors:
        reason = min(doubts.values())
        return (
            reason
            if is_shared_refusal(reason)
            else f"the dry load cannot build this model: {reason}"
        )
    if any(TRUST in each.got for each in errors):
        return "the checkpoint contains Python code, which only runs with --trust-remote-code"
    return errors


def _group_key(cell: MatrixCell, require: Require) -> tuple[int, int]:
    """Return the key of the group that a cell belongs to. One cell of each group must load.

    With `require` "all", each cell is a separate group. With "any", all cells of the same tensor
    parallel size are a group.
    """
    return cell.tp, cell.sm if require == "all" else 0


def unused(report: DryLoadReport) -> list[Finding]:
    """Return the findings about stored tensors that vLLM does not use."""
    return [each for each in report.findings if each.rule == rules.UNUSED.id]


def is_stretched(finding: Finding) -> bool:
    """Return True if a finding is about a tensor whose values vLLM repeats to fill a parameter."""
    return finding.rule == rules.STRETCHED.id


def _cell(result: CellResult, *, needed: bool = True) -> MatrixCell:
    status: CellStatus = "refused" if result.outcome == "refused" else "not shown"
    if result.outcome == "loaded":
        status = _status(result.layers, result.faults)
    return MatrixCell(
        tp=result.cell.tp, sm=result.cell.sm, status=status, reason=result.reason, needed=needed
    )


def _needed_cells(results: Sequence[CellResult], require: Require) -> Set[Cell]:
    """Return the cells that must load.

    With `require` "any", a cell must load if no cell of the same tensor parallel size loaded.
    """
    loaded = {result.cell.tp for result in results if result.outcome == "loaded"}
    cells = [result.cell for result in results]
    return {cell for cell in cells if require == "all" or cell.tp not in loaded}


def _status(layers: Sequence[LayerKind], faults: Sequence[Miscopy]) -> CellStatus:
    if any(_FAULTS[fault.kind].severity == "error" for fault in faults):
        return "faulty"
    return "other precision" if any(layer.runs != layer.stored for layer in layers) else "loads"


def _rows(results: Sequence[CellResult]) -> Iterator[MatrixRow]:
    """Yield a row for each kind of layer.

    If a cell has no layer of this kind, the row contains the status of the whole checkpoint in
    that cell.
    """
    kinds: dict[tuple[str, str], LayerKind] = {}
    for kind in (kind for result in results for kind in result.layers):
        kinds.setdefault((kind.name, kind.stored), kind)
    for kind in kinds.values():
        cells = tuple(_layer_cell(result, kind) for result in results)
        yield MatrixRow(
            name=kind.name, count=kind.count, scheme=kind.scheme, stored=kind.stored, cells=cells
        )


def _changed_rows(
    rows: Sequence[MatrixRow], without_toolkit: Sequence[CellResult]
) -> Iterator[MatrixRow]:
    """Yield the kinds of layers that get other kernels without a CUDA toolkit on the host."""
    others = {(row.name, row.stored): row for row in _rows(without_toolkit)}
    for row in rows:
        other = others.get((row.name, row.stored))
        if other is not None and _selections(other) != _selections(row):
            yield other


def _selections(row: MatrixRow) -> list[tuple[str, str, str]]:
    return [(cell.status, cell.precision, cell.kernel) for cell in row.cells]


def _layer_cell(result: CellResult, like: LayerKind) -> MatrixCell:
    for layer in result.layers:
        if (layer.name, layer.stored) == (like.name, like.stored):
            status = _status(
                [layer], [fault for fault in result.faults if fault.layer == layer.name]
            )
            return replace(_cell(result), status=status, precision=layer.runs, kernel=layer.kernel)
    return _cell(result)


def _not_loaded(results: Sequence[CellResult], needed: Set[Cell]) -> Iterator[Finding]:
    reasons = defaultdict[tuple[str, str, str], list[Cell]](list)
    for result in results:
        if result.outcome != "loaded":
            reasons[result.outcome, result.where or "checkpoint", result.reason].append(result.cell)
    for (outcome, where, reason), cells in reasons.items():
        rule = rules.REFUSED if outcome == "refused" else rules.NOT_SHOWN
        yield Finding.at(
            rule.as_warning if needed.isdisjoint(cells) else rule,
            _in_cells(where, cells, results),
            tp=tuple(dict.fromkeys(cell.tp for cell in cells)),
            sm=tuple(dict.fromkeys(cell.sm for cell in cells)),
            reason=reason,
        )


def _faults(results: Sequence[CellResult]) -> Iterator[Finding]:
    """Yield a finding for each kind of fault in each tensor, with the cells that have the fault.

    Tensors with the same fault in the same cells share a finding.
    """
    cells_of: dict[tuple[str, MiscopyKind], tuple[Miscopy, list[Cell]]] = {}
    for result in results:
        for fault in result.faults:
            cells_of.setdefault((fault.where, fault.kind), (fault, []))[1].append(result.cell)
    alike = defaultdict[tuple[MiscopyKind, str, str, tuple[Cell, ...]], list[Miscopy]](list)
    for fault, tried in cells_of.values():
        alike[fault.kind, fault.expected, fault.got, tuple(tried)].append(fault)
    for (*_, cells), (fault, *others) in alike.items():
        places = [each.where for each in (fault, *others)]
        yield Finding.at(
            _FAULTS[fault.kind],
            _in_cells(first_and_more(places), cells, results),
            places=places if others else (),
            found=fault.got,
            expected=fault.expected,
        )


def _known_faults(results: Sequence[CellResult], require: Require, vllm: str) -> Iterator[Finding]:
    """Yield a finding for each known fault of vLLM and kernel, with the cells that have the fault.

    With `require` "any", a fault is only a warning if the same number of ranks runs in a cell
    without a fault that breaks it.
    """
    alike = defaultdict[FaultyLayer, list[tuple[str, Cell]]](list)
    for result in results:
        for each in result.known_faults:
            alike[replace(each, layer="")].append((each.layer, result.cell))
    running = {
        result.cell.tp
        for result in results
        if result.outcome == "loaded"
        and not any(FAULTS[each.fault].breaks for each in result.known_faults)
    }
    for fault, places in alike.items():
        cells = list(dict.fromkeys(cell for _, cell in places))
        kinds = layer_kinds(name for name, _ in places)
        yield fault_finding(
            fault,
            _in_cells(kinds, cells, results),
            vllm,
            sm=dict.fromkeys(cell.sm for cell in cells),
            tp=dict.fromkeys(cell.tp for cell in cells),
            is_certain=require == "all" or not {cell.tp for cell in cells} <= running,
        )


def _precisions(results: Sequence[CellResult]) -> Iterator[Finding]:
    kernels = defaultdict[tuple[str, str, str], list[tuple[str, Cell]]](list)
    for result in results:
        rounded = {
            each.layer
            for each in result.known_faults
            if each.is_known and FAULTS[each.fault].effect == "fewer-bits"
        }
        for kind in result.layers:
            if kind.runs != kind.stored and kind.name not in rounded:
                kernels[kind.stored, kind.runs, kind.kernel or kind.scheme].append(
                    (kind.name, result.cell)
                )
    for (stored, runs, kernel), places in kernels.items():
        kinds = layer_kinds(name for name, _ in places)
        cells = list(dict.fromkeys(cell for _, cell in places))
        found = other_precision(
            _in_cells(kinds, cells, results),
            stored=stored,
            runs=runs,
            capabilities=[cell.sm for cell in cells],
        )
        named = f" ({kernel})" if kernel else ""
        capabilities = tuple(dict.fromkeys(cell.sm for cell in cells))
        yield replace(found, check=CHECK, got=f"{found.got}{named}", sm=capabilities)


def _in_cells(place: str, cells: Sequence[Cell], results: Sequence[CellResult]) -> str:
    if len(cells) == len(results):
        return place
    sizes = dict.fromkeys(str(cell.tp) for cell in cells)
    capabilities = dict.fromkeys(str(cell.sm) for cell in cells)
    if len(sizes) * len(capabilities) == len(cells):
        return f"{place} (tp {'/'.join(sizes)}, sm {'/'.join(capabilities)})"
    return f"{place} ({'; '.join(f'tp {cell.tp}, sm {cell.sm}' for cell in cells)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLoad:
    """A load of checkpoints by vLLM's model classes and weight loaders from the headers.

    It needs no GPU, and reads only the values that vLLM casts to another dtype. Importing vLLM
    takes about 10 s, and each cell of a small model 0.2 s. The cells are the combinations of `tp`
    (tensor parallel sizes) and `sm` (90 for SM 9.0). With `require` "all", each cell must load.
    With "any", one cell for each `tp` must load. `vllm_python` is the interpreter, or None for the
    running interpreter. `toolkits` are the hosts to try, with a CUDA toolkit (True) or without. The
    verdict ignores cells without a toolkit, unless all cells are without. `arguments` are the
    user's arguments of vLLM. `speculative` is `METHOD` or `METHOD=FOLDER`. If it is set, vLLM's
    draft model is built and loaded as well.

    With `controlled`, an error does not count if vLLM has the same error with the unquantized
    model. This is the model in the folder `source`, or, without `source`, a model that transformers
    makes of the checkpoint's class (see `controls.py`). `requested` is True if the user chose the
    cells (see `judge`).
    """

    checkpoints: Sequence[Path]
    tp: Sequence[int] = (1,)
    sm: Sequence[int] = (90,)
    toolkits: Sequence[bool] = (True,)
    require: Require = "all"
    arguments: EngineArguments = field(default_factory=dict)
    vllm_python: Path | None = None
    trust_remote_code: bool = False
    speculative: str = ""
    controlled: bool = False
    source: Path | None = None
    requested: bool = False
    timeout: float = SECONDS

    def reports(self, on_progress: OnProgress = silent) -> list[DryLoadReport]:
        """Return a report for each checkpoint, in their order. Raises the errors of `started`."""
        with self.started() as reports:
            return reports(on_progress)

    def outcomes(
        self, fault: EngineFault, on_progress: OnProgress
    ) -> list[DryLoadReport | EngineFault]:
        """Return a report or a fault for each checkpoint, after their common process failed.

        Each checkpoint is loaded again in a separate process. A checkpoint gets a fault only if its
        separate process fails. All checkpoints get the same `fault` if vLLM cannot be started at
        all, or if there is only one checkpoint.
        """
        if fault.failure.kind in _CHECKPOINT_INDEPENDENT or len(self.checkpoints) == 1:
            return [fault] * len(self.checkpoints)
        alone = [replace(self, checkpoints=[checkpoint]) for checkpoint in self.checkpoints]
        return [_report_or_fault(each, on_progress) for each in alone]

    @contextmanager
    def started(self) -> Iterator[Callable[[OnProgress], list[DryLoadReport]]]:
        """Start the process. Yield a function that waits for the reports.

        Raises EngineFault if vLLM is missing, dies outside a cell, or takes more than
        `timeout` seconds.
        """
        with log_folder("vexport-dry-") as folder:
            request = DryRequest(
                checkpoints=tuple(checkpoint.absolute() for checkpoint in self.checkpoints),
                cells=tuple(
                    Cell(tp=tp, sm=sm, toolkit=toolkit)
                    for toolkit, tp, sm in product(self.toolkits, self.tp, self.sm)
                ),
                folder=folder,
                arguments=self.arguments,
                trust_remote_code=self.trust_remote_code,
                speculative=self.speculative,
                controlled=self.controlled,
                source=self.source.absolute() if self.source is not None else None,
                plain_cells=_PLAIN_CELLS if self.requested else (),
                try_seconds=max(1, int(self.timeout / 2)),
            )
            worker = Worker(
                module="vexport.engine.dry.worker",
                request=request,
                kind=DryResult,
                where="dry load in vLLM",
                log=folder / "vllm.log",
                timeout=self.timeout,
                vllm_python=self.vllm_python,
                environment=NO_EMULATION,
            )
            with worker.started() as result:
                yield lambda on_progress: self._judged(request, result(on_progress))

    def _judged(self, request: DryRequest, result: DryResult) -> list[DryLoadReport]:
        return [
            replace(
                judge(
                    str(checkpoint),
                    result.vllm,
                    cells,
                    self.require,
                    groups=config_groups_of(checkpoint),
                    requested=self.requested,
                    cuda=result.cuda,
                ),
                unquantized=tuple(_unquantized_findings(request, number, cells)),
            )
            for number, (checkpoint, cells) in enumerate(
                zip(self.checkpoints, result.checkpoints, strict=True)
            )
        ]


def _unquantized_findings(
    request: DryRequest, number: int, cells: Sequence[CellResult]
) -> Iterator[Finding]:
    """Yield the static findings on the unquantized model that was tried for a checkpoint.

    The paths in them are those of the checkpoint. There are no findings on the config of a model
    that vexport made, because this config is the checkpoint's.
    """
    kinds = [each.control.kind for each in cells if each.control]
    for kind in dict.fromkeys(kinds):
        attempt = DryTry(request=request, number=number, cell=cells[0].cell, rank=0, control=kind)
        root, checkpoint = str(attempt.checkpoint), str(request.checkpoints[number])
        for finding in header_findings(attempt.checkpoint):
            if kind == "source" or root not in finding.where:
                yield replace(finding, where=finding.where.replace(root, checkpoint))


def _report_or_fault(load: DryLoad, on_progress: OnProgress) -> DryLoadReport | EngineFault:
    try:
        (report,) = load.reports(on_progress)
    except EngineFault as fault:
        return fault
    return report


def loadable_folder(ref: SourceRef, on_progress: OnProgress = silent) -> Path:
    """Return the folder of a checkpoint. Raise InputError if vLLM cannot begin to load it."""
    root = resolve_source(ref, on_progress)
    require_checkpoint(root)
    require_weights_found(root)
    require_layers(root)
    return root


def dry_load_checkpoints(
    refs: Sequence[SourceRef],
    pythons: Sequence[Path | None],
    *,
    tp: Sequence[int],
    sm: Sequence[int] | None,
    gpus: Sequence[Card] = (),
    trust_remote_code: bool,
    serve: Serve,
    on_progress: OnProgress,
    speculative: str = "",
) -> list[DryLoadReport]:
    """Return a report for each checkpoint and interpreter, in that order.

    In `pythons`, None stands for the running interpreter. Without `sm`, the capabilities of `gpus`
    are tried. Without `sm` and `gpus`, the capabilities of common GPUs are tried, and for each `tp`
    the checkpoint must load on one of them. If there are `gpus`, the reports contain the number of
    sequences that fit on each GPU. Raises the errors of `DryLoad`, and InputError if a checkpoint
    cannot be read or vLLM does not accept the arguments in `serve`.
    """
    roots = [loadable_folder(ref, on_progress) for ref in refs]
    drafter = resolve_drafter(speculative, on_progress)
    for python in pythons:
        require_arguments([serve], python, dry=True)
    wanted = sm or tuple(dict.fromkeys(card.sm for card in gpus))
    share = serve.gpu_memory_utilization or UTILIZATION
    per_python = [
        DryLoad(
            checkpoints=roots,
            tp=tp,
            sm=wanted or CAPABILITIES,
            toolkits=(True, False),
            require="all" if wanted else "any",
            arguments=serve.given,
            vllm_python=python,
            trust_remote_code=trust_remote_code,
            speculative=drafter,
            timeout=serve.timeout,
        ).reports(on_progress)
        for python in pythons
    ]
    return [
        replace(
            reports[number],
            checkpoint=str(ref),
            vllm_python=str(python or ""),
            rooms=tuple(_gpu_rooms(reports[number].memory, gpus, share)),
        )
        for number, ref in enumerate(refs)
        for python, reports in zip(pythons, per_python, strict=True)
    ]


def _gpu_rooms(
    memory: Sequence[RankMemory], cards: Sequence[Card], share: float
) -> Iterator[GpuRoom]:
    """Yield the number of sequences that fit, by card, tensor parallel size and sequence length.

    `share` is the share of a card's memory that vLLM uses.

    The number is an upper bound, because it ignores the memory of activations and CUDA graphs. vLLM
    measures this memory when it starts (1 to 3 GB, more with long prompts).
    """
    for card, rank in product(cards, memory):
        free = int(card.memory_bytes * share) - rank.weight_bytes
        for sequence in rank.sequences:
            fitting = max(free, 0) // sequence.kv_bytes if sequence.kv_bytes else 0
            tokens = sequence.tokens
            yield GpuRoom(
                gpu=card.name, tp=rank.tp, kv_bytes=free, tokens=tokens, sequences=fitting
            )
