"""Rules of `scheme: auto`."""

from vexport.rules.book import Rule

NO_LOSSES = Rule(
    "auto/no-losses",
    "warning",
    got="no losses in {folder}, so the plan shows the smallest candidate of each group",
    do="measure the losses in {candidates} with `vexport run`, which then chooses within "
    "{kind} {limit:g}",
)
BUDGET = Rule(
    "auto/budget",
    got="{limit:g}",
    need="at least {least}, the size with the smallest candidates",
    do="raise the budget, or add a smaller candidate",
)
NO_CANDIDATE = Rule(
    "auto/no-candidate",
    got="no candidate fits: {reason}",
    do="add keep to the candidates, or use on_unsupported_shape: keep",
)
UNMEASURABLE = Rule(
    "auto/unmeasurable",
    got="weights that the text model does not use",
    need="a layer whose loss can be measured on text",
    do="keep the layer, or give it a fixed scheme and remove the section sensitivity",
)
