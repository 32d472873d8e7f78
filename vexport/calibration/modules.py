"""Attach observers to modules: calibrate any torch.nn.Module and read its quantization parameters.

A module's `quantization_scheme` is compressed-tensors' `QuantizationScheme` or vexport's
`SchemeArgs`. Names and their meaning follow llm-compressor (modifiers/quantization/calibration.py).
Formulas are from `vexport.observers`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch

from vexport.errors import CheckpointFailed
from vexport.observers import Observer, ObserverArgs, fit_global_scale
from vexport.rules import calibration as rules

# The attribute of a scheme that holds the quantization arguments for each base name.
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
    """Arguments that also name the observer.

    compressed-tensors' `QuantizationArgs` and vexport's `QuantArgs` are such arguments.
    """

    @property
    def observer(self) -> str | None: ...


def initialize_observer(module: torch.nn.Module, base_name: str) -> None:
    """Attach the observer for "weight", "input", "output", "q", "k" or "v" to a module as a
    submodule.

    Nothing is attached if the scheme does not quantize this part or quantizes it dynamically. With
    dynamic "local" (NVFP4 inputs) only the global scale is computed. Observers of weights are
    always memoryless. Raises ValueError for another base name or an unknown observer.
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
    """Pass a value to the modules' observers of this base name.

    Modules without such an observer are skipped. Without `value`, the observer receives the
    module's attribute with this name (`weight`). If the module has a map of columns to groups
    (`weight_g_idx` of compressed-tensors), the observer receives this map, too.
    """
    for part in _module_list(module):
        if (observer := observer_of(part, base_name)) is not None:
            shown = getattr(part, base_name) if value is None else value
            observer(shown, getattr(part, f"{base_name}_g_idx", None))


def update_qparams(
    module: Modules, base_name: str | Iterable[str], only_update_onload: bool = False
) -> None:
    """Write the observers' results to the modules: `{base_name}_scale`, `_zero_point`,
    `_global_scale`.

    Existing parameters keep their dtype and shape. New parameters are registered: scales in
    float32, zero points in int32. With dynamic "local" only the global scale is written. Before
    that, `fit_global_scale` chooses the shared global scale of fused NVFP4 weights whose observers
    may expand ranges. With `only_update_onload` only the loaded copy of an offloaded parameter
    changes, not the offloaded copy. Raises CheckpointFailed if an observer saw nothing, or values
    that are not finite.
    """
    base_names = [base_name] if isinstance(base_name, str) else list(base_name)
    for part in _module_list(module):
        for name in base_names:
            if (observer := observer_of(part, name)) is not None:
                _require_statistics(part, name, observer)
                _fit_once(observer)
                _write_qparams(part, name, observer, only_update_onload)


def calibrate_input_hook(module: torch.nn.Module, args: object) -> None:
    """Pass the module's first positional input to its `input_observer`.

    This is a forward pre-hook.
    """
    _observe_value(module, "input", args[0] if isinstance(args, tuple) and args else args)


def calibrate_output_hook(module: torch.nn.Module, args: object, output: object) -> None:
    """Pass the module's output, or the first element of a tuple, to its `output_observer`.

    This is a forward hook. It does not change the output. llm-compressor's hook rounds the output
    by scales that are not known yet.
    """
    _observe_value(module, "output", output[0] if isinstance(output, tuple) else output)


def calibrate_query_hook(module: torch.nn.Module, query_states: torch.Tensor) -> None:
    """Pass query states (batch, heads, tokens, head size) to the attention's `q_observer`."""
    _observe_value(module, "q", query_states)


def calibrate_key_hook(module: torch.nn.Module, key_states: torch.Tensor) -> None:
    """Pass key states (batch, heads, tokens, head size) to the attention's `k_observer`."""
    _observe_value(module, "k", key_states)


def calibrate_value_hook(module: torch.nn.Module, value_states: torch.Tensor) -> None:
    """Pass value states (batch, heads, tokens, head size) to the attention's `v_observer`."""
    _observe_value(module, "v", value_states)


def freeze_module_quantization(module: torch.nn.Module) -> None:
    """Remove a module's observers and mark the module as frozen.

    Freeze a whole model with `model.apply(freeze_module_quantization)`. Modules without a scheme
    and frozen modules do not change.
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
    """Return the modules below the parents that have a quantization scheme, or an observer of
    `base_name`.

    Each module is returned once, even if it has several names or parents. The modules are in the
    order of registration, which is the same on all ranks.
    """
    modules = dict.fromkeys(
        module for parent in _module_list(parents) for module in parent.modules()
    )
    if base_name is None:
        return [one for one in modules if getattr(one, "quantization_scheme", None) is not None]
    return [one for one in modules if observer_of(one, base_name) is not None]


def sync_activation_stats(model: Modules) -> None:
    """Reduce the statistics of all activation observers over the ranks of the process group.

    Every rank calls this once, after the last observation, with the same model. Without other ranks
    it does nothing.
    """
    for base_name in ACTIVATIONS:
        for module in get_modules(model, base_name):
            if (observer := observer_of(module, base_name)) is not None:
                observer.sync_activation_stats()


def observer_of(module: torch.nn.Module, base_name: str) -> Observer | None:
    """Return the observer attached under a base name, or None.

    Raises ValueError for an unknown base name.
    """
    _require_base_name(base_name)
    observer = getattr(module, f"{base_name}_observer", None)
    return observer if isinstance(observer, Observer) else None


def arguments_of(module: torch.nn.Module, base_name: str) -> QuantizationArguments | None:
    """Return the scheme's arguments for a part of the module, or None for an unquantized part."""
    _require_base_name(base_name)
    scheme = getattr(module, "quantization_scheme", None)
    return cast(QuantizationArguments | None, getattr(scheme, ARGUMENTS[base_name], None))


def _require_base_name(base_name: str) -> None:
    if base_name not in ARGUMENTS:
        raise ValueError(
            f"base name {base_name!r}: got an unknown name, need one of {', '.join(ARGUMENTS)}"
        )


def _module_list(module: Modules) -> Iterator[torch.nn.Module]:
    # A torch container is both iterable and a module: treat it as a module.
    return iter([module]) if isinstance(module, torch.nn.Module) else iter(module)


def _observe_value(module: torch.nn.Module, base_name: str, value: object) -> None:
    observer = observer_of(module, base_name)
    if observer is None or not isinstance(value, torch.Tensor):
        got = f"no {base_name}_observer" if observer is None else type(value).__name__
        raise ValueError(
            f"{_describe(module)}: got {got}, need an observer and a tensor for its {base_name}; "
            "call initialize_observer first"
        )
    observer(value)


def _require_statistics(module: torch.nn.Module, base_name: str, observer: Observer) -> None:
    """Raise CheckpointFailed if an observer saw nothing, or values that are not finite."""
    where = f"{_describe(module)}: {base_name}"
    if not observer.has_statistics:
        raise CheckpointFailed.of(rules.NOT_OBSERVED, where, tokens=observer.tokens)
    if not all(bool(torch.isfinite(end)) for end in observer.extremes()):
        raise CheckpointFailed.of(rules.NOT_FINITE_MODULE, where)


def _fit_once(observer: Observer) -> None:
    """Choose the shared global scale of fused weights as soon as all of them were observed."""
    fused = observer.fused()
    if observer.base_name == "weight" and not observer.fusion.is_fitted:
        if all(member.has_statistics for member in fused):
            fit_global_scale(fused)
        observer.fusion.is_fitted = True


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
