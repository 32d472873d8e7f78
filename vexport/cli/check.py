"""`check`: a checkpoint judged from its files alone."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vexport.cli.base import (
    add_step_summary,
    command,
    print_text,
    progress_display,
    require_judged,
    require_no,
    require_ok,
)
from vexport.cli.engine import Interpreter, interpreter_option
from vexport.cli.options import (
    Answer,
    device_options,
    format_option,
    option,
    speculative_option,
    vllm_option,
)
from vexport.errors import VexportError
from vexport.errors.extras import attempt, raise_problems
from vexport.records import CheckReport, OnProgress

if TYPE_CHECKING:
    from vexport.checks import Against
    from vexport.checks.vllm.view import Target


@command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@option(
    "--source",
    "The unquantized checkpoint (folder or hub id): every weight is dequantized and compared "
    "with it, all "
    "else must be the same.",
    heading="Comparison",
    metavar="SOURCE",
)
@option(
    "--digests",
    "Compare files with a list of sha256sum, with paths relative to CHECKPOINT, or with "
    "vexport.json (up to "
    "8 GB unasked).",
    metavar="FILE",
)
@device_options
@vllm_option
@option(
    "--static",
    "Judge by the files alone, without a dry load in vLLM.",
    heading="vLLM",
    flag=True,
    envvar="VEXPORT_NO_VERIFY",
)
@interpreter_option
@speculative_option
@option("--strict", "Exit with 3 if something was not judged.", heading="vLLM", flag=True)
@option(
    "--all every",
    "List each finding, and vLLM's own words of a refusal in full; text has findings of one "
    "kind as one.",
    heading="Output",
    flag=True,
)
@format_option()
def check(
    checkpoints: tuple[str, ...],
    source: str | None,
    digests: str | None,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    vllm: tuple[int, int] | None,
    static: bool,
    interpreter: Interpreter,
    speculative: str,
    strict: bool,
    every: bool,
    answer: Answer,
) -> None:
    """Check that vLLM will load each CHECKPOINT correctly.

    Reads files of any producer, without a GPU. Where vLLM is installed its own loaders judge them
    as well (about 10 seconds; not with --static). What was not judged is listed. --tp and --sm also
    check that it runs on such GPUs, in the precision that is stored; --vllm checks against another
    version. `vexport list checks` lists the checks.

    \b
    Examples:
      vexport check OUT
      vexport check OUT --static --strict
      vexport check OUT --tp 1,2,4 --sm 80,90
      vexport check OUT --source MODEL
      vexport check OUT --digests vexport.json
      vexport check checkpoints/* --format junit -o check.xml
    """
    from vexport.checks import CHECKS, FILES, INTERNAL
    from vexport.checks.vllm.view import Target
    from vexport.engine.installed import installed_version
    from vexport.reports import render_checks, summarize_checks

    with progress_display(quiet=answer.quiet) as on_progress:
        if speculative:
            from vexport.checkpoint.source import resolve_drafter

            speculative = resolve_drafter(speculative, on_progress)
        vllm = vllm or installed_version(interpreter.vllm_python)
        target = Target(tp=tp or (), sm=sm or (), vllm=vllm, speculative=speculative)
        against = _against(source, on_progress)
        folders = {name: attempt(partial(_folder, name, on_progress), name) for name in checkpoints}
        problems = {
            name: error for name, error in folders.items() if isinstance(error, VexportError)
        }
        roots = {name: root for name, root in folders.items() if isinstance(root, Path)}
        read = partial(_checked, checkpoints, roots, problems, target, against, digests)
        if static:
            reports = read()
        else:
            from vexport.engine.gate import checked_in_vllm

            reports = checked_in_vllm(
                roots,
                target,
                read,
                vllm_python=interpreter.vllm_python,
                trust_remote_code=interpreter.trust_remote_code,
                on_progress=on_progress,
                source=against.root if against is not None else None,
            )
    if answer.format_ != "text" or len(problems) < len(folders):
        print_text(render_checks(reports, answer.format_, (FILES, *CHECKS), every=every))
    if answer.format_ == "github":
        add_step_summary(summarize_checks(reports))
    require_no(INTERNAL, reports)
    raise_problems([*problems.values()])
    for report in reports:
        require_ok(report.checkpoint, report.ok, report.findings)
    if strict:
        require_judged(reports)


def _folder(name: str, on_progress: OnProgress) -> Path:
    """The folder of a checkpoint, or of a model of the hub where there is no such folder."""
    from vexport.files import user_path

    if (folder := user_path(name)).exists():
        return folder
    from vexport.checkpoint.source import resolve_source

    return resolve_source(name, on_progress)


def _checked(
    names: Sequence[str],
    roots: Mapping[str, Path],
    problems: dict[str, VexportError],
    target: "Target",
    against: "Against | None",
    digests: str | None,
) -> list[CheckReport]:
    """A report for each name; `problems` gets the errors of those that could not be read."""
    from vexport.checks import check_checkpoint, findings_of
    from vexport.outputs.digests import named_digests

    def check(name: str) -> CheckReport:
        digests_of_files = named_digests(digests, roots[name])
        return check_checkpoint(name, target, against, root=roots[name], digests=digests_of_files)

    outcomes = {name: attempt(partial(check, name), name) for name in roots}
    problems |= {name: error for name, error in outcomes.items() if isinstance(error, VexportError)}
    reports = [report for report in outcomes.values() if isinstance(report, CheckReport)]
    for name, error in problems.items():
        reports.append(CheckReport(checkpoint=name, ok=False, findings=findings_of(error)))
    return sorted(reports, key=lambda report: names.index(report.checkpoint))


def _against(source: str | None, on_progress: OnProgress) -> "Against | None":
    """The comparison with a source, which alone needs torch."""
    if source is None:
        return None
    from vexport.errors.extras import require_extra

    require_extra("torch", "--source")
    from vexport.fidelity.compare import against

    return against(_folder(source, on_progress), on_layer=partial(on_progress, "compare (layers)"))
