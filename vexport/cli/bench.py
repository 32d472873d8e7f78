"""How fast checkpoints are in vLLM here."""

from functools import partial
from pathlib import Path

import click

from vexport.cli.base import command, is_read, print_text, require_loaded
from vexport.cli.engine import Interpreter, Session, interpreter_option, serve_options, session_options
from vexport.cli.options import PATH, POSITIVE, Answer, concurrencies, format_option, stacked
from vexport.errors import Inconclusive
from vexport.errors.extras import attempt_all
from vexport.types import Workload

workload_options = stacked(
    click.option(
        "--concurrency",
        type=concurrencies,
        metavar="N,...",
        default="1,8,64",
        show_default=True,
        help="How many requests at once.",
    ),
    click.option(
        "--input-len", type=POSITIVE, metavar="N", default=256, show_default=True, help="Tokens of a prompt."
    ),
    click.option(
        "--output-len",
        type=POSITIVE,
        metavar="N",
        default=128,
        show_default=True,
        help="Tokens of an answer.",
    ),
)


@command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1)
@click.option("--baseline", metavar="SOURCE", help="Model to compare with, timed first.")
@workload_options
@click.option(
    "--results",
    type=PATH,
    metavar="FILE",
    multiple=True,
    help="JSON of `vllm bench serve` or guidellm to show too; repeatable.",
)
@interpreter_option
@serve_options
@session_options
@format_option(("text", "json", "html", "markdown"))
def bench(
    checkpoints: tuple[str, ...],
    baseline: str | None,
    workload: Workload,
    results: tuple[Path, ...],
    interpreter: Interpreter,
    tp: int | None,
    session: Session,
    answer: Answer,
) -> None:
    """Time each CHECKPOINT in vLLM, and a baseline.

    Random prompts, the same for all; no prefix cache; every answer goes to its last token. Each concurrency
    is run once to warm up and three times for the median, a fourth time where these deviate by more than 1 %.
    A checkpoint whose kernels are emulated on this machine has no measured speed: exit code 3.

    \b
    Examples:
      vexport bench OUT --baseline MODEL
      vexport bench OUT --concurrency 1,16 --input-len 1024 --format json
      vexport bench --results served.json
    """
    from vexport.cli.terminal import progress_display
    from vexport.engine.session import require_vllm
    from vexport.run.speed_results import read_speed_results

    names = {baseline: "baseline"} if baseline else {}
    names |= dict.fromkeys((name for name in checkpoints if name != baseline), "checkpoint")
    if not names and not results:
        raise click.UsageError("Give a CHECKPOINT, or --results.")
    reports = attempt_all((str(file), partial(read_speed_results, file)) for file in results)
    if names:
        require_vllm(interpreter.vllm_python)
        from vexport.run.timing import time_checkpoints

        with progress_display(quiet=answer.quiet) as on_progress:
            options = interpreter.options(session.serve_one(tp), on_progress)
            reports = [*time_checkpoints(names, workload, options), *reports]
    from vexport.reports import render_speeds

    print_text(render_speeds(reports, answer.format_))
    require_loaded(reports)
    for report in reports:
        if report.unmeasured:
            got = "no measured speed" if is_read() else f"no measured speed: {report.unmeasured}"
            raise Inconclusive(report.checkpoint, got=got, need="a measurement", fix="measure it on a GPU")
