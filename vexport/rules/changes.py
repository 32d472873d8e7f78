"""Rules of a version of vLLM that is compared with the baseline's version."""

from vexport.rules.book import Rule

_STAY = "stay with vLLM {baseline}, or measure the loss (`vexport eval`)"

REFUSED = Rule(
    "changes/refused",
    claim="refused",
    got="vLLM {version} refuses it: {reason}",
    need="a load, as in vLLM {baseline}",
    do="correct the cause that vLLM reports, or stay with vLLM {baseline}",
    loader_faults=(),
)
NOT_SHOWN = Rule(
    "changes/not-shown",
    "warning",
    got="the dry load cannot judge it in vLLM {version}: {reason}",
    need="a load, as in vLLM {baseline}",
    do="load it on such a GPU",
)
LOADS = Rule("changes/loads", "info", got="vLLM {version} loads it, and vLLM {baseline} does not")
PRECISION = Rule(
    "changes/precision",
    claim="precision",
    got="{after} in vLLM {version}",
    need="{before}, as in vLLM {baseline}",
    do=_STAY,
)
KERNEL = Rule(
    "changes/kernel",
    "warning",
    got="kernel changed from {before} (vLLM {baseline}) to {after} (vLLM {version})",
    do="measure the speed, and the accuracy on such a GPU",
)
LAYERS = Rule(
    "changes/layers",
    "warning",
    got="vLLM {version} and vLLM {baseline} build different kinds of layers here",
    do="compare both in `vexport load --dry` with two --vllm-python",
)
KL = Rule(
    "changes/kl",
    claim="values",
    got="KL {kl:.3g} from the log-probabilities of vLLM {baseline}",
    need="at most {limit:.3g}, which the order of roundings explains",
    do=_STAY,
)
TEXT = Rule(
    "changes/text",
    claim="values",
    got="other log-probabilities than in vLLM {baseline}: {reason}",
    do=_STAY,
)
