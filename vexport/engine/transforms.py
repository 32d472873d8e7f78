"""Rotations that a model computes when it runs, of a checkpoint's `transform_config`, for the reference.

The others are in the weights. Matrices are stored once for all layers that share them, by scheme and size.
"""

from collections.abc import Iterator

import torch
from compressed_tensors.transform import TransformArgs, TransformConfig
from compressed_tensors.transform.utils.matrix import apply_transform_weight
from compressed_tensors.utils.match import is_match
from torch.nn import Linear, Module

from vexport.checkpoint.quantization import StoredQuantization
from vexport.checks.vllm.groups import INPUT, OUTPUT
from vexport.errors import InputError


class OnlineTransforms:
    """The transforms of linear layers' inputs and outputs; takes their matrices out of `tensors`.

    InputError where a transform is one of attention, which vLLM does not run.
    """

    def __init__(self, stored: StoredQuantization | None, tensors: dict[str, torch.Tensor]) -> None:
        raw = stored.values.get("transform_config") if stored else None
        self._config = TransformConfig.model_validate(raw) if raw else TransformConfig(config_groups={})
        self._matrices: dict[tuple[str, int], torch.Tensor] = {}
        for scheme, args in self._online():
            if stored is not None and args.location not in (INPUT, OUTPUT):
                got, need = f"a transform of {args.location}", "transforms of linear layers only"
                raise InputError(stored.place, got=got, need=need, fix="compare without a reference")
            for name in [key for key in tensors if key.endswith(f".{scheme}_{args.location}.weight")]:
                matrix = tensors.pop(name)
                self._matrices[scheme, matrix.shape[0]] = matrix

    def attach(self, model: Module) -> None:
        """Let the model's linear layers compute them, before any other hook on their inputs."""
        for name, module in model.named_modules():
            for scheme, args in self._online():
                if isinstance(module, Linear) and is_match(name, module, args.targets, args.ignore):
                    self._hook(scheme, args, module)

    def _online(self) -> Iterator[tuple[str, TransformArgs]]:
        for name, scheme in self._config.config_groups.items():
            yield from ((name, args) for args in scheme.apply if args.is_online())

    def _hook(self, scheme: str, args: TransformArgs, module: Linear) -> None:
        own = self._config.config_groups[scheme].head_dim
        matrix = self._matrices[
            scheme, own or (module.in_features if args.location == INPUT else module.out_features)
        ]
        matrix = (matrix.T if args.inverse else matrix) / matrix.shape[0] ** 0.5

        def rotated(value: torch.Tensor) -> torch.Tensor:
            exact: torch.Tensor = apply_transform_weight(
                matrix, value.to(matrix.dtype), args.location, Linear
            )
            return exact.to(value.dtype)

        if args.location == INPUT:
            module.register_forward_pre_hook(lambda _, inputs: (rotated(inputs[0]), *inputs[1:]))
        else:
            module.register_forward_hook(lambda _, inputs, output: rotated(output))
