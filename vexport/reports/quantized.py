"""The answer of `quantize`: how much was quantized, how large it is, what to type next."""

import shlex

from vexport.files import to_json
from vexport.plan.shapes import KEPT
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.coverage import coverage_lines
from vexport.reports.document import facts
from vexport.reports.formatting import count, plural, ratio, size
from vexport.reports.rounding import fallback_lines, rounding_lines
from vexport.types import Calibration, ExpertCoverage, Finding, Plan, Quantized
from vexport.types.rounding import RoundingReport

# Of the weights of the linear layers in decoder layers, below which a checkpoint is hardly a quantized one.
LITTLE = 0.5


def quantized_answer(
    checkpoint: str,
    plan: Plan,
    calibration: Calibration | None,
    experts: tuple[ExpertCoverage, ...],
    rounding: RoundingReport | None,
) -> Quantized:
    """What `quantize` has written, in numbers."""
    members = [member for group in plan.groups for member in group.members]
    quantized = sum(one.out_features * one.in_features for one in members)
    return Quantized(
        checkpoint=checkpoint,
        source=plan.source,
        schemes=plan.schemes,
        layers=len(members),
        of_layers=len(members) + len(plan.kept_linears),
        quantized_parameters=quantized,
        parameters=plan.parameters,
        source_bytes=plan.source_bytes,
        output_bytes=plan.output_bytes,
        bits=8 * plan.output_bytes / plan.parameters if plan.parameters else 0.0,
        calibration_rows=len(calibration.rows) if calibration else 0,
        calibration_data=calibration.data if calibration else "",
        calibration_digest=calibration.digest if calibration else None,
        smoothing=plan.smoothing,
        smoothed_tensors=len(calibration.smoothing) if calibration else 0,
        experts=experts,
        rounding=rounding,
        warnings=(*_warnings(plan, len(members), quantized), *fallback_lines(rounding)),
        next_commands=(
            shlex.join(["vexport", "check", checkpoint]),
            shlex.join(["vllm", "serve", checkpoint]),
        ),
    )


def render_quantized(answer: Quantized, format_: str) -> str:
    """The answer as text or JSON (quantize.schema.json), with a final newline."""
    if format_ == "json":
        return to_json(answer)
    share = ratio(answer.quantized_parameters, answer.parameters)
    schemes = ", ".join(answer.schemes) or "nothing quantized"
    layers = f"{count(answer.layers)} of {count(answer.of_layers)} linear layers"
    change = f"{size(answer.source_bytes)} -> {size(answer.output_bytes)}"
    of_source = ratio(answer.output_bytes, answer.source_bytes)
    rows = facts(
        ("size", f"{change} ({of_source}), {answer.bits:.2f} bits per weight"),
        ("calibrated", _calibrated(answer)) if answer.calibration_digest else None,
        ("smoothed", _smoothed(answer)) if answer.smoothing else None,
        *(("experts", line) for line in coverage_lines(answer.experts)),
        *(("rounding", line) for line in rounding_lines(answer.rounding)),
        *(("next", command) for command in answer.next_commands),
    )
    title = doc.Paragraph(f"{answer.checkpoint}: {schemes}: {layers}, {share} of the weights")
    return text.render([doc.Document(title=answer.checkpoint, parts=(title, rows), wide=True)])


def _calibrated(answer: Quantized) -> str:
    """On how much of what the checkpoint was calibrated."""
    samples = plural(answer.calibration_rows, "sample")
    return (
        f"{samples} of {answer.calibration_data or 'text'}, sha256 {(answer.calibration_digest or '')[:16]}"
    )


def _smoothed(answer: Quantized) -> str:
    """How far, and how many tensors changed for it."""
    if not answer.smoothed_tensors:
        return "nothing: no channels of this model can be scaled without changing what it computes"
    return f"{plural(answer.smoothed_tensors, 'tensor')}, with strength {answer.smoothing:g}"


def _warnings(plan: Plan, layers: int, quantized: int) -> tuple[str, ...]:
    """That little was quantized, and why layers were kept that rules meant to quantize."""
    unsupported: dict[str, list[Finding]] = {}
    for note in plan.notes:
        if note.check == "shape":
            unsupported.setdefault(note.fix, []).append(note)
    warnings = []
    for fix, (first, *others_alike) in unsupported.items():
        more = f" and {count(len(others_alike))} more" if others_alike else ""
        warnings.append(f"{first.where}{more} {'stay 16 bit' if fix == KEPT else fix}: {first.got}")
    others = layers + len(plan.kept_linears)
    if quantized < LITTLE * plan.parameters and layers < LITTLE * others:
        share = ratio(quantized, plan.parameters)
        warnings.append(
            f"only {share} of the weights are quantized; `vexport plan SOURCE` shows the schemes that fit"
        )
    return tuple(warnings)
