"""Does the vLLM that was asked for have what the checkpoint needs?"""

from collections.abc import Iterator, Sequence

from vexport.architectures.versions import facts_of, nearest_version
from vexport.checks.vllm.versions import DIFFERENCES, KNOWN, Difference
from vexport.checks.vllm.view import CheckpointView
from vexport.types import Finding
from vexport.version import PINNED, Version, short_version

NAME = "versions"
DESCRIPTION = "the vLLM version asked for (--vllm) has the schemes, widths and model class that are needed"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on what the version that was asked for does differently from the pinned one."""
    asked = view.target.vllm
    version = nearest_version(asked)
    if asked != version:
        yield _unknown(asked, version)
    if version == PINNED:
        return
    yield from _class(view, version)
    if view.method is not None:
        yield _method(view.method.name, view.quantization_place, version)
    fused_linears = [
        (group, fused) for fused in view.fused_linears if (group := view.group_of(fused)) is not None
    ]
    for difference in DIFFERENCES:
        named = [(group, fused.name) for group, fused in fused_linears if difference.applies(group, fused)]
        lacking = [(group, name) for group, name in named if not difference.has(facts_of(version), group)]
        if lacking:
            names = [name for _, name in lacking]
            yield _differs(difference, names, version, difference.since(lacking[0][0]))


def _class(view: CheckpointView, version: Version) -> Iterator[Finding]:
    if view.class_name in facts_of(version).absent:
        has = short_version(PINNED)
        yield Finding(
            check=NAME,
            severity="error",
            where=f"{view.config_path}: architectures",
            expected=f"a model class of vLLM {short_version(version)}",
            got=f"{view.class_name}, which it does not have",
            fix=f"serve it with vLLM {has}",
        )


def _method(name: str, where: str, version: Version) -> Finding:
    """Rules of other methods are known for one version only."""
    pinned = short_version(PINNED)
    return Finding(
        check=NAME,
        severity="warning",
        where=where,
        expected=f"vLLM {pinned}, whose rules for {name} are known",
        got=f"vLLM {short_version(version)}: checked by the rules of {pinned}",
        fix="load it in that version: vexport load --dry --vllm-python",
    )


def _differs(
    difference: Difference, names: Sequence[str], version: Version, since: Version | None
) -> Finding:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = f" (from {short_version(since)} on)" if since else ""
    return Finding(
        check=NAME,
        severity=difference.severity,
        where=f"{names[0]}{more}",
        expected=f"a vLLM that has {difference.what}{first}",
        got=f"vLLM {short_version(version)}, which {difference.otherwise}",
        fix="serve it with another version, or use another scheme",
    )


def _unknown(asked: Version, used: Version) -> Finding:
    return Finding(
        check=NAME,
        severity="warning",
        where=f"vLLM {short_version(asked)}",
        expected="one of the versions whose rules are known, "
        f"{short_version(KNOWN[0])} to {short_version(KNOWN[-1])}",
        got=f"unknown: checked by the rules of {short_version(used)}",
        fix="load it in that version: vexport load --dry --vllm-python",
    )
