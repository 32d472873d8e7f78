"""Functions that read results and the reference."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vexport.api.arguments import VerdictArguments, with_keywords
from vexport.api.common import Name, named
from vexport.errors import raise_all
from vexport.errors.extras import attempt_all
from vexport.records import History, Verdict
from vexport.reports.catalog import CATALOGS, ReferenceSection, Rows, all_sections, find_section
from vexport.reports.run_record import Report


def _verdict(baseline_results: Name, results: Name, arguments: VerdictArguments) -> Verdict:
    """Compare two models' results, as `vexport verdict` does. Starts no model."""
    from vexport.judge.verdict import decide

    return decide(
        Path(baseline_results),
        Path(results),
        margin=arguments.margin,
        alpha=arguments.alpha,
        gate=arguments.gate,
        tasks=arguments.tasks,
    )


verdict = with_keywords(VerdictArguments, _verdict)


def report(run_dir: Name) -> Report:
    """Return the report of a run, as `vexport report` reads it.

    Raises InputError if the run directory has no report.
    """
    from vexport.run.directory import read_report

    return read_report(Path(named("report: run_dir", run_dir)))


def history(results: Sequence[Name]) -> History:
    """Return the results of one model, oldest first, as `vexport report` shows several runs.

    Each result is a run directory, its report.json, or an accepted baseline. Raises the errors of
    all results that cannot be read, or that are given twice.
    """
    from vexport.run.history import history_of, read_result, without_repetitions

    paths = [Path(named("history: results", result)) for result in results]
    read = attempt_all([(str(path), partial(read_result, path)) for path in paths])
    found, doubles = without_repetitions(read)
    raise_all(doubles)
    return history_of(found)


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
