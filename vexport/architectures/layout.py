"""Compute the tensors of a model and their shapes from its class and its config.json."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from vexport.architectures import Architecture, with_stars
from vexport.architectures.config import LARGEST, text_config
from vexport.architectures.fusion import moe_layer
from vexport.architectures.layout_table import ClassLayout, Expected, expected_tensors, get_layout
from vexport.architectures.stored import joined_name, split_name
from vexport.records import Json
from vexport.version import PINNED, Version
from vexport.words import as_json

Shape = tuple[int | None, ...]
# Keys that count layers or experts. Each layer or expert has at least one tensor, so their number
# cannot exceed the number of tensors.
COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
# Tolerance for a config that declares more experts than the checkpoint stores. Some layers may have
# no experts, and some tensors may be missing.
SLACK, MIN_SLACK = 16, 4096
# Keys that must be in a config. If they are missing, transformers would build a model of its
# default size.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
TABLES, PLAIN_KINDS = ("table", "lookup", "head"), ("plain", "lookup")
ATTENTION_NORM, MLP_NORM, FEEDFORWARD_NORM = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
)
# Tensors of all experts of a layer, as vLLM's loaders accept them (load_weights of its classes).
STACKED = re.compile(r".*\.experts\.(gate_up|down|gate|up)_proj(\.weight|_(blocks|scales|bias))?")
# Tensors of a model in which each decoder layer has an RMSNorm before its attention and an RMSNorm
# before its MLP.
USUAL_DECODER = re.compile(
    r"lm_head\.weight|model\.(embed_tokens|norm)\.weight|model\.layers\.\*\."
    r"(((input|post_attention|pre_feedforward|post_feedforward)_layernorm|self_attn\.[qk]_norm)\.weight"
    r"|(self_attn\.(q|k|v|o|qkv)_proj|\w+\.(gate|up|down|gate_up)_proj|\w+\.gate|\w+\.experts\.\*\.\w+)\.(weight|bias))"
)


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """Modules of a model: linear layers and tables with their sizes, other parameters by name.

    If a size is unknown, it is None. If a shape is unknown, it is empty.

    Attributes:
        plain: Modules that vLLM builds without a quantization config.
        optional: Tensors of the model that a checkpoint may leave out.
        unknown: Names (with stars for numbers) of tensors that the model may have: vexport cannot
            compute from the config whether it has them.
        drops: Modules in which vLLM ignores unknown names.
        norm_before_mlp: The norm whose output enters the MLP, or empty if it is unknown.
        norms_above_one: True if norms multiply by their weight plus one.
        translated: True if the names in the file differ from transformers' names.
    """

    linears: dict[str, Shape]
    tables: dict[str, Shape]
    parameters: Mapping[str, Shape] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    norm_before_mlp: str = ""
    norms_above_one: bool = False
    translated: bool = False

    @cached_property
    def modules(self) -> dict[str, Shape]:
        """All modules with a matrix, and their shapes."""
        return {**self.linears, **self.tables}

    @cached_property
    def optional_modules(self) -> set[str]:
        """Modules with an optional weight, such as layers of a tower that vLLM does not run."""
        pairs = map(split_name, self.optional)
        return {module for module, parameter in pairs if parameter == "weight"}

    @cached_property
    def known(self) -> set[str]:
        """Modules with a known tensor, with stars for numbers."""
        names = (*self.modules, *(split_name(name)[0] for name in self.parameters))
        return {*map(with_stars, names)}

    @cached_property
    def places(self) -> set[str]:
        """Modules that contain parameters or other modules, with stars for numbers."""
        names = {*map(with_stars, (*self.parameters, *self.modules)), *self.unknown}
        return {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}

    def place(self, name: str) -> str:
        """Return the innermost of the `places` around a tensor, or "" for the model itself."""
        parts = with_stars(name).split(".")
        around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        return next((prefix for prefix in around if prefix in self.places), "")

    def is_complete_around(self, name: str) -> bool:
        """Return True if the layout lists all tensors of the modules around `name`.

        A tensor with this name that the layout does not list is then not part of the model.
        """
        inside = f"{self.place(name)}.".lstrip(".")
        module = split_name(with_stars(name))[0]
        if self.translated and "*" not in inside:
            return False
        unknown = {split_name(other)[0] for other in self.unknown if other.startswith(inside)}
        if inside.endswith(".experts.") and unknown:
            return False
        # If a module has known and uncertain tensors, the other modules are still complete.
        return module not in unknown and unknown <= {*self.known, inside.rstrip(".")}


def layout_of(
    class_name: str,
    config: Mapping[str, Json],
    architecture: Architecture,
    tensors: Iterable[str],
    version: Version = PINNED,
) -> ModelLayout | None:
    """Return the tensors that vLLM expects for this model, under the names used in its files.

    Returns None if the class is not in the layout table, if the class's layout does not describe
    this config (`ClassLayout.matches_config`), if the config lacks a required size, or if the
    config implies many more tensors than `tensors` contains.
    """
    stored = list(tensors)
    most = SLACK * len(stored) + MIN_SLACK
    entry = get_layout(class_name, version)
    if entry is None or not entry.matches_config(config) or impossible_size(config, len(stored)):
        return None
    if missing_sizes(entry, config):
        return None
    found, unsure = expected_tensors(entry, config, most)
    names = _names_in_file(stored, architecture)
    expected = {joined_name(*names(name)): each for name, each in found.items()}
    translated = not expected.keys() <= found.keys()
    hidden = _int(text_config(config), "hidden_size")
    expected, unknown_experts = _as_stored(expected, stored, architecture, hidden)
    joined = {split_name(name)[0] for name in stored if not name.endswith("bias")}
    linears: dict[str, Shape] = {}
    tables: dict[str, Shape] = {}
    parameters: dict[str, Shape] = {}
    for name, each in expected.items():
        module, parameter = split_name(name)
        if each.kind == "dropped" or _experts(name, each) in unknown_experts:
            continue
        if name in joined:  # stored as the quantized tensors of all experts
            linears[name] = (None, None)
        elif (
            parameter == "weight"
            and (each.shape is None or len(each.shape) == 2)
            and "norm" not in each.kind
        ):
            (tables if each.kind in TABLES else linears)[module] = each.shape or (None, None)
        else:
            parameters[name] = each.shape or ()
    has_usual_decoder = not unsure and all(
        USUAL_DECODER.fullmatch(name) for row in entry.rows for name in row.names
    )
    before_mlp = (FEEDFORWARD_NORM, MLP_NORM)
    norms = {".".join(name.split(".")[-2:]) for row in entry.rows for name in row.names}
    return ModelLayout(
        linears=linears,
        tables=tables,
        parameters=parameters,
        plain=frozenset(
            split_name(name)[0] for name, each in expected.items() if each.kind in PLAIN_KINDS
        ),
        optional=frozenset(name for name, each in expected.items() if each.optional),
        unknown=frozenset(
            map(with_stars, (*unsure, *(f"{prefix}.*" for prefix in unknown_experts)))
        ),
        drops=entry.drops,
        norm_before_mlp=next(
            (norm for norm in before_mlp if has_usual_decoder and f"{norm}.weight" in norms), ""
        ),
        translated=translated,
        norms_above_one=any(row.kind == "norm above one" for row in entry.rows),
    )


def _as_stored(
    expected: Mapping[str, Expected], stored: Iterable[str], architecture: Architecture, hidden: int
) -> tuple[dict[str, Expected], set[str]]:
    """Return the expected tensors with experts as the file stores them.

    Stacked experts are split if the file stores them separately. The second result has the prefixes
    of experts with an unknown layout.
    """
    known: dict[str, list[str]] = {}
    for name, each in expected.items():
        known.setdefault(_experts(name, each), []).append(name)
    singles = {
        _experts(name): _is_single(name)
        for name in stored
        if STACKED.fullmatch(name) or _is_single(name)
    }
    found, unknown_experts = dict(expected), set[str]()
    for prefix, names in known.items():
        single = singles.get(prefix, any(singles.values()))
        if not prefix or single == _is_single(names[0]) or prefix not in singles and not single:
            continue
        split = [
            _split_experts(prefix, name, expected[name], architecture, hidden) for name in names
        ]
        if not single or not all(split):
            unknown_experts.add(prefix)
            continue
        for name, layers in zip(names, split, strict=True):
            del found[name]
            found |= layers
    return found, unknown_experts


def _split_experts(
    prefix: str, name: str, stacked: Expected, architecture: Architecture, hidden: int
) -> dict[str, Expected]:
    """Split a tensor of all experts into the layers of single experts.

    Returns {} if the names or sizes of the layers are unknown.
    """
    if architecture.experts is None or stacked.shape is None or len(stacked.shape) != 3:
        return {}
    sizes = [side for side in stacked.shape if side is not None]
    if len(sizes) != len(stacked.shape):
        return {}
    count, *sides = sizes
    gate, down, up = architecture.experts
    last = next(
        (new for old, new in architecture.stacked_experts.items() if name.endswith(old)), name
    )
    if hidden not in sides or up is None:
        return {}
    other = sum(sides) - hidden
    is_down = "down" in last.rpartition("experts")[2]
    shape = (hidden, other) if is_down else (other // 2, hidden)
    each = Expected(shape=shape, kind="linear")
    parts = (down,) if is_down else (gate, up)
    return {f"{prefix}.{number}.{part}.weight": each for number in range(count) for part in parts}


def _is_single(name: str) -> bool:
    return moe_layer(split_name(name)[0]) is not None


def _experts(name: str, each: Expected | None = None) -> str:
    """Return the module of routed experts that a tensor belongs to, or "" for other tensors."""
    before, experts, _ = name.partition(".experts.")
    stacked = each is not None and each.kind == "experts" and len(each.shape or ()) == 3
    if stacked and not experts:
        before = split_name(name)[0].rpartition(".")[0]
    return f"{before}.experts" if experts or stacked else ""


def _names_in_file(
    stored: Iterable[str], architecture: Architecture
) -> Callable[[str], tuple[str, str]]:
    """Return a function that converts transformers' name of a tensor to the name in the file.

    The function returns the module and the parameter. If the file does not have the module, the
    function looks for a module that vLLM renames to the same name.
    """
    modules = {split_name(name)[0] for name in stored}
    renamed = {architecture.vllm_name(module): module for module in modules}

    def named(name: str) -> tuple[str, str]:
        module, parameter = split_name(name)
        return module if module in modules else renamed.get(
            architecture.vllm_name(module), module
        ), parameter

    return named


def impossible_size(config: Mapping[str, Json], tensors: int) -> tuple[str, str] | None:
    """Return a key with a number of layers or experts that is too large for `tensors` tensors.

    The second result describes the number, for messages. Returns None if all numbers are possible.
    Other functions have loops over all layers and experts. This check keeps a wrong number in
    config.json from using up time or memory in these loops.
    """
    text = text_config(config)
    for where in (config, text):
        for key in COUNTS:
            if _int(where, key) > max(tensors, 1):
                return key, f"{as_json(_int(where, key))} in a checkpoint of {tensors:,} tensors"
    experts = max(_int(text, key) for key in COUNTS[1:])
    if _int(text, "num_hidden_layers") * experts > SLACK * tensors + MIN_SLACK:
        return (
            "num_hidden_layers",
            f"more experts in all layers than a checkpoint of {tensors:,} tensors can have",
        )
    return None


def oversized(
    entry: ClassLayout, config: Mapping[str, Json], path: str = ""
) -> Iterator[tuple[str, Json]]:
    """Yield each key that the class uses with a number too large for a tensor dimension."""
    for key, value in config.items():
        if isinstance(value, dict) and not path:
            yield from oversized(entry, value, f"{key}.")
        elif isinstance(value, int) and abs(value) > LARGEST and f"{path}{key}" in entry.keys:
            yield f"{path}{key}", value


def missing_sizes(entry: ClassLayout, config: Mapping[str, Json]) -> list[str]:
    """Return the keys of sizes that the class needs but the config lacks."""
    absent = [key for key in SIZES if _int(config, key) < 1]
    if not absent:
        return []
    # A key is needed if tensors become uncertain without it and without its default value.
    given = {key: value for key, value in config.items() if key not in absent}
    kept = {key: value for key, value in entry.defaults.items() if key not in absent}
    unsure = expected_tensors(replace(entry, defaults=kept), given, 1 << 20)[1]
    unsure -= expected_tensors(entry, given, 1 << 20)[1]
    texts = " ".join(
        text
        for row in entry.rows
        if not unsure.isdisjoint(row.names)
        for text in (
            *(row.shape or ()),
            *(entry.counts.get(name[: name.find("*") + 1], "") for name in row.names),
        )
    )
    return [key for key in absent if re.search(rf"(?<![\w.]){key}\b", texts)]


def _int(config: Mapping[str, Json], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
