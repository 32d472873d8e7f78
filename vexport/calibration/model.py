"""A model of transformers without its weights, and those of a part of it, read when that part runs.

Names and conversions of weights are transformers' own for loading this model: renamed tensors (`embed_out` is
`lm_head` in its GPT-NeoX), those of a bare base model (`h.0` in many a GPT-2), and parameters made of several
tensors (the experts of a layer, stored one by one, become one three-dimensional parameter).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numba
import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.errors import InputError, raise_all
from vexport.errors.escaping import first_line
from vexport.errors.extras import mismatch_of
from vexport.records import TensorInfo


def build_on_meta(
    root: Path, *, trust_remote_code: bool, device: str = "cpu"
) -> transformers.PreTrainedModel:
    """The model in eval mode and its own dtype: parameters on the meta device, buffers real on `device`.

    It is of the class that the checkpoint names, a language model within a multimodal one too, or of the
    class that transformers has for text. InputError where it has none.

    From here on torch computes with numba's number of threads. Numba gives it that number at its first
    kernel, and sums depend on it: a call that is continued would compute other bytes until then.
    """
    torch.set_num_threads(numba.get_num_threads())
    try:
        model = _build(root, trust_remote_code)
    except Exception as error:  # of foreign code on a foreign config
        if isinstance(error, MemoryError | ImportError) or mismatch_of(error):
            raise
        own_code = not trust_remote_code and "trust_remote_code" in str(error)
        raise InputError(
            str(root / "config.json"),
            got="a model with its own code" if own_code else f"one that it refuses ({first_line(error)})",
            need="a model that transformers can build, to calibrate it",
            fix="read that code, then add --trust-remote-code" if own_code else "correct it",
        ) from error
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _build(root: Path, trust_remote_code: bool) -> transformers.PreTrainedModel:
    """By the class that the checkpoint names, or by that which transformers has for text."""
    config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    dtype = config.dtype or torch.bfloat16
    with parameters_on_meta():
        if named is not None and not (trust_remote_code and hasattr(config, "auto_map")):
            model: transformers.PreTrainedModel = named._from_config(config, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block every parameter that a module registers goes to the meta device at once.

    Buffers stay real: rotary frequencies are computed by the constructor and stored in no checkpoint.
    """
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def decoder_layers(model: transformers.PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """Name and list of the decoder layers: of the text model's lists of modules the one with most parameters.

    Raises InputError for a model without a list of modules.
    """
    within = set(model.get_decoder().modules())
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and module in within
    }
    if not lists:
        raise InputError(
            type(model).__name__,
            got="no list of layers",
            need="a decoder-only model",
            fix="use a weight-only scheme",
        )
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    name = max(sizes, key=lambda key: sizes[key])
    return name, lists[name]


def tie_head(model: transformers.PreTrainedModel) -> None:
    """Give an output head without its own weights those of the embeddings."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight.is_meta:
        head.weight = embeddings.weight


def joined(*parts: str) -> str:
    """A name of its parts, of which some may be empty."""
    return ".".join(part for part in parts if part)


def unload(module: torch.nn.Module) -> None:
    """Drop the module's weights: its parameters are on the meta device again, its buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))


def default_device() -> str:
    """A GPU where torch has one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(name: str) -> None:
    """InputError where torch does not know the device or cannot put a tensor on it."""
    try:
        torch.empty(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device {name!r}",
            got=f"no use of it ({first_line(error)})",
            need="a device that this torch can use, as cpu or cuda:0",
            fix="name another, or install the torch for it",
        ) from None


FIX = "restore the checkpoint, or use a weight-only scheme"
# The value of a stored tensor.
Read = Callable[[TensorInfo], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecipe:
    """A conversion of tensors of the checkpoint into parameters.

    `tensors` are by the pattern of transformers' rule that they matched, in the rule's order; without a rule
    the one tensor is the parameter. With one, `target` is the first parameter that it makes.
    """

    target: str
    rule: WeightConverter | None
    tensors: Mapping[str, tuple[TensorInfo, ...]]

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """All tensors that go in."""
        return tuple(tensor for tensors in self.tensors.values() for tensor in tensors)

    def values(self, read: Read, model: transformers.PreTrainedModel) -> Mapping[str, torch.Tensor]:
        """The parameters by name. ValueError or RuntimeError where the tensors do not fit together."""
        if self.rule is None:
            return {self.target: read(self.stored[0])}
        rule = deepcopy(self.rule)  # it collects what it converts
        for pattern, tensors in self.tensors.items():
            for tensor in tensors:
                rule.add_tensor(self.target, tensor.name, pattern, partial(read, tensor))
        converted = rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


class Weights:
    """Fills the parameters and stored buffers of modules from a checkpoint, on `device`."""

    def __init__(
        self, index: SourceIndex, reader: Reader, model: transformers.PreTrainedModel, device: str = "cpu"
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
        """The tensors that a parameter is made of: one tuple for each part of it, in it one name an expert.

        A tensor that makes several parameters belongs to the first of them. Empty for what the checkpoint
        does not have.
        """
        recipe = self._recipes.get(parameter)
        if recipe is None or recipe.target != parameter:
            return ()
        return tuple(tuple(tensor.name for tensor in tensors) for tensors in recipe.tensors.values())

    def stored_name(self, module: str) -> str:
        """The name in the checkpoint of a module, as far as its own or its parents' tensors tell it."""
        for parameter, recipe in self._recipes.items():
            ending, name = parameter.removeprefix(module), recipe.stored[0].name
            if ending != parameter and ending.startswith(".") and name.endswith(ending):
                return name.removesuffix(ending)
        parent, _, own = module.rpartition(".")
        return joined(self.stored_name(parent), own) if parent else module

    def parameters_of(self, stored: str) -> tuple[str, ...]:
        """The parameters into which a stored tensor goes; empty where the model has no use for it."""
        return self._parameters.get(stored, ())

    def plain_tensor(self, parameter: str) -> str | None:
        """The stored tensor that is a parameter and nothing else, as it is; None where there is none."""
        recipe = self._recipes.get(parameter)
        if recipe is None or recipe.rule is not None or len(recipe.stored) != 1:
            return None
        name = recipe.stored[0].name
        return name if self.parameters_of(name) == (parameter,) else None

    def parameters_from(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters that these tensors make, by name; other tensors they need are the checkpoint's.

        They are on the device, in the dtype that the model computes in.
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
        """The dtype in which transformers loads what now has the value `present`."""
        return torch.float32 if any(re.search(part, name) for part in self._float32) else present.dtype

    def load(self, module: torch.nn.Module, prefix: str) -> None:
        """Fill the module named `prefix`; InputErrors name what the checkpoint lacks."""
        raise_all(
            [
                InputError(
                    f"{self.root}: {name}",
                    got="no tensor of that name",
                    need="the weight that the model class asks for",
                    fix=FIX,
                )
                for name in self._fill(module, prefix, lambda name: True)
            ]
        )

    def load_around(self, layers_name: str) -> None:
        """Fill what lies outside the decoder layers.

        Parameters that the checkpoint does not have (a tied output head) stay on the meta device.
        """
        self._fill(self._model, "", lambda name: not name.startswith(f"{layers_name}."))

    def _fill(self, module: torch.nn.Module, prefix: str, wanted: Callable[[str], bool]) -> list[str]:
        """Fill what is wanted; the answer is what the checkpoint lacks."""
        owners = {
            joined(prefix, owner_name, name): owner
            for owner_name, owner in module.named_modules()
            for name in own_tensors(owner)
        }
        names = [name for name in owners if wanted(name)]
        needed = {recipe.target: recipe for name in names if (recipe := self._recipes.get(name))}
        for recipe in needed.values():
            try:
                made = recipe.values(partial(read_tensor, self.reader), self._model)
                values = {name: value for name, value in made.items() if name in owners}
                for name, value in values.items():
                    shape = getattr(owners[name], last_part(name)).shape
                    if value.shape != shape:
                        raise ValueError(f"shape {tuple(value.shape)}, not {tuple(shape)}")
            except (ValueError, RuntimeError) as error:
                raise InputError(
                    f"{self.root}: {recipe.stored[0].name}",
                    got=f"what does not make {recipe.target} ({first_line(error)})",
                    need="the shapes and numbers of the model class",
                    fix=FIX,
                ) from None
            for name, value in values.items():
                self._put(owners[name], name, value)
            self.reader.release(recipe.stored)
        return [
            name
            for name in names
            if name not in self._recipes and last_part(name) in owners[name]._parameters
        ]

    def _put(self, owner: torch.nn.Module, name: str, value: torch.Tensor) -> None:
        """Make a value the owner's parameter or buffer, in the dtype that transformers loads it in."""
        dtype = self._dtype(name, getattr(owner, last_part(name)))
        value = value.to(self._device, dtype, copy=self._recipes[name].rule is None)
        if last_part(name) in owner._parameters:
            value = torch.nn.Parameter(value, requires_grad=False)
        setattr(owner, last_part(name), value)


def own_tensors(module: torch.nn.Module) -> list[str]:
    """The names of a module's own parameters and buffers."""
    parameters, buffers = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    return [name for name, _ in (*parameters, *buffers)]


def last_part(name: str) -> str:
    """The last part of a name."""
    return name.rpartition(".")[2]


def recipes(
    model: transformers.PreTrainedModel, stored: Mapping[str, TensorInfo]
) -> Iterator[ParameterRecipe]:
    """The conversions of stored tensors into the model's parameters and buffers; others are left out.

    This is the matching of transformers' `convert_and_load_state_dict_in_model` (core_model_loading.py).
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
    """The parameters that come of it."""
    if recipe.rule is None:
        return (recipe.target,)
    first, *others = recipe.rule.target_patterns
    return (recipe.target, *(recipe.target.replace(first, other, 1) for other in others))
