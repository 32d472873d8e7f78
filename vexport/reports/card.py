"""Write a model card: front matter for the Hugging Face hub, and facts for users of the checkpoint.

The keys are documented in https://huggingface.co/docs/hub/model-cards. huggingface_hub's classes
write them.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from vexport.errors import InputError, visible
from vexport.quantize.warnings import fallback_warnings
from vexport.records import Verdict
from vexport.reports.accuracy import task_table, text_table
from vexport.reports.document import Listing, Paragraph, Section, parts, row
from vexport.reports.formatting import (
    coverage_lines,
    engine_line,
    outcome_line,
    report_sentence,
    served_with,
    size_change,
    task_title,
)
from vexport.reports.layers import rounding_lines
from vexport.reports.renderers.markdown import render_parts, safe
from vexport.reports.run_record import MadeCheckpoint, Report, Source
from vexport.rules import results as rules
from vexport.words import plural

# Matches a name on the hub (see huggingface_hub.utils.validate_repo_id), but no absolute or nested
# local path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# The version of a vLLM release. The command that installs vLLM has no other text from a report.
_VERSION = re.compile(r"\d+(\.\d+){1,3}")
# An absolute path in a command line, as a word or as the value of an option.
_ABSOLUTE = re.compile(r"(^|[\s='\"])(/[^\s'\"]*)")


def render(report: Report) -> str:
    """Return the card. Users copy it into the checkpoint as README.md before they upload it."""
    made = _made(report)
    answer = (
        f"**{safe(outcome_line(report.outcome, report.device, ignored=report.ignored))}**: "
        f"{safe(report_sentence(report))}"
    )
    title = f"# {safe(_model_name(made))}\n\n{safe(size_change(made.plan))}."
    # The version of vLLM that loaded the checkpoint. Readers fill in the checkpoint's name.
    version = report.load.engine.vllm if report.load and report.load.engine else ""
    install = f'pip install "vllm>={version}"\n' if _VERSION.fullmatch(version) else ""
    content = parts(
        Section(
            "Use", (Paragraph(f"{install}vllm serve PATH_OR_NAME_OF_THIS_CHECKPOINT", "code"),)
        ),
        _accuracy(report.verdict) if report.verdict else None,
        Section("How it was made", (Listing(row(*_facts(report, made))),)),
    )
    head = f"---\n{_front_matter(report, made)}\n---"
    return f"{head}\n\n{title}\n\n{answer}\n\n{render_parts(content, 2)}\n"


def _made(report: Report) -> MadeCheckpoint:
    """Return the checkpoint. Raise InputError for a given checkpoint, because it has no plan."""
    if report.made is None:
        raise InputError.of(rules.GIVEN_CHECKPOINT, report.name)
    return report.made


def _front_matter(report: Report, made: MadeCheckpoint) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    source = _source_name(made.source)
    base = source if _HUB_ID.fullmatch(source) else None
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=visible(task.task),
            dataset_name=visible(task.task),
            metric_type=visible(task.metric),
            metric_name=visible(task_title(task)),
            metric_value=task.candidate.value,
            verified=False,
        )
        for task in (report.verdict.tasks if report.verdict else ())
    ]
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if base else None,
        language=list(_inherited(made.source, "language")) or None,
        library_name="vllm",
        license=_first(made.source, "license"),
        license_name=_first(made.source, "license_name"),
        license_link=_first(made.source, "license_link"),
        model_name=_model_name(made) if results else None,
        eval_results=results or None,
        pipeline_tag=_first(made.source, "pipeline_tag") or "text-generation",
        tags=[
            "vllm",
            "compressed-tensors",
            "quantized",
            *(visible(name.lower()) for name in made.plan.schemes),
        ],
    )
    return str(data.to_yaml())


def _inherited(source: Source, key: str) -> tuple[str, ...]:
    value = source.card.get(key, ())
    return tuple(map(visible, (value,) if isinstance(value, str) else value))


def _first(source: Source, key: str) -> str | None:
    return next(iter(_inherited(source, key)), None)


def _model_name(made: MadeCheckpoint) -> str:
    return visible(f"{made.scheme_names} of {_source_name(made.source)}")


def _source_name(source: Source) -> str:
    """Return the name of the source.

    For a local path, return its last part only: cards are public.
    """
    is_on_hub = _HUB_ID.fullmatch(source.name)
    return source.id or (source.name if is_on_hub else PurePosixPath(source.name).name)


def _accuracy(verdict: Verdict) -> Section:
    if verdict.text is not None:
        return Section("Accuracy", (text_table(verdict, verdict.text),))
    level = f"{100 * (1 - 2 * verdict.alpha):.4g}%"
    note = f"Both models in vLLM on the same documents; in brackets two-sided intervals of {level}."
    return Section("Accuracy", (Paragraph(note), task_table(verdict)))


def _facts(report: Report, made: MadeCheckpoint) -> Iterator[str]:
    """Yield the command, facts on quantization and load, and what the load could not verify.

    Absolute paths in the command are cut to their last part, because cards are public.
    """
    command = _ABSOLUTE.sub(
        lambda match: f"{match[1]}{PurePosixPath(match[2]).name}", report.call.command
    )
    calibration = made.calibration
    yield f"vexport {report.call.vexport}, {report.call.created}: {command}"
    yield f"calibrated on {plural(calibration.rows, 'row')}" if calibration else "no calibration"
    yield f"{plural(len(made.plan.kept_linears), 'linear layer')} kept"
    yield from coverage_lines(calibration.experts if calibration else ())
    yield from rounding_lines(made.rounding)
    yield from fallback_warnings(made.rounding)
    engine = report.load.engine if report.load else None
    if engine:
        yield f"loaded in vLLM {engine_line(engine)}"
        if engine.settings:
            yield f"served there with {served_with(engine)}"
        yield from (f"not verified there: {spot}" for spot in engine.blind_spots)
