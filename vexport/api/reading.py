"""Functions that read results and the reference."""

from pathlib import Path

from vexport.api.arguments import VerdictArguments, with_keywords
from vexport.api.common import Name
from vexport.records import Verdict
from vexport.reports.catalog import CATALOGS, ReferenceSection, Rows, all_sections, find_section
from vexport.reports.run_record import Report


def _verdict(baseline_results: Name, results: Name, arguments: VerdictArguments) -> Verdict:
    """Compare two models' results, as `vexport verdict` does. Starts no model."""
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
    """Return the report of a run, as `vexport report` reads it. Raise InputError without one."""
    from vexport.run.directory import read_report

    return read_report(Path(run_dir))


def entries(what: str) -> Rows:
    """Return the rows of `vexport list`: schemes, observers, roundings, checks, architectures."""
    if what not in CATALOGS:
        raise ValueError(f"list: got {what!r}, need one of {', '.join(CATALOGS)}")
    return CATALOGS[what]()


def explain(name: str) -> ReferenceSection:
    """Return the section of the reference with this name, as `vexport explain NAME` shows it.

    Raises InputError if no section has this name.
    """
    return find_section(name)


def explain_all() -> tuple[ReferenceSection, ...]:
    """Return every section of the reference, as `vexport explain` lists them."""
    return all_sections()
