"""What one class of vLLM is built of: kinds of modules, and the names that its quantization config hears."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from model_classes import language_models
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import default_loader, weight_utils
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vexport.architectures.modules import STACK, ModuleKind, with_numbers, with_stars
from vexport.engine.dry.audit import Audit, HeaderFile
from vexport.engine.dry.cell import _optional, configure
from vexport.engine.dry.fake_platform import AbsentValues, join_group, set_capability

CAPABILITY = 90
# So many tensors that vLLM does not take, as transformers names them, are left out one by one.
MOST_REFUSALS = 40


@dataclass(slots=True, kw_only=True)
class Built:
    """The modules of a class, in vLLM's names with a star for each number.

    `asked` are the names that the quantization config hears for modules that have others, for the parts of
    fused ones that of the whole. `stored` says what became of each tensor of a file, `faults` what vLLM would
    not have read right.
    """

    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a module asks for: its name, and the members that the quantization config knew it to have then.

    Each model adds its own, so that a tower may ask before the language model has.
    """

    prefix: str
    members: tuple[str, ...]


class Books(Audit):  # type: ignore[no-untyped-call]
    """An audit that tells where tensors went."""

    def copied(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """(stored tensor, parameter that it was copied to, or that it became)."""
        names = {storage(parameter): name for name, parameter in model.named_parameters()}
        for stored, source in self._sources.items():
            targets = [*source.targets, storage(source.tensor)]
            yield from ((stored, names[target]) for target in targets if target in names)


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def build(folder: Path) -> Built:
    """Build the class that a folder's config names on the meta device, and load its tensors if it has any."""
    heard: dict[nn.Module, Asked] = {}
    method = CompressedTensorsConfig.get_quant_method

    def listen(self: CompressedTensorsConfig, layer: nn.Module, prefix: str) -> object:
        known = self.packed_modules_mapping.get(prefix.rpartition(".")[2], ())
        heard[layer] = Asked(prefix=prefix, members=tuple(known))
        return method(self, layer, prefix)

    CompressedTensorsConfig.get_quant_method = listen
    set_capability(CAPABILITY)
    config = configure(folder, tp=1, trust_remote_code=False)
    with set_current_vllm_config(config):
        join_group(1, 0)
        with torch.device("meta"), AbsentValues(), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        if not (folder / "model.safetensors").is_file():
            return described(model, config, heard, {})
        audit, refused = load(model, config)
    built = described(model, config, heard, dict(stored_modules(model, audit)))
    modules = dict(model.named_modules())
    for tensor, parameter in audit.copied(model):
        built.stored.setdefault(tensor, stored_kind(modules[parameter.rpartition(".")[0]], heard))
    faults = list(audit.faults(model, optional=frozenset(_optional(model))))
    dropped = {fault.where: "dropped" for fault in faults if fault.kind == "unused"}
    built.stored = {**built.stored, **dropped, **dict.fromkeys(refused, "refused")}
    built.faults = [f"{fault.kind} {fault.where}: {fault.got}" for fault in faults if fault.kind != "unused"]
    return built


def described(
    model: nn.Module, config: VllmConfig, heard: Mapping[nn.Module, Asked], loaded: Mapping[str, str]
) -> Built:
    """The kinds of a model's modules by their names in files; `loaded` are vLLM's own by those of files."""
    built = Built()
    packed = config.quant_config.packed_modules_mapping
    inside, classes = language_models(type(model))
    modules = dict(model.named_modules())
    own: dict[str, str] = {}
    for name in modules:
        holder, dot, last_part = name.rpartition(".")
        own |= {name: name, **{f"{holder}{dot}{part}": name for part in packed.get(last_part, ())}}
    for name, module in {**own, **loaded}.items():
        kind = kind_of(modules[module], heard)
        in_language_model = not inside or name.startswith(tuple(f"{attribute}." for attribute in inside))
        if kind is None or in_language_model and inside and not classes:
            continue
        if not (in_language_model and STACK.search(name)):
            built.kinds[with_stars(name)] = kind
        if kind in ("linear", "head") and modules[module] in heard:
            built.asked.update(other_names(name, heard[modules[module]]))
    return built


def other_names(name: str, asked: Asked) -> Iterator[tuple[str, str]]:
    """(name in files, name that is asked for) of a module, where they differ: of a part, and of the whole."""
    holder, dot, last_part = name.rpartition(".")
    asked_holder, _, whole = asked.prefix.rpartition(".")
    names = {name: asked.prefix}
    if last_part in asked.members:
        names = {name: f"{asked_holder}{dot}{last_part}", f"{holder}{dot}{whole}": asked.prefix}
    for old, new in names.items():
        if old != new and with_numbers(with_stars(new), old) == new:
            yield with_stars(old), with_stars(new)


def kind_of(module: nn.Module, heard: Mapping[nn.Module, Asked]) -> ModuleKind | None:
    """What a module is to a quantization config; None for what has no weight or is no layer of its own."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or isinstance(module, RoutedExperts):
        return None
    if isinstance(module, ParallelLMHead):
        return "head"
    if isinstance(module, VocabParallelEmbedding | nn.Embedding):
        return "table" if module in heard else "lookup"
    if isinstance(module, LinearBase):
        return "linear" if module in heard else "plain"
    return "plain" if weight.dim() == 2 else None


def stored_kind(module: nn.Module, heard: Mapping[nn.Module, Asked]) -> str:
    """Return what a stored tensor is part of; empty for parameters of other kinds."""
    if isinstance(module, RoutedExperts):
        return "experts"
    name = type(module).__name__
    if "Norm" in name:
        return "norm above one" if isinstance(module, GemmaRMSNorm) else "norm"
    if "Conv" in name:
        return "convolution"
    return kind_of(module, heard) or ""


def load(model: nn.Module, config: VllmConfig) -> tuple[Books, list[str]]:
    """Return what vLLM's loaders copied, and the tensors that they refused, which are left out one by one."""
    audit = Books(1)
    refused: list[str] = []
    weight_utils.safe_open = partial(HeaderFile, audit)
    every_tensor = default_loader.safetensors_weights_iterator

    def accepted(*arguments: object, **options: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (pair for pair in every_tensor(*arguments, **options) if pair[0] not in refused)

    default_loader.safetensors_weights_iterator = accepted
    for _ in range(MOST_REFUSALS):
        with suppress(Exception), torch.device("meta"), audit:
            default_loader.DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
            break
        refused.append(audit.last_handed_out)
    return audit, refused


def stored_modules(model: nn.Module, audit: Books) -> Iterator[tuple[str, str]]:
    """(a module of the file as vLLM's class renames it, the module that its weight was copied to)."""
    mapper = getattr(type(model), "hf_to_vllm_mapper", None)
    for stored, parameter in audit.copied(model):
        renamed = mapper.get_rename_mapper().map_name(stored) if mapper is not None else stored
        if renamed is not None and renamed.endswith(".weight") and parameter.endswith(".weight"):
            yield renamed.removesuffix(".weight"), parameter.removesuffix(".weight")
