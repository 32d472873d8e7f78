"""Converts a checkpoint of another quantization method to compressed-tensors, and proves each layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from vexport.checkpoint.identity import sure
from vexport.checkpoint.index import SourceIndex, read_index, require_checkpoint
from vexport.checkpoint.quantization import SEPARATE_FILE
from vexport.checkpoint.reader import Reader
from vexport.checks import findings_on, shards
from vexport.checks.vllm.quant_methods import METHODS, MethodGroup, QuantMethod
from vexport.checks.vllm.translated import Translated, translate
from vexport.checks.vllm.view import CheckpointView, error
from vexport.errors import InputError
from vexport.fidelity.dequantize import read_parameters, weight_of
from vexport.fidelity.quant_methods import own_weight
from vexport.outputs import NamedPath, new_directory, refuse_existing, require_separate, working_folder
from vexport.repair.write import write_repaired
from vexport.types import Finding, OnProgress

NAME = "convert"
# Files that say of the old tensors how they are packed.
OLD_CONFIGS = (SEPARATE_FILE, "quantize_config.json", "quant_config.json")
# A number that is stored as its reciprocal may move by the last bit of float32, and a weight that rounds the
# other way for it by the last bit of bfloat16.
LAST_BIT = 2.0**-7


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What was converted: `exact` of the quantized `layers` dequantize to the same values, bit for bit.

    The others differ in the last bit, because a global scale is stored as its reciprocal. `ok` means that
    `out` was written and that `vexport check` finds no error in it.
    """

    checkpoint: str
    out: str
    ok: bool
    method: str
    layers: int
    exact: int
    findings: tuple[Finding, ...]


def convert_checkpoint(
    checkpoint: Path, out: Path, *, overwrite: bool, on_progress: OnProgress
) -> ConvertReport:
    """Write `checkpoint` in compressed-tensors to the folder `out`, whole or not at all.

    Nothing is written where a layer cannot be translated, does not dequantize to the same values by its
    producer's formula and by compressed-tensors, or where the result has an error. Raises InputError for
    folders that are no checkpoints of a method that is known, and where `out` may not be written.
    """
    return sure(partial(_convert, checkpoint, out, overwrite=overwrite, on_progress=on_progress))


def _convert(
    checkpoint: Path,
    out: Path,
    prepare: Callable[[SourceIndex], SourceIndex],
    *,
    overwrite: bool,
    on_progress: OnProgress,
) -> ConvertReport:
    require_checkpoint(checkpoint)
    require_separate(
        [NamedPath(label="OUT", path=path) for path in (out, working_folder(out))],
        [NamedPath(label="CHECKPOINT", path=checkpoint)],
    )
    refuse_existing(out, overwrite=overwrite)
    with Reader() as reader:
        view = CheckpointView(prepare(read_index(checkpoint)), reader)
        method = _require_method(view)
        translated = translate(view)
        findings = [*_untranslated(view, method, translated)]
        exact = 0
        for number, (layer, group) in enumerate(translated.layers.items() if not findings else ()):
            relative = _difference(view, translated, layer, group)
            exact += relative == 0
            if relative > (LAST_BIT if group.stored_as.reciprocals else 0):
                findings.append(_wrong(layer, f"values that differ by {relative:.2g}"))
            on_progress("compare (layers)", number + 1, len(translated.layers))
        # All but the family that compares names with the files, which are still the old ones.
        later = () if findings else findings_on(translated.view)
        findings += dict.fromkeys(each for each in later if each.check != shards.NAME)
        ok = all(each.severity != "error" for each in findings)
        if ok:
            side_files = (path for path in view.index.side_files if path.name not in OLD_CONFIGS)
            index = replace(translated.view.index, side_files=tuple(side_files))
            with new_directory(out, overwrite=overwrite) as folder:
                write_repaired(CheckpointView(index, translated.view.reader), folder, on_progress=on_progress)
    return ConvertReport(
        checkpoint=str(checkpoint),
        out=str(out),
        ok=ok,
        method=method.name,
        layers=len(translated.layers),
        exact=exact,
        findings=tuple(findings),
    )


def _require_method(view: CheckpointView) -> QuantMethod:
    if view.method is not None:
        return view.method
    named = (view.quantization or {}).get("quant_method")
    raise InputError(
        view.quantization_place,
        got=f"quant_method {named!r}" if view.quantization is not None else "no quantization_config",
        need=f"a checkpoint of {', '.join(METHODS)}",
        fix="quantize from the source (`vexport quantize`)",
    )


def _untranslated(view: CheckpointView, method: QuantMethod, translated: Translated) -> Iterator[Finding]:
    """What keeps a checkpoint from being converted: its config, its tensors, numbers of another meaning."""
    if method.stays:
        yield _wrong(view.quantization_place, f"{method.name}: {method.stays}")
    for problem in (each for each in method.problems if each.severity == "error"):
        where = f"{view.quantization_place}.{problem.where}"
        yield error(NAME, where, expected=problem.expected, got=problem.got, fix=problem.fix)
    for fused in view.fused_linears:
        group = view.group_of(fused)
        if not isinstance(group, MethodGroup) or not fused.is_quantized:
            continue
        for layer, parameters in fused.members.items():
            if layer not in translated.layers:
                yield _wrong(layer, "tensors of other names, dtypes or shapes; see `vexport check`")
                continue
            for problem in group.stored_as.unusable(group, parameters, view.reader):
                if problem.severity == "error":
                    where = f"{layer}.{problem.where}"
                    yield error(NAME, where, expected=problem.expected, got=problem.got, fix=problem.fix)


def _difference(view: CheckpointView, translated: Translated, layer: str, group: MethodGroup) -> float:
    """How far a layer's weights by the two formulas are apart, relative to the largest; 0 if bit for bit."""
    stored = _parameters(view, layer)
    made = _parameters(translated.view, layer)
    old = own_weight(group, stored)
    new = weight_of(group.translated, made)
    if torch.equal(old.to(new.dtype), new):
        return 0.0
    old, new = old.double(), new.double()
    return float(((old - new).abs() / old.abs().clamp_min(torch.finfo(torch.float32).tiny)).max())


def _parameters(view: CheckpointView, layer: str) -> dict[str, torch.Tensor]:
    start = f"{layer}."
    tensors = {
        name.removeprefix(start): tensor
        for name, tensor in view.index.tensors.items()
        if name.startswith(start)
    }
    values = read_parameters(view, tensors)
    view.reader.release(tensors.values())
    return values


def _wrong(where: str, got: str) -> Finding:
    fix = "quantize from the source (`vexport quantize`)"
    return error(NAME, where, expected="a layer that compressed-tensors can hold as it is", got=got, fix=fix)


def errors(report: ConvertReport) -> Sequence[Finding]:
    """What kept a checkpoint from being converted."""
    return [each for each in report.findings if each.severity == "error"]
