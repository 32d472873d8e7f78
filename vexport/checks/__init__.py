"""Static checks of a checkpoint's files, without vLLM, a GPU or torch.

To add a check family, add a file and a line in `CHECKS`. All families use `vexport.checks.vllm`,
which contains vLLM's rules for reading a checkpoint. `numbers` has functions that examine stored
numbers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.architectures.versions import facts_of
from vexport.checkpoint.index import read_index, require_config
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checks import (
    completeness,
    config,
    devices,
    faults,
    fusion,
    kv_cache,
    model,
    shapes,
    shards,
    targets,
    tokenizer,
    values,
    versions,
)
from vexport.checks.completeness import tensors_not_judged
from vexport.checks.config import has_quantized_outputs, unsupported_method
from vexport.checks.model import class_not_judged
from vexport.checks.vllm.view import ANY, CheckFunction, CheckpointView, Target
from vexport.checks.vllm.wrong_words import with_causes
from vexport.errors import InputError, InputErrors, VexportError, convert_os_error
from vexport.errors.extras import unexpected_error
from vexport.records import CheckReport, Finding, NotJudged, OnProgress, silent
from vexport.records.shared_faults import as_shared, shared_as_warnings
from vexport.rules import source
from vexport.version import PINNED, short_version
from vexport.words import plural

FILES = "files"
# Check name of findings that report an unexpected exception in a family.
INTERNAL = "internal"
# Family that compares with the source. It needs torch and is in `vexport.fidelity`.
SOURCE = "source"
SOURCE_DESCRIPTION = (
    "weights, unquantized tensors, tokenizer, chat template and configs match the source (--source)"
)
# Rules of layers that cannot be compared with the source.
NOT_COMPARED = (source.NO_SOURCE_WEIGHT.id, source.OTHER_SIZE.id)
# Families that apply to every quantization method.
METHOD_INDEPENDENT = ("shards", "digests", "config")
# `fix` of findings on tensors that the source stores with the same bytes.
FIX_SOURCE = "look at this tensor in the source: the quantization did not change it"
# Families that read stored numbers. If the checkpoint uses a method other than compressed-tensors,
# its tensors are first translated to compressed-tensors.
VALUE_FAMILIES = ("values", "fusion")
# Families that only need config.json, names and headers. They also check the checkpoints that
# vexport writes.
HEADER_FAMILIES = (
    "shards",
    "model",
    "config",
    "targets",
    "completeness",
    "shapes",
    "kv_cache",
    "transforms",
)
# Families that are compared with the same families of the source. A fault of the source is not a
# fault of the quantization.
SOURCE_FAMILIES = (*HEADER_FAMILIES, "tokenizer")
# Parts of a checkpoint that the static checks may leave unchecked, as named in reports.
NAMES = "names and shapes of tensors"
NUMBERS = "quantized weights and their scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceComparison:
    """Unquantized checkpoint `root`, and the check that compares a quantized checkpoint with it."""

    root: Path
    run: CheckFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check family: its description, and the function that yields its findings."""

    description: str
    run: CheckFunction


# Check families, in the order of their findings in reports.
CHECKS: Mapping[str, Check] = {
    "shards": Check(description=shards.DESCRIPTION, run=shards.run),
    "model": Check(description=model.DESCRIPTION, run=model.run),
    "config": Check(description=config.DESCRIPTION, run=config.run),
    "targets": Check(description=targets.DESCRIPTION, run=targets.run),
    "completeness": Check(description=completeness.DESCRIPTION, run=completeness.run),
    "shapes": Check(description=shapes.DESCRIPTION, run=shapes.run),
    "values": Check(description=values.DESCRIPTION, run=values.run),
    "fusion": Check(description=fusion.DESCRIPTION, run=fusion.run),
    "kv_cache": Check(description=kv_cache.DESCRIPTION, run=kv_cache.run),
    "transforms": Check(description=config.TRANSFORMS, run=config.transforms),
    "tokenizer": Check(description=tokenizer.DESCRIPTION, run=tokenizer.run),
    "devices": Check(description=devices.DESCRIPTION, run=devices.run),
    "versions": Check(description=versions.DESCRIPTION, run=versions.run),
    "faults": Check(description=faults.DESCRIPTION, run=faults.run),
    # Digests are last: if a file was changed, a finding of another family is more specific.
    "digests": Check(description=shards.DIGESTS_DESCRIPTION, run=shards.digests),
}


def check_checkpoint(
    name: str,
    target: Target = ANY,
    against: SourceComparison | None = None,
    *,
    root: Path | None = None,
    digests: Mapping[str, str] | None = None,
    hub_digests: Mapping[str, str | None] | None = None,
    on_progress: OnProgress = silent,
) -> CheckReport:
    """Return all findings on the checkpoint `name`, in the order of `CHECKS`.

    `root` is the folder of the checkpoint, by default the path `name`. `target` contains the ranks,
    GPUs and vLLM version that the checkpoint should be served with. `against` compares the
    checkpoint with its source (`vexport.fidelity.compare`). `digests` maps paths of files to their
    digests, and `hub_digests` to the hub's digests or None.

    Raises InputError if there is no checkpoint at all. Broken files are findings.
    """
    root = root or Path(name)
    require_config(root)
    not_judged: tuple[NotJudged, ...] = ()
    vllm = target.vllm or PINNED
    try:
        index = read_index(root)
        with Reader() as reader:
            view = CheckpointView(index, reader, target, digests, hub_digests, on_progress)
            vllm = view.model.target_version
            # Several families may report the same unreadable file.
            findings = tuple(dict.fromkeys(all_findings(view, against)))
            not_judged = (*parts_not_judged(view), *_values_not_judged(view, against, findings))
            if against is not None:
                of_source = header_findings(against.root, target, SOURCE_FAMILIES)
                findings = tuple(shared_as_warnings(findings, root, of_source, against.root))
    except (InputError, OSError) as error:
        findings = error_findings(error)
    return CheckReport(
        checkpoint=name,
        ok=is_ok(findings),
        findings=findings,
        not_judged=not_judged,
        vllm=short_version(vllm),
        tp=tuple(target.tp) or (1,),
        sm=tuple(target.sm),
    )


def is_ok(findings: Iterable[Finding]) -> bool:
    """Return True if no finding is an error."""
    return not any(finding.severity == "error" for finding in findings)


def header_findings(
    root: Path, target: Target = ANY, families: Sequence[str] = HEADER_FAMILIES
) -> tuple[Finding, ...]:
    """Return the findings that do not need the weights. This takes less than a second."""
    try:
        with Reader() as reader:
            view = CheckpointView(read_index(root), reader, target)
            findings = [
                each for name in families for each in _run_family(name, CHECKS[name].run, view)
            ]
    except InputError as problem:
        return error_findings(problem)
    return tuple(dict.fromkeys(findings))


def all_findings(
    view: CheckpointView, against: SourceComparison | None = None
) -> Iterator[Finding]:
    """Yield the findings of all families. Findings with one cause in the config are one finding.

    If vexport does not support the checkpoint's quantization method, only the families in
    METHOD_INDEPENDENT run.
    """
    found = list(_family_findings(view, against))
    try:
        found = with_causes(view, found)
    except (InputError, OSError):
        pass  # a finding reports the unreadable file
    except Exception as error:
        found.append(internal_error("the causes of findings", error))
    yield from found


def _family_findings(view: CheckpointView, against: SourceComparison | None) -> Iterator[Finding]:
    judged = unsupported_method(view) is None
    for name, check in CHECKS.items():
        if name in VALUE_FAMILIES and judged:
            found = _run_family(name, partial(_on_translated, check.run), view)
            yield from found if against is None else _blame_source(found, view, against.root)
        elif judged or name in METHOD_INDEPENDENT:
            yield from _run_family(name, check.run, view)
    if judged and against is not None:
        yield from _run_family(SOURCE, partial(_on_translated, against.run), view)


def _on_translated(run: CheckFunction, view: CheckpointView) -> Iterator[Finding]:
    names = view.translated.stored_names
    for finding in run(view.translated):
        yield replace(finding, where=names.get(finding.where, finding.where))


def _blame_source(
    found: Iterable[Finding], view: CheckpointView, source: Path
) -> Iterator[Finding]:
    tensors, origins = view.index.tensors, read_index(source).tensors
    with Reader() as reader:
        for finding in found:
            tensor, origin = tensors.get(finding.where), origins.get(finding.where)
            is_unchanged = (
                tensor is not None
                and origin is not None
                and same_bytes(view.reader, tensor, reader, origin)
            )
            yield as_shared(finding, FIX_SOURCE) if is_unchanged else finding


def _run_family(family: str, run: CheckFunction, view: CheckpointView) -> Iterator[Finding]:
    """Yield the findings of a family.

    An unreadable file and an unexpected exception become findings, too, so that the other families
    still run.
    """
    try:
        yield from run(view)
    except (InputError, OSError) as error:
        yield from error_findings(error)
    except VexportError:
        raise
    except Exception as error:
        yield internal_error(f"the check {family}", error)


def internal_error(where: str, error: Exception) -> Finding:
    """Return a finding for an unexpected exception.

    Other findings are kept, and the command exits with code 4.
    """
    return Finding.of(unexpected_error(error, where), check=INTERNAL, claim=None, severity="error")


def error_findings(error: VexportError | OSError) -> tuple[Finding, ...]:
    """Convert an error about unreadable files into findings, one for each problem."""
    if isinstance(error, OSError):
        error = convert_os_error(error)
    problems = error.problems if isinstance(error, InputErrors) else (error,)
    return tuple(
        Finding.of(problem, check=FILES, claim=None, severity="error") for problem in problems
    )


def parts_not_judged(view: CheckpointView) -> Iterator[NotJudged]:
    """Yield the parts of a checkpoint that no check covers. PASS applies to all other parts."""
    target, known = view.model.target_version, view.model.version
    method = view.quantization.method
    uses_pinned = method is not None and not facts_of(known).has_rules_for(method.name)
    if target != known or uses_pinned:
        rules = short_version(PINNED if uses_pinned else known)
        what = f"changes in vLLM {short_version(target)}"
        yield NotJudged(what=what, why=f"vexport checks by the rules of vLLM {rules}")
    yield from class_not_judged(view)
    unsupported = unsupported_method(view)
    if unsupported is not None:
        why = f"vexport does not have vLLM's rules for the quantization method {unsupported!r}"
        yield NotJudged(what=NAMES, why=why)
        yield NotJudged(what=NUMBERS, why=why)
        return
    if has_quantized_outputs(view):
        why = "vexport does not check vLLM's scheme for static INT8 outputs (WNA8O8Int)"
        yield NotJudged(what=NUMBERS, why=why)
    yield from tensors_not_judged(view)


def _values_not_judged(
    view: CheckpointView, against: SourceComparison | None, findings: Sequence[Finding]
) -> Iterator[NotJudged]:
    """Yield an entry if neither digests nor the source can show that a value is wrong.

    If vexport does not support the quantization method, `parts_not_judged` has this entry already.
    """
    unjudged = () if unsupported_method(view) else tuple(shards.values_not_judged(view))
    if against is None:
        yield from unjudged
        return
    uncompared = [each for each in findings if each.rule in NOT_COMPARED]
    layers = [place for each in uncompared for place in each.every_place]
    if unjudged and layers:
        why = f"{plural(len(layers), 'layer')} could not be compared with the source: {layers[0]}"
        yield NotJudged(what=shards.VALUES, why=why)
