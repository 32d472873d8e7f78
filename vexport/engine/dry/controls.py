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

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from vexport.engine.messages import CellResult, Control, ControlKind, Miscopy
from vexport.records import NotJudged
from vexport.records.shared_faults import cause, cause_anywhere, unquantized_names

# Kinds of faults that are errors. An unused tensor is a warning.
_ERRORS = ("missing", "cast", "narrowed")
_MODELS: Mapping[ControlKind, str] = {
    "source": "the unquantized source",
    "same config": "an unquantized checkpoint that transformers creates from this config",
    "config alone": "every checkpoint with this config, even if it is not quantized",
    "default config": "every checkpoint of this class, even if it is not quantized",
}
_ALSO_REFUSES = "vLLM also refuses "


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


def same_refusal(
    result: CellResult, unquantized: CellResult, stored: Container[str] = frozenset()
) -> bool:
    """Return True if vLLM refused the checkpoint and the unquantized model for the same reason.

    Names that quantization changes may differ. `stored` are the tensors of the unquantized model.
    vLLM stops at the first tensor that it refuses, and the files may have another order. A refusal
    of the same kind at another tensor therefore is the same if `stored` contains this tensor.
    """
    if result.outcome != "refused" or unquantized.outcome != "refused":
        return False
    place, other_place = unquantized_names(result.where), unquantized_names(unquantized.where)
    if cause(result.reason) == cause(unquantized.reason) and cause(place) == cause(other_place):
        return True
    is_alike = cause_anywhere(result.reason) == cause_anywhere(unquantized.reason)
    return is_alike and place in stored


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
    if control.is_same:
        if control.loads_elsewhere and requested:
            return replace(result, reason=reason)
        model = _MODELS[control.kind]
        return replace(result, outcome="unknown", reason=f"{_ALSO_REFUSES}{model}: {reason}")
    faults = tuple(fault for fault in result.faults if not _is_shared(fault, control))
    return replace(result, reason=reason, faults=faults)


def is_shared_refusal(reason: str) -> bool:
    """Return True if the reason is that vLLM refuses the unquantized model as well."""
    return reason.startswith(_ALSO_REFUSES)


def _is_shared(fault: Miscopy, control: Control) -> bool:
    return fault.kind in _ERRORS and any(_key(fault) == _key(each) for each in control.faults)


def _key(fault: Miscopy) -> tuple[str, str]:
    """Return kind and place of a fault.

    The place contains the layer's number, because each layer is loaded separately.
    """
    return fault.kind, unquantized_names(fault.where)


def not_judged(results: Sequence[CellResult]) -> tuple[NotJudged, ...]:
    """Return the faults that vLLM also has with the unquantized model. Each fault occurs once."""
    found: dict[str, NotJudged] = {}
    for result in results:
        control = result.control
        for fault in result.faults:
            if control is not None and _is_shared(fault, control):
                why = (
                    f"vLLM has the same problem with {_MODELS[control.kind]}: got {fault.got}, "
                    f"need {fault.expected}"
                )
                found.setdefault(
                    fault.where, NotJudged(what=f"{fault.where} ({fault.kind})", why=why)
                )
    return tuple(found.values())
