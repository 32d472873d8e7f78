"""Observers attached to modules: calibrate any torch.nn.Module and read its quantization
parameters.

A module's `quantization_scheme` is compressed-tensors' `QuantizationScheme` or vexport's
`SchemeArgs`. Names and meaning are llm-compressor's (modifiers/quantization/calibration.py),
formulas those of `vexport.observers`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch

from vexport.errors import CheckpointFailed
from vexport.observers import Observer, ObserverArgs, fit_global_scale

# What can be observed, and the scheme's arguments for it.
ARGUMENTS: Mapping[str, str] = {
    "weight": "weights",
    "input": "input_activations",
    "output": "output_activations",
    "q": "input_activations",
    "k": "input_activations",
    "v": "input_activations",
}
ACTIVATIONS = tuple(name for name in ARGUMENTS if name != "weight")
DEFAULT_OBSERVER = "minmax"
# A weight does not change during calibration, so observers that keep a history become memoryless.
MEMORYLESS: Mapping[str, str] = {
    "static_minmax": "memoryless_minmax",
    "minmax": "memoryless_minmax",
    "mse": "memoryless_mse",
}

Modules = torch.nn.Module | Iterable[torch.nn.Module]


class QuantizationArguments(ObserverArgs, Protocol):
    """Arguments that also name the observer: compressed-tensors' `QuantizationArgs` and our
    `QuantArgs`.
    """

    @property
    def observer(self) -> str | None: ...


def initialize_observer(module: torch.nn.Module, base_name: str) -> None:
    """Attach the observer of a module's "weight", "input", "output", "q", "k" or "v" as a
    submodule.

    Nothing is attached where the scheme has no such part or quantizes it dynamically; with dynamic
    "local" (NVFP4 inputs) the observer serves the global scale. A weight's observer is always
    memoryless. Raises ValueError for another base name or an unknown observer.
    """
    args = arguments_of(module, base_name)
    if args is None or args.dynamic is True:
        return
    name = args.observer or DEFAULT_OBSERVER
    if base_name == "weight":
        name = MEMORYLESS.get(name, name)
    observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    module.register_module(f"{base_name}_observer", observer)
    observer.attach(module)


def observe(module: Modules, base_name: str, value: torch.Tensor | None = None) -> None:
    """Show a value to the observers of that base name; modules without one are passed over.

    Without `value` each module shows its own tensor of that name (its weight). A map of columns to
    groups, `weight_g_idx` of compressed-tensors, goes with it.
    """
    for part in _each(module):
        if (observer := observer_of(part, base_name)) is not None:
            shown = getattr(part, base_name) if value is None else value
            observer(shown, getattr(part, f"{base_name}_g_idx", None))


def update_qparams(
    module: Modules, base_name: str | Iterable[str], only_update_onload: bool = False
) -> None:
    """Write what the observers found to the modules: `{base_name}_scale`, `_zero_point`,
    `_global_scale`.

    Parameters that exist keep their dtype and shape, others are registered: scales float32, zero
    point int32. Dynamic "local" writes the global scale alone. If observers of NVFP4 weights search
    above the range, the global scale that fused weights share is chosen first (`fit_global_scale`).
    With `only_update_onload` the parameters of an offloaded module change on the device that
    computes, and their offloaded copies do not. CheckpointFailed names modules whose observer saw
    nothing, or values that are not finite.
    """
    base_names = [base_name] if isinstance(base_name, str) else list(base_name)
    for part in _each(module):
        for name in base_names:
            if (observer := observer_of(part, name)) is not None:
                _require_statistics(part, name, observer)
                _fit_once(observer)
                _write_qparams(part, name, observer, only_update_onload)


def calibrate_input_hook(module: torch.nn.Module, args: object) -> None:
    """A forward pre-hook: the module's first positional input goes to its `input_observer`."""
    _show(module, "input", args[0] if isinstance(args, tuple) and args else args)


def calibrate_output_hook(module: torch.nn.Module, args: object, output: object) -> None:
    """A forward hook: the module's output (the first of a tuple) goes to its `output_observer`.

    The output itself stays as it is; the peer rounds it by scales that are not known yet.
    """
    _show(module, "output", output[0] if isinstance(output, tuple) else output)


def calibrate_query_hook(module: torch.nn.Module, query_states: torch.Tensor) -> None:
    """Query states (batch, heads, tokens, head size) go to the attention module's `q_observer`."""
    _show(module, "q", query_states)


def calibrate_key_hook(module: torch.nn.Module, key_states: torch.Tensor) -> None:
    """Key states (batch, heads, tokens, head size) go to the attention module's `k_observer`."""
    _show(module, "k", key_states)


def calibrate_value_hook(module: torch.nn.Module, value_states: torch.Tensor) -> None:
    """Value states (batch, heads, tokens, head size) go to the attention module's `v_observer`."""
    _show(module, "v", value_states)


def freeze_module_quantization(module: torch.nn.Module) -> None:
    """Remove a module's observers and mark it frozen; `model.apply(freeze_module_quantization)` for
    all.

    Modules without a scheme, and frozen ones, stay as they are.
    """
    from compressed_tensors.quantization import QuantizationStatus

    frozen = getattr(module, "quantization_status", None) == QuantizationStatus.FROZEN
    if getattr(module, "quantization_scheme", None) is None or frozen:
        return
    for base_name in ARGUMENTS:
        if (observer := observer_of(module, base_name)) is not None:
            observer.detach(module)
            delattr(module, f"{base_name}_observer")
    module.quantization_status = QuantizationStatus.FROZEN


def get_modules(parents: Modules, base_name: str | None = None) -> list[torch.nn.Module]:
    """The modules in one parent or several that have a quantization scheme, or an observer of
    `base_name`.

    Each module comes once, however many names and parents it has, in the order of registration:
    ranks that built the same model agree on it.
    """
    modules = dict.fromkeys(module for parent in _each(parents) for module in parent.modules())
    if base_name is None:
        return [one for one in modules if getattr(one, "quantization_scheme", None) is not None]
    return [one for one in modules if observer_of(one, base_name) is not None]


def sync_activation_stats(model: Modules) -> None:
    """Reduce the statistics of all activation observers over the ranks of the process group.

    Every rank calls it once, after the last observation, with the same model; alone it does
    nothing.
    """
    for base_name in ACTIVATIONS:
        for module in get_modules(model, base_name):
            if (observer := observer_of(module, base_name)) is not None:
                observer.sync_activation_stats()


def observer_of(module: torch.nn.Module, base_name: str) -> Observer | None:
    """The observer attached under a base name; None where there is none. ValueError for another
    base name.
    """
    _require_base_name(base_name)
    observer = getattr(module, f"{base_name}_observer", None)
    return observer if isinstance(observer, Observer) else None


def arguments_of(module: torch.nn.Module, base_name: str) -> QuantizationArguments | None:
    """The arguments by which the module's scheme quantizes that part; None where it does not."""
    _require_base_name(base_name)
    scheme = getattr(module, "quantization_scheme", None)
    return cast(QuantizationArguments | None, getattr(scheme, ARGUMENTS[base_name], None))


def _require_base_name(base_name: str) -> None:
    if base_name not in ARGUMENTS:
        raise ValueError(
            f"base name {base_name!r}: got an unknown name, need one of {', '.join(ARGUMENTS)}"
        )


def _each(module: Modules) -> Iterator[torch.nn.Module]:
    # A torch container is both iterable and a module: treat it as a module.
    return iter([module]) if isinstance(module, torch.nn.Module) else iter(module)


def _show(module: torch.nn.Module, base_name: str, value: object) -> None:
    observer = observer_of(module, base_name)
    if observer is None or not isinstance(value, torch.Tensor):
        got = f"no {base_name}_observer" if observer is None else type(value).__name__
        raise ValueError(
            f"{_describe(module)}: got {got}, need an observer and a tensor for its {base_name}; "
            "call initialize_observer first"
        )
    observer(value)


def _require_statistics(module: torch.nn.Module, base_name: str, observer: Observer) -> None:
    """CheckpointFailed where an observer saw nothing, or values that are not finite."""
    if not observer.has_statistics:
        got = f"{observer.tokens} tokens in calibration"
        need = "at least one observation for its static scale"
        fix = "add samples that reach this module, or do not quantize it"
    elif not all(bool(torch.isfinite(end)) for end in observer.extremes()):
        got, need = "values that are not finite", "finite ones for its scale"
        fix = "look for the layer and the sample that made them, or do not quantize it"
    else:
        return
    raise CheckpointFailed(f"{_describe(module)}: {base_name}", got=got, need=need, fix=fix)


def _fit_once(observer: Observer) -> None:
    """Choose the global scale of fused weights once all of them were observed, the same for each of
    them.
    """
    fused = observer.fused()
    if observer.base_name == "weight" and not observer.is_fitted:
        if all(member.has_statistics for member in fused):
            fit_global_scale(fused)
        observer.set_fitted()


def _write_qparams(
    module: torch.nn.Module, base_name: str, observer: Observer, only_update_onload: bool
) -> None:
    from compressed_tensors.offload import update_offload_parameter

    for name, value in observer.qparams().items():
        if value is None or (observer.args.dynamic is not False and name != "global_scale"):
            continue
        assert isinstance(value, torch.Tensor)
        full = f"{base_name}_{name}"
        present = getattr(module, full, None)
        if not isinstance(present, torch.Tensor):
            module.register_parameter(full, torch.nn.Parameter(value, requires_grad=False))
            continue
        fitting = value.to(present.dtype).reshape(present.shape)
        if only_update_onload:
            present.data = fitting.to(present.device)
        else:
            update_offload_parameter(module, full, fitting)


def _describe(module: torch.nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
