"""The rounding of weights by calibration text, in sentences, findings and a section."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from vexport.reports import document as doc
from vexport.reports.document import PAGE, columns, muted, parts, row
from vexport.reports.formatting import count, percent, plural
from vexport.types import Finding
from vexport.types.rounding import GroupRounding, RoundingReport

CHECK = "rounding"
MAX_NAMED = 4
MAX_GROUPS = 400


def rounding_lines(rounding: RoundingReport | None) -> tuple[str, ...]:
    """Return how many groups were rounded in which way, how strongly, and what it gained."""
    if rounding is None:
        return ()
    kinds = Counter(group.rounding for group in rounding.groups)
    done = [group for group in rounding.groups if group.rounding != "nearest"]
    return tuple(
        filter(
            None,
            (
                ", ".join(f"{kind} of {plural(number, 'group')}" for kind, number in kinds.items()),
                _strength_line(done),
                _gain_line(done),
            ),
        )
    )


def _gain_line(groups: Sequence[GroupRounding]) -> str:
    """Return the error of the groups' outputs, and that of the nearest numbers."""
    if not groups:
        return ""
    before, after = (median(group.nearest_error for group in groups), median(group.error for group in groups))
    return f"output error {percent(after, 2)} of the signal, {percent(before, 2)} to nearest (median)"


def _strength_line(groups: Sequence[GroupRounding]) -> str:
    """Return the strengths and ridges of the refit: the most frequent of each strength."""
    kinds = Counter((group.strength, group.damping, group.weighs_tokens) for group in groups)
    most = dict[float, str]()
    for (strength, ridge, weighed), _ in kinds.most_common():
        if strength:
            weights = ", tokens weighed" if weighed else ""
            most.setdefault(strength, f"{strength:g} of the refit, ridge {ridge:g}{weights}")
    return "; ".join(most.values())


def fallback_lines(rounding: RoundingReport | None) -> tuple[str, ...]:
    """Return the groups rounded to nearest although a rule asks for more, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for group in rounding.fallbacks if rounding else ():
        reasons.setdefault(group.fallback or "", []).append(group.name)
    return tuple(f"{_named(names)} rounded to nearest: {reason}" for reason, names in reasons.items())


def _named(names: list[str]) -> str:
    more = f" and {count(len(names) - MAX_NAMED)} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def fallback_findings(rounding: RoundingReport | None) -> Iterator[Finding]:
    """A warning for each group that was rounded to nearest although a rule asks for more."""
    for group in rounding.fallbacks if rounding else ():
        yield Finding(
            check=CHECK,
            severity="warning",
            where=group.name,
            expected="weights rounded by what calibration text shows of their inputs",
            got=f"weights rounded to nearest: {group.fallback}",
            fix="calibrate with more rows, or give these layers a rule with rounding: nearest",
        )


def rounding_section(rounding: RoundingReport | None) -> doc.Section | None:
    """Every group with its output error before and after, and the hidden states' error of each layer."""
    if rounding is None:
        return None
    worst = sorted(rounding.groups, key=lambda group: -group.error)
    rows = tuple(map(_group_row, worst[:MAX_GROUPS]))
    titles = columns("Group", "Rounding", ">Nearest", ">Written", ">Strength", ">Ridge", ">Tokens/column")
    more = f"{count(len(worst) - MAX_GROUPS)} more in rounding.json"
    table = parts(doc.Table(titles, rows, stack=False), muted(more) if len(worst) > MAX_GROUPS else None)
    states = (row(str(number), percent(layer.state_error)) for number, layer in enumerate(rounding.layers))
    layers = doc.Table(columns(">Layer", ">Error of hidden states"), tuple(states), stack=False)
    return doc.Section(
        "Rounding",
        (
            doc.Details(doc.Cell("Groups from the largest output error down"), table),
            doc.Details(doc.Cell("Decoder layers: squared error of the hidden states"), (layers,)),
        ),
        anchor="rounding",
        lead=". ".join((*rounding_lines(rounding), *fallback_lines(rounding))) + ".",
        forms=PAGE,
    )


def _group_row(group: GroupRounding) -> tuple[doc.Cell, ...]:
    per_column = f"{group.tokens / group.columns:.1f}" if group.columns else ""
    errors = (percent(group.nearest_error), percent(group.error)) if group.tokens else ("", "")
    return row(
        doc.Cell(group.name, mono=True),
        group.fallback or group.rounding,
        *errors,
        f"{group.strength:g}",
        f"{group.damping:g}",
        per_column,
    )
