"""Base classes for other quantization methods: config, storage and translation.

The names and layouts of stored tensors are a `Format`, so completeness, shapes and devices are
checked as for compressed-tensors. Checks of numbers (values, fusion, the comparison with the
source) use layers that are translated to compressed-tensors. Translation renames most tensors and
computes some from the stored tensors.
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
from vexport.records import Finding, Json, TensorInfo
from vexport.rules import config as rules
from vexport.rules.book import Rule
from vexport.version import Version

# A layer's tensors in compressed-tensors: the same bytes renamed, or computed.
Translation = Mapping[str, TensorInfo | Derived]
EXPERTS = "experts"
# Names of the scales of the KV cache in Quark and fp8 (get_cache_scale_mapper).
CACHE_SCALES = {
    "k_scale": "k_proj.output_scale",
    "v_scale": "v_proj.output_scale",
    "q_scale": "q_proj.output_scale",
}


class MethodFormat(Format):
    """Storage of a layer by another quantization method, under the method's `name`.

    A subclass has two bases: this class first, then the most similar compressed-tensors format.
    This class inherits the layout of that format and renames its tensors. `translated_format` is
    the name of that format. `names` maps compressed-tensors' names of tensors to the method's
    names. If `least_sm` is not 0, it replaces the format's smallest compute capability.
    """

    names: Mapping[str, str] = {}
    # Tensors of compressed-tensors that are reciprocals of the stored tensors.
    reciprocals: frozenset[str] = frozenset()

    def __init__(self, name: str, *, names: Mapping[str, str] = {}, least_sm: int = 0) -> None:
        self.translated_format = super().name
        self.name = name
        self.names = {**self.names, **names}
        self.weight = self.names.get(super().weight, super().weight)
        self.least_sm = least_sm

    def matches(self, args: Arguments, stored_as: str) -> bool:
        """Return False: vLLM selects this format by the method, never for a config group."""
        return False

    def vllm_scheme(self, args: Arguments) -> str:
        """Return "", because vLLM runs this format without a compressed-tensors scheme."""
        return ""

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs of the compressed-tensors format, from `least_sm` on if it is not 0."""
        support = super().gpu_support(args)  # type: ignore[safe-super]
        if not self.least_sm:
            return support
        input_bits: dict[int, int] = {}
        for sm, bits in support.input_bits.items():
            start = self.least_sm if sm == support.loads_from else max(sm, self.least_sm)
            input_bits[start] = bits
        return replace(support, input_bits=input_bits)

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        renamed_parameters = super().parameters(args, shape)  # type: ignore[safe-super]
        return {self.names.get(name, name): form for name, form in renamed_parameters.items()}

    def translated(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> Translation:
        """Return a layer's tensors under compressed-tensors' names.

        `stored` must have the layout that `parameters` returns.
        """
        shape = self.shape(args, stored)
        assert shape is not None
        new_names = {name: new_name for new_name, name in self.names.items()}
        parameters = super().parameters(args, shape)  # type: ignore[safe-super]
        expected = {new_names.get(name, name): form for name, form in parameters.items()}
        tensors: dict[str, TensorInfo | Derived] = {}
        for name, tensor in stored.items():
            if name not in self.unread:
                new_name = new_names.get(name, name)
                new_shape = expected[new_name].shape if new_name in expected else None
                tensors[new_name] = renamed(tensor, new_name, new_shape)
        return tensors

    def unusable_tensors(
        self, args: Arguments, stored: Mapping[str, TensorInfo], reader: Reader
    ) -> Iterator[Finding]:
        """Yield findings on tensors that vLLM or other loaders would misread.

        For example, vLLM ignores the g_idx of a reordered GPTQ layer, and uses wrong scales.
        """
        yield from ()


class MethodFp8(MethodFormat, Fp8):
    """FP8 weights and scales as in compressed-tensors."""


class MethodMxfp4(MethodFormat, Mxfp4):
    """MXFP4 as in compressed-tensors, but with Marlin's limit (`least_sm=75`) for most methods."""


class MethodMxfp8(MethodFormat, Mxfp8):
    """MXFP8 as in compressed-tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodGroup(ConfigGroup):
    """Quantization of some layers in the method's storage."""

    stored_as: MethodFormat

    @property
    def storage(self) -> Format:
        return self.stored_as

    @property
    def refusal(self) -> str | None:
        return self.stored_as.refusal(self)

    @property
    def translated(self) -> ConfigGroup:
        """Group with the same arguments in compressed-tensors."""
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
    """Return a group for any linear layer with these arguments of weights and inputs."""
    return MethodGroup(
        name=name,
        targets=("Linear",),
        weights=weights,
        input_activations=inputs,
        format=stored_as.name,
        stored_as=stored_as,
    )


def preset_group(name: str, stored_as: MethodFormat, preset: str) -> MethodGroup:
    """Return a group with the arguments of a preset."""
    args = get_scheme(preset).args
    return linear_group(name, stored_as, args.weights, args.input_activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantMethod:
    """Quantization config of another method as vLLM reads it.

    `group_of` takes vLLM's name of a layer and the name of a member. For routed experts, both are
    the name of the experts' module. It returns None if vLLM leaves the layer unquantized.
    `skip_key` is the config key that lists unquantized layers. `quantizes_head` is True if the
    output head is quantized unless that list contains it. `source` is vLLM's file.

    `kv_cache` is True if the config sets an FP8 KV cache. `cache_scales` maps the names of its
    scales to the method's names. `pairs_cache_scales` is True if vLLM reads the scales with
    BaseKVCacheMethod, which uses k_scale for the values if v_scale is missing, and refuses v_scale
    alone (quantization/kv_cache.py).
    """

    name: str
    skip_key: str
    groups: Sequence[MethodGroup]
    group_of: Callable[[str, str], MethodGroup | None]
    quantizes_head: bool = False
    kv_cache: bool = False
    cache_scales: Mapping[str, str] = field(default_factory=dict)
    pairs_cache_scales: bool = False
    source: str = ""
    problems: Sequence[Finding] = ()

    @property
    def needs_cache_request(self) -> bool:
        """True if vLLM uses an FP8 KV cache only with `--kv-cache-dtype fp8`.

        vLLM reads the dtype from configs of ModelOpt (resolve_kv_cache_dtype_string), but not from
        configs with names of their own for the scales.
        """
        return not self.kv_cache or bool(self.cache_scales)


class MethodConfig:
    """Quantization config that is read key by key. Errors in it are collected in `problems`.

    `model` is config.json, `quantized` are the names of the modules that are stored quantized, and
    `version` is the version of vLLM that reads the config.
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
        """Return the value of the first key that exists (get_from_keys).

        Adds a problem if no key exists or the value is null.
        """
        key = next((key for key in keys if key in self.values), None)
        value = self.values[key] if key is not None else None
        if value is None:
            self.add_problem(rules.REQUIRED_KEY, keys[0], source=self._source)
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the first list of names that is not empty, or () if there is none.

        Adds a problem if a value is not a list of names.
        """
        for key in keys:
            value = self.values.get(key)
            if value and (
                not isinstance(value, list) or not all(isinstance(each, str) for each in value)
            ):
                self.add_problem(rules.LIST_OF_NAMES, key, value=value)
            elif isinstance(value, list) and value:
                return tuple(map(str, value))
        return ()

    def add_problem(self, rule: Rule, key: str, /, **facts: object) -> None:
        """Add a finding on a key of the config to `problems`."""
        self.problems.append(Finding.at(rule, key, **facts))  # type: ignore[arg-type]


def is_listed(name: str, listed: Collection[str]) -> bool:
    """Return True if the list contains the whole name.

    If the name contains `experts`, it is enough that an entry with `experts` contains the name.
    """
    if EXPERTS in name:
        return any(name in entry for entry in listed if EXPERTS in entry)
    return name in listed


def contains_listed(name: str, listed: Collection[str]) -> bool:
    """Return True if an entry of the list is a part of the name."""
    return any(entry in name for entry in listed)
