"""The answers of a quantization method: how vLLM reads its config, and what its layers are in
compressed-tensors' terms.

Names and layouts of stored tensors are a `Format`, so that completeness, shapes and devices are
judged as for compressed-tensors. What looks at numbers (values, fusion, the comparison with the
source) sees each layer translated: most tensors by another name, some computed from the stored
ones.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from vexport.checkpoint.reader import Derived, Reader, renamed
from vexport.checks.vllm.groups import ConfigGroup
from vexport.formats.arguments import Arguments, QuantArgs
from vexport.formats.base import Format, GpuSupport, Parameter
from vexport.formats.fp8 import Fp8
from vexport.formats.mxfp import Mxfp4, Mxfp8
from vexport.formats.schemes import get_scheme
from vexport.records import Finding, Json, Severity, TensorInfo
from vexport.version import Version

# A layer's tensors in compressed-tensors: the same bytes renamed, or computed.
Translation = Mapping[str, TensorInfo | Derived]
EXPERTS = "experts"


def problem(where: str, expected: str, got: str, fix: str, severity: Severity = "error") -> Finding:
    """A fault at a key of the quantization config, or in a layer's tensor; its check is named
    later.
    """
    return Finding(check="", severity=severity, where=where, expected=expected, got=got, fix=fix)


class MethodFormat(Format):
    """The storage of a layer by another method, whose `name` it has.

    Comes before the compressed-tensors format that it resembles, whose answers it renames and whose
    name is `translated_format`. `names` are the method's for compressed-tensors' tensors;
    `least_sm` is its least capability, which overrides the scheme's.
    """

    names: Mapping[str, str] = {}
    # Tensors of compressed-tensors that are reciprocals of the stored ones.
    reciprocals: frozenset[str] = frozenset()

    def __init__(self, name: str, *, names: Mapping[str, str] = {}, least_sm: int = 0) -> None:
        self.translated_format = super().name
        self.name = name
        self.names = {**self.names, **names}
        self.weight = self.names.get(super().weight, super().weight)
        self.least_sm = least_sm

    def matches(self, args: Arguments, stored_as: str) -> bool:
        """vLLM picks it by the method, never for a config group."""
        return False

    def vllm_scheme(self, args: Arguments) -> str:
        """Return "": it is none of compressed-tensors' schemes."""
        return ""

    def gpu_support(self, args: Arguments) -> GpuSupport:
        support, own = super().gpu_support(args), self.least_sm  # type: ignore[safe-super]
        least = support.loads_from
        bits = {
            max(own, 0 if sm == least and own else sm): bits
            for sm, bits in support.input_bits.items()
        }
        return replace(support, input_bits=bits)

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        renamed_parameters = super().parameters(args, shape)  # type: ignore[safe-super]
        return {self.names.get(name, name): form for name, form in renamed_parameters.items()}

    def translated(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> Translation:
        """A layer's tensors by compressed-tensors' names; `stored` are as `parameters` says."""
        ours = {name: own for own, name in self.names.items()}
        shape = self.shape(args, stored)
        assert shape is not None
        plain = super().parameters(args, shape)  # type: ignore[safe-super]
        wanted = {ours.get(name, name): form for name, form in plain.items()}
        return {
            own: renamed(tensor, own, wanted[own].shape if own in wanted else None)
            for name, tensor in stored.items()
            if (own := ours.get(name, name)) and name not in self.unread
        }

    def unusable(
        self, args: Arguments, stored: Mapping[str, TensorInfo], reader: Reader
    ) -> Iterator[Finding]:
        """Describe what vLLM passes over in a layer's tensors and should not, or other loaders read
        otherwise."""
        yield from ()


class MethodFp8(MethodFormat, Fp8):
    """FP8 weights and scales as compressed-tensors has them."""


class MethodMxfp4(MethodFormat, Mxfp4):
    """MXFP4 as in compressed-tensors; Marlin takes SM 75 where the method asks for no more."""


class MethodMxfp8(MethodFormat, Mxfp8):
    """MXFP8 as in compressed-tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodGroup(ConfigGroup):
    """The quantization of some layers by the method's storage."""

    stored_as: MethodFormat

    @property
    def storage(self) -> Format:
        return self.stored_as

    @property
    def refusal(self) -> str | None:
        return self.stored_as.refusal(self)

    @property
    def translated(self) -> ConfigGroup:
        """The same in compressed-tensors."""
        return ConfigGroup(
            name=self.name,
            targets=self.targets,
            weights=self.weights,
            input_activations=self.input_activations,
            format=self.stored_as.translated_format,
        )


def linear_group(
    name: str, stored_as: MethodFormat, weights: QuantArgs, inputs: QuantArgs | None
) -> MethodGroup:
    """A group for any linear layer, by how its weights and inputs are quantized."""
    return MethodGroup(
        name=name,
        targets=("Linear",),
        weights=weights,
        input_activations=inputs,
        format=stored_as.name,
        stored_as=stored_as,
    )


def preset_group(name: str, stored_as: MethodFormat, preset: str) -> MethodGroup:
    """A group of a preset's arguments."""
    args = get_scheme(preset).args
    return linear_group(name, stored_as, args.weights, args.input_activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantMethod:
    """A quantization config of another method as vLLM reads it.

    `group_of` answers for vLLM's name of a layer and the name of one of its members, both those of
    the routed experts of a layer: None where vLLM keeps it. `skip_key` names the list that keeps
    layers; `quantizes_head` says whether the output head is quantized where that list does not name
    it; `source` is vLLM's file, `cache_scales` its own names for the KV cache's scales.
    """

    name: str
    skip_key: str
    groups: Sequence[MethodGroup]
    group_of: Callable[[str, str], MethodGroup | None]
    quantizes_head: bool = False
    kv_cache: bool = False
    cache_scales: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    problems: Sequence[Finding] = ()


class MethodConfig:
    """A quantization config that is read key by key; what is wrong with it is collected in
    `problems`.

    `model` is config.json, `quantized` are the modules that are stored quantized, `version` is the
    vLLM that reads the config.
    """

    def __init__(
        self,
        values: Mapping[str, Json],
        source: str,
        model: Mapping[str, Json],
        quantized: Set[str],
        version: Version,
    ) -> None:
        self.values, self.model, self.quantized = values, model, quantized
        self.version = version
        self.problems: list[Finding] = []
        self._source = source

    def required(self, *keys: str) -> Json:
        """The value of the first key that is there (get_from_keys); a problem where that is
        none.
        """
        key = next((key for key in keys if key in self.values), None)
        value = self.values[key] if key is not None else None
        if value is None:
            got = "no such key" if key is None else "null"
            self.wrong(keys[0], f"the key, without which vLLM does not start ({self._source})", got)
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """The first list of names that is not empty."""
        for key in keys:
            value = self.values.get(key)
            if value and (
                not isinstance(value, list) or not all(isinstance(each, str) for each in value)
            ):
                self.wrong(key, "a list of names", repr(value))
            elif isinstance(value, list) and value:
                return tuple(map(str, value))
        return ()

    def wrong(
        self,
        key: str,
        expected: str,
        got: str,
        fix: str = "correct it, or export again",
        severity: Severity = "error",
    ) -> None:
        """Note a problem."""
        self.problems.append(problem(key, expected, got, fix, severity))


def is_listed(name: str, listed: Collection[str]) -> bool:
    """Match the whole name; for experts, an entry with `experts` that contains it."""
    if EXPERTS in name:
        return any(name in entry for entry in listed if EXPERTS in entry)
    return name in listed


def contains_listed(name: str, listed: Collection[str]) -> bool:
    """Return whether an entry is a part of the name."""
    return any(entry in name for entry in listed)
