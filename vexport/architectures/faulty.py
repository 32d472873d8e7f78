"""Report layers with a known fault of vLLM.

The static check and a plan take the kernels from a record, and a dry load from vLLM. All of them
use this module.
"""

from collections.abc import Iterable

from vexport.architectures.faults import FAULTS, Effect, FaultyLayer
from vexport.records import Finding
from vexport.rules import faults as rules
from vexport.rules.book import Rule

_RULES: dict[Effect, Rule] = {
    "crash": rules.CRASH,
    "wrong-numbers": rules.WRONG_NUMBERS,
    "fewer-bits": rules.FEWER_BITS,
    "slow": rules.SLOW,
}


def fault_finding(
    faulty: FaultyLayer,
    where: str,
    version: str,
    *,
    sm: Iterable[int] = (),
    tp: Iterable[int] = (),
    is_certain: bool = True,
) -> Finding:
    """Return the finding on layers with a known fault.

    `is_certain` is False if the target has another GPU that runs the layers without the fault. An
    error is then a warning.
    """
    fault, capabilities = FAULTS[faulty.fault], tuple(sm)
    rule = _RULES[fault.effect] if faulty.is_known else rules.UNKNOWN
    return Finding.at(
        rule if is_certain else rule.as_warning,
        where,
        sm=capabilities,
        tp=tuple(tp),
        kernel=faulty.kernel or fault.name,
        version=version,
        gpus=[f"SM {each}" for each in capabilities],
        what=fault.what,
        repaired=f"vLLM {fault.repaired} repairs it" if fault.repaired else "not repaired",
        remedy=f"serve it with vLLM {fault.repaired}, or {fault.remedy}"
        if fault.repaired
        else fault.remedy,
        thread=fault.thread,
    )
