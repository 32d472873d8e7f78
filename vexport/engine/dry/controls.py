"""Compare a checkpoint that vLLM refuses or misreads with an unquantized model in the same cell.

If vLLM refuses or misreads the unquantized model in the same way, the quantization is not the
cause. The unquantized model is the checkpoint's source, if there is one. Without a source there are
models that need no weights:

- If vLLM refused to build the model, the checkpoint's config.json is tried without its
  quantization. If vLLM refuses this model as well, a wrong value in config.json may be the cause.
  Two facts together exclude this: vLLM's class raised the error, and the model that transformers
  builds from the same config.json has the shapes of the stored tensors. Otherwise the class is
  tried in the default configuration of transformers. If vLLM refuses this model in the same way,
  the class or the environment is the cause. If vLLM accepts it, a value in config.json is wrong.
- If vLLM built the model and then refused or misread a tensor, the model that transformers builds
  from the same config.json is tried. It has all tensors under the names that transformers saves. If
  it fails in the same way, vLLM's class cannot read any checkpoint of this config. If it loads, the
  checkpoint has a wrong name or lacks a tensor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vexport.engine.messages import CellResult, Control, ControlKind, Miscopy
from vexport.records import NotJudged

# Kinds of faults that are errors. An unused tensor is a warning.
_ERRORS = ("missing", "cast", "narrowed")
# Names of parameters and tensors that quantization changes, in the files and in vLLM.
_QUANTIZED = re.compile(
    r"(?<=[._0-9])(?:weight|qweight|w13|w2|w1|w3)"
    r"(?:_(?:weight|packed|scale|shape|scale_inv|scale_2|global_scale|zero_point|inv))+\b"
)
_NUMBER = re.compile(r"\d+")
_PATH = re.compile(r"(?<![\w.])/\S+")
_CONTROL_TEXTS: Mapping[ControlKind, str] = {
    "source": "vLLM has the same problem with the unquantized source",
    "same config": "vLLM has the same problem with an unquantized checkpoint that transformers "
    "creates from this config",
    "config alone": "vLLM refuses every checkpoint with this config, even if it is not quantized",
    "default config": "vLLM refuses every checkpoint of this class, even if it is not quantized",
}


def control_kind(result: CellResult, *, has_source: bool) -> ControlKind | None:
    """Return the kind of unquantized model that could show that quantization is not the cause.

    Return None if the result has no error.
    """
    is_faulty = result.outcome == "refused" or any(fault.kind in _ERRORS for fault in result.faults)
    if not is_faulty:
        return None
    if has_source:
        return "source"
    return "same config" if result.built else "config alone"


def control_of(result: CellResult, kind: ControlKind, *, loads_elsewhere: bool) -> Control:
    """Convert the result of an unquantized model to a `Control`."""
    return Control(
        kind=kind,
        outcome=result.outcome,
        reason=result.reason,
        where=result.where,
        faults=result.faults,
        loads_elsewhere=loads_elsewhere,
    )


def same_refusal(result: CellResult, control: CellResult | Control) -> bool:
    """Return True if vLLM refused the checkpoint and the unquantized model for the same reason.

    Names that quantization changes may differ.
    """
    if result.outcome != "refused" or control.outcome != "refused":
        return False
    return _plain(result.reason) == _plain(control.reason) and _plain(result.where) == _plain(
        control.where
    )


def _plain(text: str) -> str:
    """Return a refusal message in which the tensors have their names in the unquantized model.

    Paths and numbers are replaced.
    """
    without_paths = _PATH.sub("PATH", text)
    return _NUMBER.sub("#", _QUANTIZED.sub(_unquantized, without_paths))


def _unquantized(name: re.Match[str]) -> str:
    """Return `weight` for `weight_packed`, `w13_weight` for `w13_weight_scale`."""
    first = name[0].partition("_")[0]
    return f"{first}_weight" if first.startswith("w") and first != "weight" else "weight"


def without_shared_errors(result: CellResult, reason: str, *, requested: bool) -> CellResult:
    """Return the result without the errors that the unquantized model has as well.

    `reason` is vLLM's reason with its cause. If vLLM also refuses the unquantized model, the
    outcome becomes "unknown". There is one exception. If the user chose the cell (`requested`) and
    the unquantized model loads in another cell, the outcome stays "refused", because the chosen GPU
    or number of ranks is the cause.
    """
    control = result.control
    if control is None:
        return replace(result, reason=reason)
    if same_refusal(result, control):
        if control.loads_elsewhere and requested:
            return replace(result, reason=reason)
        return replace(
            result, outcome="unknown", reason=f"{_CONTROL_TEXTS[control.kind]}: {reason}"
        )
    shared = {_key(fault) for fault in control.faults}
    faults = tuple(fault for fault in result.faults if not _is_shared(fault, shared))
    return replace(result, reason=reason, faults=faults)


def is_shared_refusal(reason: str) -> bool:
    """Return True if the reason is that vLLM refuses the unquantized model as well."""
    return reason.startswith(tuple(_CONTROL_TEXTS.values()))


def _is_shared(fault: Miscopy, shared: set[tuple[str, str]]) -> bool:
    return fault.kind in _ERRORS and _key(fault) in shared


def _key(fault: Miscopy) -> tuple[str, str]:
    """Return kind and place of a fault.

    The place contains the layer's number, because each layer is loaded separately.
    """
    return fault.kind, _QUANTIZED.sub(_unquantized, fault.where)


def not_judged(results: Sequence[CellResult]) -> tuple[NotJudged, ...]:
    """Return the faults that vLLM also has with the unquantized model. Each fault occurs once."""
    found: dict[str, NotJudged] = {}
    for result in results:
        control = result.control
        shared = {_key(fault) for fault in control.faults} if control is not None else set()
        for fault in result.faults:
            if _is_shared(fault, shared):
                assert control is not None
                why = f"{_CONTROL_TEXTS[control.kind]}: got {fault.got}, need {fault.expected}"
                found.setdefault(
                    fault.where, NotJudged(what=f"{fault.where} ({fault.kind})", why=why)
                )
    return tuple(found.values())
