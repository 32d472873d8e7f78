"""Read weights for a transformers model from a checkpoint, part by part as the model runs.

Names and conversions are the same as when transformers loads the model. It renames tensors
(`embed_out` of GPT-NeoX becomes `lm_head`) and adds the prefix that a bare base model lacks (`h.0`
in many GPT-2 checkpoints). It makes some parameters from several tensors: the experts of a layer,
stored as separate tensors, become a single three-dimensional parameter.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from vexport.calibration.model import joined
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.errors import InputError, first_line, raise_all
from vexport.records import TensorInfo
from vexport.rules import calibration as rules

# Reads the value of a stored tensor.
Read = Callable[[TensorInfo], torch.Tensor]
# A module, the name of a parameter or buffer in it, and its new value.
ParameterValue = tuple[torch.nn.Module, str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecipe:
    """Conversion of stored tensors into parameters.

    With a conversion rule of transformers, `target` is the first parameter that the rule makes.
    `tensors` maps the rule's patterns, in their order, to the stored tensors that match them.
    Without a rule, `tensors` contains a single tensor, which is the parameter.
    """

    target: str
    rule: WeightConverter | None
    tensors: Mapping[str, tuple[TensorInfo, ...]]

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """Return all stored tensors that the conversion reads."""
        return tuple(tensor for tensors in self.tensors.values() for tensor in tensors)

    def values(self, read: Read, model: transformers.PreTrainedModel) -> Mapping[str, torch.Tensor]:
        """Return the parameters by name.

        Raises ValueError or RuntimeError if the tensors do not fit together.
        """
        if self.rule is None:
            return {self.target: read(self.stored[0])}
        rule = deepcopy(self.rule)  # the copy collects the tensors to convert
        for pattern, tensors in self.tensors.items():
            for tensor in tensors:
                rule.add_tensor(self.target, tensor.name, pattern, partial(read, tensor))
        converted = rule.convert(self.target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


class Weights:
    """Fills the parameters and stored buffers of modules from a checkpoint, on `device`."""

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        model: transformers.PreTrainedModel,
        device: str = "cpu",
    ) -> None:
        self.root = index.root
        self.reader = reader
        self._model = model
        self._device = device
        self._recipes = {
            name: recipe for recipe in recipes(model, index.tensors) for name in targets_of(recipe)
        }
        self._parameters: dict[str, tuple[str, ...]] = {}
        for name, recipe in self._recipes.items():
            for tensor in recipe.stored:
                self._parameters[tensor.name] = (*self._parameters.get(tensor.name, ()), name)
        self._float32 = tuple(model._get_dtype_plan(model.dtype))

    def stored_as(self, parameter: str) -> tuple[tuple[str, ...], ...]:
        """Return the names of the stored tensors that make a parameter.

        The outer tuple has an entry for each part of the parameter (gate and up). The inner tuples
        have a name for each expert, or a single name. A tensor that makes several parameters
        belongs to the first of them. Returns an empty tuple if the checkpoint has no tensor for the
        parameter.
        """
        recipe = self._recipes.get(parameter)
        if recipe is None or recipe.target != parameter:
            return ()
        return tuple(
            tuple(tensor.name for tensor in tensors) for tensors in recipe.tensors.values()
        )

    def stored_name(self, module: str) -> str:
        """Return the name of a module in the checkpoint.

        The name follows from the module's tensors or, if they do not show it, from its parents'
        tensors.
        """
        for parameter, recipe in self._recipes.items():
            ending, name = parameter.removeprefix(module), recipe.stored[0].name
            if ending != parameter and ending.startswith(".") and name.endswith(ending):
                return name.removesuffix(ending)
        parent, _, leaf = module.rpartition(".")
        return joined(self.stored_name(parent), leaf) if parent else module

    def parameters_of(self, stored: str) -> tuple[str, ...]:
        """Return the parameters that are made from a stored tensor.

        Returns an empty tuple if the model does not use the tensor.
        """
        return self._parameters.get(stored, ())

    def plain_tensor(self, parameter: str) -> str | None:
        """Return the name of the stored tensor that is the parameter without any conversion.

        Returns None if the parameter is converted, or if the tensor makes other parameters too.
        """
        recipe = self._recipes.get(parameter)
        if recipe is None or recipe.rule is not None or len(recipe.stored) != 1:
            return None
        name = recipe.stored[0].name
        return name if self.parameters_of(name) == (parameter,) else None

    def parameters_from(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters that are made from these tensors, by name.

        Other tensors that the parameters need are read from the checkpoint. The parameters are on
        the device, in the dtype in which the model computes.
        """

        def read(tensor: TensorInfo) -> torch.Tensor:
            if tensor.name in stored:
                return stored[tensor.name]
            return read_tensor(self.reader, tensor).to(self._device)

        needed = {
            recipe.target: recipe
            for recipe in self._recipes.values()
            if any(tensor.name in stored for tensor in recipe.stored)
        }
        values = {
            name: value
            for recipe in needed.values()
            for name, value in recipe.values(read, self._model).items()
        }
        return {
            name: value.to(self._device, self._dtype(name, self._model.get_parameter(name)))
            for name, value in values.items()
            if name in self._recipes
        }

    def _dtype(self, name: str, present: torch.Tensor) -> torch.dtype:
        """Return the dtype in which transformers loads a parameter or buffer.

        `present` is its value in the model.
        """
        is_float32 = any(re.search(part, name) for part in self._float32)
        return torch.float32 if is_float32 else present.dtype

    def load(self, module: torch.nn.Module, prefix: str) -> None:
        """Fill the module named `prefix`.

        Raises InputErrors that name the weights missing from the checkpoint.
        """
        owners = _owners(module, prefix)
        raise_all(
            [
                InputError.of(rules.NO_WEIGHT, f"{self.root}: {name}")
                for name, owner in owners.items()
                if name not in self._recipes and last_part(name) in owner._parameters
            ]
        )
        set_values(list(self._values(owners)))

    def load_around(self, layers_name: str) -> None:
        """Fill the modules outside the decoder layers.

        Parameters that the checkpoint does not have (a tied output head) stay on the meta device.
        """
        owners = _owners(self._model, "")
        around = {
            name: owner for name, owner in owners.items() if not name.startswith(f"{layers_name}.")
        }
        set_values(self._values(around))

    def prefetch(self, module: torch.nn.Module, prefix: str) -> None:
        """Let the kernel read the stored tensors of the module named `prefix` ahead."""
        for recipe in self._needed(_owners(module, prefix)):
            self.reader.prefetch(recipe.stored)

    def _needed(self, names: Iterable[str]) -> list[ParameterRecipe]:
        """Return the recipes that make these parameters and buffers."""
        recipes = (self._recipes.get(name) for name in names)
        return list({recipe.target: recipe for recipe in recipes if recipe}.values())

    def _values(self, owners: Mapping[str, torch.nn.Module]) -> Iterator[ParameterValue]:
        """Yield the checkpoint's values of these parameters and buffers.

        They have the dtypes in which transformers loads them.
        """
        for recipe in self._needed(owners):
            try:
                parameters = recipe.values(partial(read_tensor, self.reader), self._model)
                values = {name: value for name, value in parameters.items() if name in owners}
                for name, value in values.items():
                    shape = getattr(owners[name], last_part(name)).shape
                    if value.shape != shape:
                        raise ValueError(f"shape {tuple(value.shape)} instead of {tuple(shape)}")
            except (ValueError, RuntimeError) as error:
                where, reason = f"{self.root}: {recipe.stored[0].name}", first_line(error)
                raise InputError.of(
                    rules.WEIGHT_SHAPE, where, target=recipe.target, reason=reason
                ) from None
            for name, value in values.items():
                dtype = self._dtype(name, getattr(owners[name], last_part(name)))
                # Without a rule, the value is a view of the file's memory map.
                placed = value.to(self._device, dtype, copy=recipe.rule is None)
                yield owners[name], last_part(name), placed
            self.reader.release(recipe.stored)


def set_values(values: Iterable[ParameterValue]) -> None:
    """Set parameters and buffers of modules to the given values."""
    for owner, name, value in values:
        is_parameter = name in owner._parameters
        setattr(
            owner, name, torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
        )


def _owners(module: torch.nn.Module, prefix: str) -> dict[str, torch.nn.Module]:
    """Return the module that holds each parameter and buffer below `module`, by full name."""
    return {
        joined(prefix, owner_name, name): owner
        for owner_name, owner in module.named_modules()
        for name, _ in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    }


def last_part(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def recipes(
    model: transformers.PreTrainedModel, stored: Mapping[str, TensorInfo]
) -> Iterator[ParameterRecipe]:
    """Yield the conversions of stored tensors into the model's parameters and buffers.

    Stored tensors that the model does not use are left out. Names are matched as in transformers'
    `convert_and_load_state_dict_in_model` (core_model_loading.py).
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    by_target: dict[str, dict[str | None, list[TensorInfo]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            by_target.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
    for target, tensors in by_target.items():
        rule = next((of_pattern[pattern] for pattern in tensors if pattern is not None), None)
        patterns = rule.source_patterns if rule else [None]
        ordered = {pattern or "": tuple(tensors.get(pattern, ())) for pattern in patterns}
        yield ParameterRecipe(target=target, rule=rule, tensors=ordered)


def targets_of(recipe: ParameterRecipe) -> tuple[str, ...]:
    """Return the names of the parameters that a recipe makes."""
    if recipe.rule is None:
        return (recipe.target,)
    first, *others = recipe.rule.target_patterns
    return (recipe.target, *(recipe.target.replace(first, other, 1) for other in others))
