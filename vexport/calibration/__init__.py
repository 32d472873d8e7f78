"""Calibrate: run samples through a model while observers watch.

There are two ways to calibrate. `calibrate` runs a checkpoint layer by layer for a plan. For any
torch.nn.Module, observers can be attached by hand, with llm-compressor's names: set
`module.quantization_scheme`, call `initialize_observer`, and register the hooks or call `observe`.
Then run the module, and call `update_qparams` and `freeze_module_quantization`.

Modules are imported when their functions are used: reading text does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vexport.calibration.data import Samples, read_samples
    from vexport.calibration.model import default_device
    from vexport.calibration.modules import (
        calibrate_input_hook,
        calibrate_key_hook,
        calibrate_output_hook,
        calibrate_query_hook,
        calibrate_value_hook,
        freeze_module_quantization,
        get_modules,
        initialize_observer,
        observe,
        sync_activation_stats,
        update_qparams,
    )
    from vexport.calibration.statistics import calibrate

__all__ = [
    "Samples",
    "calibrate",
    "calibrate_input_hook",
    "calibrate_key_hook",
    "calibrate_output_hook",
    "calibrate_query_hook",
    "calibrate_value_hook",
    "default_device",
    "freeze_module_quantization",
    "get_modules",
    "initialize_observer",
    "observe",
    "read_samples",
    "sync_activation_stats",
    "update_qparams",
]
# The module of each public name that is not in `modules.py`.
_MODULES = {
    "Samples": "data",
    "calibrate": "statistics",
    "default_device": "model",
    "read_samples": "data",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'modules')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
