"""A model card: front matter that the Hugging Face hub reads, and what a user of the checkpoint asks.

The keys are those of https://huggingface.co/docs/hub/model-cards; `model-index` is that of Papers with Code,
which the hub shows as evaluation results.
"""

import re

import yaml

from vexport.reports.coverage import coverage_lines
from vexport.reports.formatting import percent, percent_interval, plural
from vexport.reports.markdown import safe, table
from vexport.reports.sentences import (
    engine_line,
    method_line,
    outcome_line,
    report_device,
    report_sentence,
    scale_of,
    schemes_in_use,
    served_with,
    size_change,
    task_title,
)
from vexport.types import Json, Report, TaskVerdict, Verdict

# A name on the hub, as huggingface_hub.utils.validate_repo_id has it; a local path is none.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# A release of vLLM: what else a report says stays out of a command.
_VERSION = re.compile(r"\d+(\.\d+){1,3}")
# A word of a command line, or the value of its option, that is an absolute path.
_ABSOLUTE = re.compile(r"(^|[\s='\"])(/[^\s'\"]*)")
_RECOVERY = ("Task", "Documents", "Baseline", "Quantized", "Recovery", "Answer")


def report(report: Report) -> str:
    """The card; copy it into the checkpoint as README.md before it is uploaded."""
    front = yaml.safe_dump(_front_matter(report), sort_keys=False, allow_unicode=False)
    made_of = f"{schemes_in_use(report.plan)} of {_source_name(report)}"
    parts = [
        f"---\n{front}---",
        f"# {safe(made_of)}",
        f"{safe(size_change(report.plan))}.",
        f"**{safe(outcome_line(report.outcome, report_device(report)))}**: {safe(report_sentence(report))}",
        _use(report),
        _accuracy(report.verdict) if report.verdict else "",
        _made(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(report: Report) -> dict[str, Json]:
    formats = [scheme.lower() for scheme in report.plan.schemes]
    front: dict[str, Json] = {
        key: value if isinstance(value, str) else list(value) for key, value in report.source_card.items()
    }
    front.setdefault("pipeline_tag", "text-generation")
    front["library_name"] = "vllm"
    front["tags"] = ["vllm", "compressed-tensors", "quantized", *formats]
    if (name := _source_name(report)) and _HUB_ID.fullmatch(name):
        front["base_model"] = name
        front["base_model_relation"] = "quantized"
    if report.verdict:
        results: list[Json] = [_result(task) for task in report.verdict.tasks]
        model = f"{schemes_in_use(report.plan)} of {_source_name(report)}"
        front["model-index"] = [{"name": model, "results": results}]
    return front


def _source_name(report: Report) -> str:
    """What the source is called; of a local path its last part, since a card is for others."""
    if report.source_name:
        return report.source_name
    return report.source if _HUB_ID.fullmatch(report.source) else _last(report.source)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _use(report: Report) -> str:
    """How to serve it: the vLLM that loaded it, under a name that the reader fills in."""
    version = report.load.engine.vllm if report.load.engine else ""
    install = f'pip install "vllm>={version}"\n' if _VERSION.fullmatch(version) else ""
    return f"## Use\n\n```sh\n{install}vllm serve PATH_OR_NAME_OF_THIS_CHECKPOINT\n```"


def _public(command: str) -> str:
    """A command line without the folders of the machine that it ran on."""
    return _ABSOLUTE.sub(lambda match: f"{match[1]}{_last(match[2])}", command)


def _result(task: TaskVerdict) -> Json:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": task.task, "type": task.task},
        "metrics": [
            {
                "type": task.metric,
                "name": task_title(task),
                "value": task.candidate.value,
                "verified": False,
            }
        ],
    }


def _accuracy(verdict: Verdict) -> str:
    return (
        "## Accuracy\n\nBoth models in vLLM on the same documents; in brackets two-sided intervals of "
        f"{100 * (1 - 2 * verdict.alpha):.4g}%.\n\n"
        f"{table(_RECOVERY, map(_recovery_row, verdict.tasks))}\n\n{safe(method_line(verdict))}"
    )


def _recovery_row(task: TaskVerdict) -> tuple[str, ...]:
    scale = scale_of(task)
    return (
        task_title(task),
        f"{task.documents:,}",
        f"{scale.value(task.baseline.value)} ({scale.interval(task.baseline.low, task.baseline.high)})",
        f"{scale.value(task.candidate.value)} ({scale.interval(task.candidate.low, task.candidate.high)})",
        f"{percent(task.recovery)} ({percent_interval(task.recovery_low, task.recovery_high)})",
        task.outcome,
    )


def _made(report: Report) -> str:
    kept = plural(len(report.plan.kept_linears), "linear layer")
    lines = [
        f"vexport {report.vexport}, {report.created}: {_public(report.command)}",
        f"calibrated on {plural(report.calibration_rows, 'row')}"
        if report.calibration_rows
        else "no calibration",
        f"{kept} kept",
        *coverage_lines(report.experts),
    ]
    if report.load.engine:
        lines.append(f"loaded in vLLM {engine_line(report.load.engine)}")
        if report.load.engine.settings:
            lines.append(f"served there with {served_with(report.load.engine)}")
        lines += [f"not shown there: {spot}" for spot in report.load.engine.blind_spots]
    return "## How it was made\n\n" + "\n".join(f"- {safe(line)}" for line in lines)
