"""The share of a checkpoint that one of several checks looks at: whole decoder layers."""

from dataclasses import replace

from vexport.checks.vllm.view import CheckpointView
from vexport.plan.linears import STACK
from vexport.types import Part


def share_of(view: CheckpointView, part: Part) -> CheckpointView:
    """A view of the tensors of a part alone; how vLLM reads them is told from all.

    Tensors are dealt out by the number of their decoder layer, so that layers that run as one stay together.
    """
    tensors = {name: tensor for name, tensor in view.index.tensors.items() if is_own(name, part)}
    share = CheckpointView(replace(view.index, tensors=tensors), view.reader, view.target)
    share.part, share.layout, share.method = part, view.layout, view.method
    return share


def is_own(tensor: str, part: Part | None) -> bool:
    """Whether a part looks at a tensor; without a part all are looked at."""
    if part is None:
        return True
    stack = STACK.search(tensor)
    return (int(stack[1]) if stack else 0) % part.of == part.number - 1
