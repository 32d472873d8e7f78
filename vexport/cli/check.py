"""The command `check`: find faults of checkpoints in their files."""

from typing import TYPE_CHECKING

import click

from vexport.cli.base import (
    add_step_summary,
    command,
    print_text,
    progress_display,
    require_all_ok,
    require_judged,
    require_no_findings_of,
    text_width,
)
from vexport.cli.engine import Interpreter, interpreter_option
from vexport.cli.options import (
    OutputOptions,
    device_options,
    format_option,
    gpu_names_option,
    option,
    speculative_option,
    vllm_option,
)
from vexport.errors import VexportError
from vexport.errors.extras import raise_problems
from vexport.names import SourceRef, parse_source

if TYPE_CHECKING:
    from vexport.formats.gpus import Card


@command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True, type=parse_source)
@option(
    "--source",
    "Unquantized checkpoint (folder or hub id). Every weight is dequantized and compared with it. "
    "Everything else must be equal.",
    parse_source,
    "SOURCE",
    heading="Comparison",
)
@option(
    "--digests",
    "Compare the files with digests from sha256sum's output (paths relative to CHECKPOINT) or from "
    "vexport.json. Weights of up to 8 GB are compared with vexport.json by default.",
    metavar="FILE",
)
@option(
    "--hub-digests",
    "Compare a download with the digests of the hub.",
    flag=True,
)
@device_options
@gpu_names_option
@vllm_option
@option(
    "--static",
    "Check only the files, without a dry load in vLLM.",
    heading="vLLM",
    flag=True,
    envvar="VEXPORT_NO_VERIFY",
)
@interpreter_option
@speculative_option
@option(
    "--strict",
    "Exit with code 3 if something could not be judged. If another tool wrote CHECKPOINT, this "
    "needs --source or --digests to judge the values.",
    heading="vLLM",
    flag=True,
)
@option(
    "--ignore-rule ignore_rules",
    "Silence one rule by its ID, such as config/unknown-key. The first line names it; repeatable.",
    heading="Output",
    metavar="ID",
    multiple=True,
)
@option(
    "--all every",
    "List every finding separately, with vLLM's messages in full.",
    heading="Output",
    flag=True,
)
@format_option()
def check(
    checkpoints: tuple[SourceRef, ...],
    source: SourceRef | None,
    digests: str | None,
    hub_digests: bool,
    tp: tuple[int, ...] | None,
    sm: tuple[int, ...] | None,
    cards: tuple["Card", ...] | None,
    vllm: tuple[int, int] | None,
    static: bool,
    interpreter: Interpreter,
    speculative: str,
    strict: bool,
    ignore_rules: tuple[str, ...],
    every: bool,
    output: OutputOptions,
) -> None:
    """Check whether vLLM will load each CHECKPOINT correctly.

    Reads checkpoints of any producer in about a second, without a GPU. If vLLM is installed, its
    loaders check the files too (10 to 20 seconds; not with --static). The output lists everything
    that could not be judged. With --tp, --sm or --gpu, also check whether the checkpoint runs on
    these GPUs in its stored precision. `vexport list checks` lists the checks.

    \b
    Examples:
      vexport check OUT
      vexport check OUT --tp 1,2,4 --sm 80,90
      vexport check OUT --gpu L40S,H100
      vexport check OUT --source MODEL
      vexport check OUT --digests vexport.json
      vexport check OUT --ignore-rule versions/unknown-version
      vexport check checkpoints/* --format junit -o check.xml
    """
    from vexport.api.checking import CheckSettings, check_checkpoints
    from vexport.checks import CHECKS, FILES, INTERNAL
    from vexport.formats.gpus import with_cards
    from vexport.reports import render_checks, summarize_checks

    problems: list[VexportError] = []
    faults: list[VexportError] = []
    # Comparing with a source imports torch, which takes seconds.
    reads = [] if source is None else [*checkpoints, source]
    with progress_display(quiet=output.quiet, reads=reads) as on_progress:
        settings = CheckSettings(
            tp=tp or (),
            sm=with_cards(sm or (), cards or ()),
            vllm=vllm,
            source=source,
            digests=digests,
            hub_digests=hub_digests,
            speculative=speculative,
            static=static,
            ignore_rules=ignore_rules,
            vllm_python=interpreter.vllm_python,
            trust_remote_code=interpreter.trust_remote_code,
            on_progress=on_progress,
        )
        reports = check_checkpoints(checkpoints, settings, problems.append, faults.append)
    if output.format_ != "text" or len(problems) < len(reports):
        print_text(
            render_checks(
                reports, output.format_, (FILES, *CHECKS), every=every, width=text_width()
            )
        )
    if output.format_ == "github":
        add_step_summary(summarize_checks(reports))
    require_no_findings_of(INTERNAL, reports)
    raise_problems(problems)
    require_all_ok(reports)
    raise_problems(faults)
    if strict:
        require_judged(reports)
