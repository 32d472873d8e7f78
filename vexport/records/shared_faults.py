"""Find the faults that a checkpoint shares with its unquantized model.

A fault of the source is not a fault of the quantization.
"""

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path

from vexport.records.findings import Finding

# Names of parameters and tensors that quantization changes, in the files and in vLLM.
_QUANTIZED = re.compile(
    r"(?<=[._0-9])(?:weight|qweight|w13|w2|w1|w3)"
    r"(?:_(?:weight|packed|scale|shape|scale_inv|scale_2|global_scale|zero_point|inv))+\b"
)
_NUMBER = re.compile(r"\d+")
_PATH = re.compile(r"(?<![\w.])/\S+")
# A list of names in brackets, which may be cut off at the end, or three names and more without
# brackets. vLLM lists all parameters of a model, in any order.
_NAME = r"['\"]?[\w.]+['\"]?"
_LIST = re.compile(
    rf"(?:\b\w+\()?[\[{{(]\s*['\"][^\]}})]*(?:[\]}})]+|$)|{_NAME}(?:, {_NAME}){{2,}}"
)
# A dotted name in quotes.
_MODULE = re.compile(r"(['\"])[\w.]+\.[\w.]+\1")
_ANY_MODULE = "'*'"
_FIX = "correct the source, or serve it with a version of vLLM that supports the model"


def cause(text: str) -> str:
    """Return a message without lists of names, paths and numbers.

    Tensors have the names of the unquantized model. Two messages with the same cause are equal.
    """
    text = _PATH.sub("PATH", _LIST.sub("LIST", text))
    return _NUMBER.sub("#", unquantized_names(text))


def cause_anywhere(text: str) -> str:
    """Return the first sentence of the cause, without the names of modules and tensors in quotes.

    Names that only a quantized model has are kept.
    """
    sentence = _LIST.sub("LIST", text).partition(". ")[0].rstrip(".")
    return cause(_MODULE.sub(_any_module, sentence))


def _any_module(name: re.Match[str]) -> str:
    return name[0] if _QUANTIZED.search(name[0]) else _ANY_MODULE


def unquantized_names(text: str) -> str:
    """Return the text with names of the unquantized model.

    `weight_packed` becomes `weight`, and `w13_weight_scale` becomes `w13_weight`.
    """
    return _QUANTIZED.sub(_unquantized, text)


def _unquantized(name: re.Match[str]) -> str:
    first = name[0].partition("_")[0]
    return f"{first}_weight" if first.startswith("w") and first != "weight" else "weight"


def shared_as_warnings(
    findings: Sequence[Finding],
    root: Path,
    unquantized: Iterable[Finding],
    unquantized_root: Path,
    *,
    is_refused: bool = False,
) -> Iterator[Finding]:
    """Yield the findings on a checkpoint. Errors in `shared_errors` become warnings."""
    shared = shared_errors(findings, root, unquantized, unquantized_root, is_refused=is_refused)
    for finding in findings:
        if finding in shared:
            yield as_shared(finding, _FIX)
        else:
            yield finding


def as_shared(finding: Finding, fix: str) -> Finding:
    """Return the finding with the words that the unquantized model has the same problem.

    An error becomes a warning.
    """
    severity = "warning" if _is_error(finding) else finding.severity
    got = f"{finding.got}; the unquantized model has the same problem"
    return replace(finding, severity=severity, got=got, fix=fix)


def shared_errors(
    findings: Iterable[Finding],
    root: Path,
    unquantized: Iterable[Finding],
    unquantized_root: Path,
    *,
    is_refused: bool = False,
) -> Set[Finding]:
    """Return the errors of a checkpoint that its unquantized model has as well.

    `unquantized` are the findings on the unquantized model. The roots are the folders of both. The
    result is empty unless vLLM refuses the unquantized model, by a shared error or by `is_refused`.
    If vLLM loads both with wrong values, the errors remain: nobody would notice them.
    """
    keys = {_key(finding, unquantized_root) for finding in unquantized if _is_error(finding)}
    shared = {each for each in findings if _is_error(each) and _key(each, root) in keys}
    is_refused = is_refused or any(finding.claim == "refused" for finding in shared)
    return shared if is_refused else frozenset()


def _is_error(finding: Finding) -> bool:
    return finding.severity == "error"


def _key(finding: Finding, root: Path) -> tuple[str, str, str]:
    """Return a key that is equal for the same fault in a checkpoint and its unquantized model.

    Findings of vLLM's loaders have no rule: their words tell faults apart.
    """
    where = unquantized_names(finding.where.replace(str(root), ""))
    return finding.check, where, finding.rule or cause(finding.got)
