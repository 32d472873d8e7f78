"""Can vLLM read the quantization config at all?"""

from collections.abc import Iterator

from vexport.checks.subject import Subject, error, parse_group
from vexport.types import Finding

NAME = "config"
DESCRIPTION = "quantization_config is there and every config group is one that vLLM accepts"
# vLLM's names of the storage formats (compressed_tensors.CompressionFormat).
FORMATS = frozenset(
    {
        "dense",
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    }
)
# Activation ordering that vLLM no longer runs (compressed_tensors.py, _quantization_scheme_map_from_config).
REFUSED_ORDERING = ("group", "dynamic")


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on config.json's quantization_config."""
    config = subject.quantization
    if config is None:
        if any(unit.is_quantized for unit in subject.units):
            yield _finding(
                subject, "", "a quantization_config for the quantized tensors", "none", "export again"
            )
        return
    if config.get("quant_method") != "compressed-tensors":
        got = repr(config.get("quant_method"))
        yield _finding(subject, "quant_method", "compressed-tensors", got, "set quant_method")
        return
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield _finding(subject, "config_groups", "at least one group", repr(groups), "export again")
        return
    for name, raw in groups.items():
        parsed = parse_group(name, raw, subject.format)
        if isinstance(parsed, str):
            place = f"config_groups.{name}"
            yield _finding(
                subject, place, "arguments that compressed-tensors accepts", parsed, "correct the group"
            )
    yield from _groups(subject)


def _groups(subject: Subject) -> Iterator[Finding]:
    for group in subject.config_groups:
        place = f"config_groups.{group.name}"
        if group.format not in FORMATS:
            yield _finding(
                subject, f"{place}.format", f"one of {', '.join(sorted(FORMATS))}", group.format, "set it"
            )
        if group.weights.actorder in REFUSED_ORDERING:
            got = f"actorder {group.weights.actorder}"
            yield _finding(
                subject, place, "no activation ordering, or actorder weight", got, "quantize again"
            )
        if group.weights.strategy == "tensor_group":
            yield from _nvfp4(subject, place, group.weights.group_size, group.weights.symmetric)


def _nvfp4(subject: Subject, place: str, group_size: int | None, symmetric: bool) -> Iterator[Finding]:
    if group_size != 16 or not symmetric:
        got = f"group_size {group_size}, symmetric {symmetric}"
        yield _finding(
            subject, f"{place}.weights", "NVFP4 with group_size 16 and symmetric", got, "quantize again"
        )


def _finding(subject: Subject, place: str, expected: str, got: str, fix: str) -> Finding:
    where = f"{subject.config_path}: quantization_config" + (f".{place}" if place else "")
    return error(NAME, where, expected=expected, got=got, fix=fix)
