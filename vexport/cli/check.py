"""Will vLLM load a checkpoint: from its files alone."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from vexport.cli.base import add_step_summary, command, print_text, require_no_internal_error, require_ok
from vexport.cli.options import Answer, device_options, format_option, vllm_option
from vexport.errors import VexportError, file_problem
from vexport.errors.extras import raise_problems
from vexport.types import CheckReport

if TYPE_CHECKING:
    from vexport.checks import Against
    from vexport.checks.vllm.view import Target
    from vexport.types import OnProgress


@command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option(
    "--source",
    metavar="SOURCE",
    help="The unquantized checkpoint (folder or hub id) that each CHECKPOINT was made from: every weight is "
    "dequantized and compared with it, all else must be the same.",
)
@click.option(
    "--digests",
    metavar="FILE",
    help="Compare files with this list of sha256sum, whose paths are relative to CHECKPOINT; `vexport.json` "
    "is the checkpoint's own, with which up to 8 GB are compared unasked.",
)
@device_options
@vllm_option
@click.option("--all", "every", is_flag=True, help="List each finding; text has those of one kind as one.")
@format_option()
def check(
    checkpoints: tuple[str, ...],
    source: str | None,
    digests: str | None,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    vllm: tuple[int, int],
    every: bool,
    answer: Answer,
) -> None:
    """Check that vLLM will load each CHECKPOINT correctly.

    Reads files only: no GPU, no vLLM. Works for checkpoints of any producer. --tp and --sm also check that it
    runs on such GPUs, in the precision that is stored; --vllm checks against another version.
    `vexport list checks` lists the checks.

    \b
    Examples:
      vexport check OUT
      vexport check OUT --tp 1,2,4 --sm 80,90
      vexport check OUT --source MODEL
      vexport check OUT --digests vexport.json
      vexport check checkpoints/* --format junit -o check.xml
    """
    from vexport.checks import CHECKS, FILES
    from vexport.checks.vllm.view import Target
    from vexport.cli.terminal import progress_display
    from vexport.reports import render_checks, summarize_checks

    target = Target(tp=tp or (), sm=sm or (), vllm=vllm)
    with progress_display(quiet=answer.quiet) as on_progress:
        against = _against(source, on_progress)
        reports, problems = _checked(checkpoints, target, against, digests, on_progress)
    if answer.format_ != "text" or len(problems) < len(reports):
        print_text(render_checks(reports, answer.format_, (FILES, *CHECKS), every=every))
    if answer.format_ == "github":
        add_step_summary(summarize_checks(reports))
    require_no_internal_error(reports)
    raise_problems(problems)
    for report in reports:
        require_ok(report.checkpoint, report.ok, report.findings)


def _checked(
    names: Sequence[str],
    target: "Target",
    against: "Against | None",
    digests: str | None,
    on_progress: "OnProgress",
) -> tuple[list[CheckReport], list[VexportError]]:
    """A report for each name, and why some could not be read: no checkpoints at all, or a fault elsewhere."""
    from vexport.checkpoint.source import resolve_source
    from vexport.checks import check_checkpoint, findings_of, internal_error
    from vexport.outputs.digests import named_digests

    reports, problems = list[CheckReport](), list[VexportError]()
    for name in names:
        try:
            root = resolve_source(name, on_progress)
            known = named_digests(digests, root)
            reports.append(check_checkpoint(name, target, against, root=root, digests=known))
        except (VexportError, OSError) as error:
            problem = file_problem(error) if isinstance(error, OSError) else error
            problems.append(problem)
            reports.append(CheckReport(checkpoint=name, ok=False, findings=findings_of(problem)))
        except Exception as error:
            findings = (internal_error(f"the check of {name}", error),)
            reports.append(CheckReport(checkpoint=name, ok=False, findings=findings))
    return reports, problems


def _against(source: str | None, on_progress: "OnProgress") -> "Against | None":
    """The comparison with a source, which alone needs torch."""
    if source is None:
        return None
    from vexport.checkpoint.source import resolve_source
    from vexport.errors.extras import require_extra

    require_extra("torch", "--source")
    from vexport.fidelity.compare import against

    root = resolve_source(source, on_progress)
    return against(root, on_layer=partial(on_progress, "compare (layers)"))
