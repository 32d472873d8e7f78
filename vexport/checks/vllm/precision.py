"""Report layers that vLLM runs in another precision than stored.

The static check derives the precision from the limits of the storage format. The dry load gets it
from the kernel that vLLM selects. Both use this module, so their findings have the same severity
and text.
"""

from collections.abc import Iterable

from vexport.formats.arguments import bits_of_inputs
from vexport.formats.gpus import GENERATIONS
from vexport.records import Finding
from vexport.rules import devices as rules


def layer_kinds(names: Iterable[str]) -> str:
    """Return the `where` of a finding on several kinds of layers: each name once, sorted."""
    return ", ".join(sorted({*names}))


def other_precision(where: str, *, stored: str, runs: str, capabilities: Iterable[int]) -> Finding:
    """Return the finding on layers stored as `stored`, such as W4A4, that run as `runs`.

    The finding is a warning if the inputs have fewer bits than stored, else a note. `capabilities`
    contains the SMs of the GPUs that run the layers as `runs`.
    """
    gpus = [*dict.fromkeys(GENERATIONS.get(sm, f"SM {sm}") for sm in capabilities)]
    bits = bits_of_inputs(runs)
    if bits < bits_of_inputs(stored):
        return Finding.at(rules.FEWER_BITS, where, runs=runs, gpus=gpus, bits=bits, stored=stored)
    return Finding.at(rules.MORE_BITS, where, runs=runs, gpus=gpus, stored=stored)
