"""Functions that read checkpoints, results and the reference."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vexport.api.arguments import VerdictArguments, with_keywords
from vexport.checkpoint.source import resolve_drafter, resolve_source
from vexport.checks import check_checkpoint
from vexport.checks.vllm.view import Target
from vexport.engine.installed import installed_version
from vexport.outputs.digests import named_digests
from vexport.records import CheckReport, OnProgress, Verdict, silent
from vexport.reports.catalog import CATALOGS, Rows, find_section
from vexport.reports.report import Report
from vexport.version import Version

Name = str | Path


def check(
    checkpoint: Name,
    *,
    tp: Sequence[int] = (),
    sm: Sequence[int] = (),
    vllm: Version | None = None,
    source: Name | None = None,
    digests: Name | None = None,
    speculative: str = "",
    static: bool = False,
    vllm_python: Path | None = None,
    trust_remote_code: bool = False,
    on_progress: OnProgress = silent,
) -> CheckReport:
    """Return whether vLLM loads a checkpoint, as `vexport check` says; `source` compares the
    weights as well.

    Where vLLM is installed its own loaders are asked too, unless `static` or VEXPORT_NO_VERIFY is
    set. `vllm` is the version whose rules are used: by default the one of `vllm_python`, or of this
    environment.
    """
    against = None
    if source is not None:
        from vexport.fidelity.compare import against as compared

        origin = resolve_source(str(source), on_progress)
        against = compared(origin, on_layer=partial(on_progress, "compare (layers)"))
    drafter = resolve_drafter(speculative, on_progress)
    vllm = vllm or installed_version(vllm_python)
    target = Target(tp=tuple(tp), sm=tuple(sm), vllm=vllm, speculative=drafter)
    root = resolve_source(str(checkpoint), on_progress)
    known = named_digests(None if digests is None else str(digests), root)
    read = partial(check_checkpoint, str(checkpoint), target, against, root=root, digests=known)
    if static or os.environ.get("VEXPORT_NO_VERIFY"):
        return read()
    from vexport.engine.gate import checked_in_vllm

    (report,) = checked_in_vllm(
        {str(checkpoint): root},
        target,
        lambda: [read()],
        vllm_python=vllm_python,
        trust_remote_code=trust_remote_code,
        on_progress=on_progress,
        source=against.root if against is not None else None,
    )
    return report


def _verdict(baseline_results: Name, results: Name, arguments: VerdictArguments) -> Verdict:
    """Compare two folders of lm-eval's results, as `vexport verdict` does. Starts no model."""
    from vexport.evaluation.verdict import decide

    return decide(
        Path(baseline_results),
        Path(results),
        margin=arguments.margin,
        alpha=arguments.alpha,
        gate=arguments.gate,
    )


verdict = with_keywords(VerdictArguments, _verdict)


def report(run_dir: Name) -> Report:
    """The report of a run, as `vexport report` reads it; InputError where there is none."""
    from vexport.run.directory import read_report

    return read_report(Path(run_dir))


def entries(what: str) -> Rows:
    """The rows of `vexport list`: of schemes, observers, roundings, checks or architectures."""
    if what not in CATALOGS:
        raise ValueError(f"list: got {what!r}, need one of {', '.join(CATALOGS)}")
    return CATALOGS[what]()


def explain(name: str) -> str:
    """The section of the reference with that heading, in Markdown; InputError where there is
    none.
    """
    return find_section(name).text
