"""`auto-round`: AutoRound's format, which stores layers like GPTQ, AWQ, FP8 blocks or MXFP.

Source: vllm/model_executor/layers/quantization/inc/inc.py, config_parser.py and schemes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vexport.architectures.fusion import is_head
from vexport.checks.vllm.quant_methods import fp8
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodGroup,
    MethodMxfp4,
    MethodMxfp8,
    QuantMethod,
    preset_group,
)
from vexport.checks.vllm.quant_methods.gptq import Gptq
from vexport.checks.vllm.quant_methods.integers import Awq, integer_group
from vexport.formats.arguments import Arguments
from vexport.numerics import MX_GROUP
from vexport.records import Json
from vexport.records.patterns import REGEX, matches
from vexport.rules import config as rules

SOURCE = "inc/inc.py"
# Layouts of weights. Integers without a layout in the config have the first layout.
AS_GPTQ, AS_AWQ, AS_FP8, AS_LLM_COMPRESSOR = (
    f"auto_round:{layout}" for layout in ("auto_gptq", "auto_awq", "fp8", "llm_compressor")
)
DATA_TYPES = ("int", "fp", "mx_fp")
BACKENDS = ("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin")
# Widths that only Humming's kernels run (CUDA_HUMMING_SUPPORTED_BITS).
HUMMING_BITS = (2, 3, 5, 6, 7)
# Widths that do not fill 32-bit words. vexport does not check their layout.
UNCHECKED_BITS = (3, 5, 6, 7)
# Number of bits in the settings of unquantized layers.
UNQUANTIZED = 16
REGEX_CHARACTERS = frozenset(r"*+?^$()[]{}|\\")
# Input arguments of MXFP8 (`_validate_raw_config`).
MX_INPUTS: Mapping[str, Json] = {
    "act_bits": 8,
    "act_data_type": "mx_fp",
    "act_group_size": MX_GROUP,
    "act_sym": True,
    "act_dynamic": True,
}


class AsGptq(Gptq):
    """GPTQ storage that also allows the widths of Humming's kernels."""

    def refusal(self, args: Arguments) -> str | None:
        bits = args.weights.num_bits
        if bits in UNCHECKED_BITS:
            return f"{bits} bits, a layout that vexport does not check"
        return None if bits in HUMMING_BITS else super().refusal(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """Quantization of layers. `group_size` is a number, or the sides of an FP8 block."""

    bits: int
    group_size: Json
    symmetric: bool

    @property
    def text(self) -> str:
        """The settings as the config spells them, for messages."""
        return f"bits {self.bits}, group_size {self.group_size}, sym {str(self.symmetric).lower()}"

    def override(self, entry: Mapping[str, Json]) -> "LayerSettings":
        """Return these settings, overridden by an entry of extra_config."""
        bits, size, symmetric = entry.get("bits"), entry.get("group_size"), entry.get("sym")
        return LayerSettings(
            bits=bits if isinstance(bits, int) else self.bits,
            group_size=self.group_size if size is None else size,
            symmetric=self.symmetric if symmetric is None else symmetric is True,
        )


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it.

    The layers of the listed blocks are quantized. Entries of extra_config override their settings.
    """
    values = config.values
    bits, size = config.required("bits"), config.required("group_size")
    symmetric = values.get("sym") is not False
    if bits is not None and type(bits) is not int:
        config.add_problem(rules.INTEGER, "bits", value=bits)
    base = LayerSettings(
        bits=bits if isinstance(bits, int) else 4, group_size=size, symmetric=symmetric
    )
    extra, entries = values.get("extra_config"), dict[str, LayerSettings]()
    for name, entry in extra.items() if isinstance(extra, dict) else ():
        if isinstance(entry, dict):
            entries[name] = base.override(entry)
    blocks = values.get("block_name_to_quantize") or values.get("to_quant_block_names")
    listed = (
        config.names("block_name_to_quantize", "to_quant_block_names")
        if isinstance(blocks, list)
        else ()
    )
    starts = tuple(blocks.split(",")) if isinstance(blocks, str) else listed
    groups: dict[str, MethodGroup] = {}
    for settings in (base, *entries.values()):
        if settings.bits < UNQUANTIZED and repr(settings) not in groups:
            groups[repr(settings)] = _group(config, settings)

    def group_of(layer: str, name: str) -> MethodGroup | None:
        settings = _entry_of(layer, name, entries)
        if settings is None and not (layer.startswith(starts) if starts else not is_head(layer)):
            return None
        return groups.get(repr(settings or base))

    return QuantMethod(
        name="auto-round",
        skip_key="extra_config",
        groups=tuple(groups.values()),
        group_of=group_of,
        quantizes_head=True,
    )


def _entry_of(layer: str, name: str, entries: Mapping[str, LayerSettings]) -> LayerSettings | None:
    """Return the entry of extra_config for a layer, or None (_resolve_raw).

    `layer` is vLLM's name, and `name` is the name of a member. vLLM tries three rules in this
    order: an entry equals one of the two names; an entry is the end of vLLM's name, or names an
    expert inside the layer; an entry is a regular expression that matches one of the two names.
    """
    for each in (layer, name):
        if each in entries:
            return entries[each]
    for key, settings in entries.items():
        if layer.endswith(f".{key}") or key.startswith(f"{layer}."):
            return settings
    for key, settings in entries.items():
        if REGEX_CHARACTERS & set(key) and (_is_found_in(key, layer) or _is_found_in(key, name)):
            return settings
    return None


def _is_found_in(pattern: str, name: str) -> bool:
    return matches(f"{REGEX}(?s:.*?)(?:{pattern})", name)


def _group(config: MethodConfig, settings: LayerSettings) -> MethodGroup:
    """Return the group for a data type and a layout (`_validate_supported_quantization`)."""
    values = config.values
    kind = str(values.get("data_type", "int"))
    layout = values.get("packing_format")
    name = f"auto-round {settings.bits} bits"
    if "mx_fp" in kind:
        return _mx_group(config, settings, name)
    if kind in ("fp", "fp8"):
        _require(
            config, {"packing_format": AS_FP8, "act_bits": 8, "act_dynamic": True, "fmt": "e4m3"}
        )
        block = settings.group_size
        if settings.bits != 8 or not fp8.is_block(block) or not settings.symmetric:
            config.add_problem(rules.FP8_BLOCKS, "group_size", settings=settings.text)
        return replace(fp8.group(block if fp8.is_block(block) else None, static=False), name=name)
    backend = values.get("backend", values.get("vllm_backend", "auto"))
    for key, value, choices in (
        ("data_type", kind, DATA_TYPES),
        ("packing_format", AS_GPTQ if layout is None else layout, (AS_GPTQ, AS_AWQ)),
        ("backend", backend, BACKENDS),
    ):
        if value not in choices:
            config.add_problem(rules.CHOICE, key, value=value, choices=choices)
    as_awq = "awq" in str(layout) and "gptq" not in str(backend)
    stored_as, symmetric = Awq("awq") if as_awq else AsGptq(), settings.symmetric and not as_awq
    return integer_group(
        name, stored_as, config, settings.bits, settings.group_size, symmetric=symmetric
    )


def _mx_group(config: MethodConfig, settings: LayerSettings, name: str) -> MethodGroup:
    """Return the group of MXFP4 or MXFP8 layers. Their inputs are quantized like the weights.

    vLLM checks the config's input arguments only for 8 bits.
    """
    four = settings.bits == 4
    _require(config, {"packing_format": AS_LLM_COMPRESSOR, **({} if four else MX_INPUTS)})
    if settings.bits not in (4, 8) or settings.group_size != MX_GROUP or not settings.symmetric:
        config.add_problem(rules.MX_GROUPS, "group_size", settings=settings.text, size=MX_GROUP)
    if four:  # Marlin supports SM 75, and INCConfig.get_min_capability is 60
        return preset_group(name, MethodMxfp4("auto-round", least_sm=75), "MXFP4")
    return preset_group(name, MethodMxfp8("auto-round"), "MXFP8")


def _require(config: MethodConfig, expected: Mapping[str, Json]) -> None:
    """Add a problem for each key with another value than vLLM expects.

    Absent keys are accepted (_check_expected).
    """
    for key, value in expected.items():
        if config.values.get(key) not in (None, value):
            found = config.values[key]
            config.add_problem(rules.CHOICE, key, value=found, choices=(value,))
