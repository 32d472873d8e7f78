"""The parts of a checkpoint that the checks do not judge: PASS is said of the rest."""

from collections.abc import Iterator

from vexport.architectures.versions import nearest_version
from vexport.checks.completeness import unjudged as tensors_unjudged
from vexport.checks.config import has_quantized_outputs, other_method
from vexport.checks.vllm.view import CheckpointView
from vexport.records import NotJudged
from vexport.version import PINNED, short_version

NAMES = "names and shapes of tensors"
"""What vLLM's own loaders settle."""
NUMBERS = "quantized weights and their scales"


def unjudged(view: CheckpointView) -> Iterator[NotJudged]:
    """Return what of a checkpoint no check has looked at."""
    asked, known = view.target.vllm, nearest_version(view.target.vllm)
    if asked != known or view.method is not None and known != PINNED:
        rules = short_version(known if view.method is None else PINNED)
        yield NotJudged(
            what=f"what is new in vLLM {short_version(asked)}", why=f"the rules are those of {rules}"
        )
    method = other_method(view)
    if method is not None:
        why = f"vLLM loads {method!r} by code whose rules vexport does not have"
        yield NotJudged(what=NAMES, why=why)
        yield NotJudged(what=NUMBERS, why=why)
        return
    if has_quantized_outputs(view):
        yield NotJudged(what=NUMBERS, why="vLLM runs static INT8 outputs in a scheme of its own (WNA8O8Int)")
    for entry in tensors_unjudged(view):
        what, _, why = entry.partition(": ")
        yield NotJudged(what=what, why=why)
