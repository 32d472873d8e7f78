"""`gptq`: integers that are packed along the inputs, with scales and zero points per group.

Source: vllm/model_executor/layers/quantization/auto_gptq.py and utils/gptq_utils.py. vLLM only runs
symmetric codes, and ignores zero points and g_idx.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodGroup,
    QuantMethod,
    contains_listed,
)
from vexport.checks.vllm.quant_methods.integers import (
    TransposedIntegers,
    bits_of,
    integer_group,
    unpacked,
)
from vexport.formats.arguments import Arguments
from vexport.records import Finding, Json, TensorInfo
from vexport.records.patterns import REGEX, Patterns, expression
from vexport.rules import config as rules
from vexport.rules import shapes as shape_rules

SOURCE = "auto_gptq.py"
BITS, MARLIN_GROUPS = (4, 8), (-1, 32, 64, 128)
# Names of checkpoint formats. V1, AutoGPTQ's first format, stores each zero point minus one.
V1, V2 = "gptq", "gptq_v2"


class Gptq(TransposedIntegers):
    """Tensors qweight (in*bits/32, out), scales (groups, out), qzeros and g_idx (in,).

    qzeros are (groups, out*bits/32). `name` is the name of the checkpoint's format.
    """

    unread = frozenset({"qzeros", "g_idx"})

    def __init__(self, name: str = V1) -> None:
        super().__init__(name)
        self.zero_offset = 1 if name == V1 else 0

    def refusal(self, args: Arguments) -> str | None:
        weights = args.weights
        if not weights.symmetric or weights.num_bits not in BITS:
            return (
                f"bits {weights.num_bits} and sym {str(weights.symmetric).lower()}; vLLM only "
                f"supports symmetric 4 and 8 bits"
            )
        if (weights.group or -1) not in MARLIN_GROUPS:
            sizes = ", ".join(map(str, MARLIN_GROUPS))
            return f"group_size {weights.group}; vLLM only supports {sizes}"
        return None

    def unusable_tensors(
        self, args: Arguments, stored: Mapping[str, TensorInfo], reader: Reader
    ) -> Iterator[Finding]:
        """Report reordered columns, and zero points that do not match the config."""
        yield from self._order(args, stored, reader)
        zeros, bits = stored.get("qzeros"), args.weights.num_bits
        if zeros is None or zeros.dtype != "I32" or not zeros.num_bytes or len(zeros.shape) != 2:
            return
        values = unpacked(bits_of(reader, zeros), bits)
        middle = 1 << (bits - 1)
        least, most = int(values.min()), int(values.max())
        if not args.weights.symmetric:
            # The first format cannot distinguish the zero points 0 and 2**bits.
            largest = most + self.zero_offset
            if largest >= 1 << bits:
                yield Finding.at(
                    shape_rules.LARGE_ZERO_POINT, "qzeros", value=largest, limit=1 << bits
                )
            return
        needed = middle - self.zero_offset
        if least == most == needed:
            return
        if least == most and least in (middle - 1, middle):
            yield Finding.at(
                shape_rules.ZERO_POINT_OF_OTHER_FORMAT,
                "qzeros",
                value=least,
                needed=needed,
                format=self.name,
                other=V2 if self.zero_offset else V1,
            )
        else:
            yield Finding.at(
                shape_rules.UNREAD_ZERO_POINTS,
                "qzeros",
                values=f"{least}" if least == most else f"{least} to {most}",
                needed=needed,
                middle=middle,
            )

    def _order(
        self, args: Arguments, stored: Mapping[str, TensorInfo], reader: Reader
    ) -> Iterator[Finding]:
        order, codes = stored.get("g_idx"), stored.get("qweight")
        size = args.weights.group
        if order is None or codes is None or size is None or not order.num_bytes:
            return
        groups = reader.array(order).reshape(-1)
        if not np.array_equal(groups, np.arange(groups.size) // size):
            yield Finding.at(shape_rules.REORDERED_COLUMNS, "g_idx", size=size)


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it.

    If the config does not list the quantized layers, the stored tensors determine them.
    """
    values = config.values
    base = {key: config.required(key) for key in ("bits", "group_size", "desc_act", "sym")}
    group = _group(config, base)
    listed = tuple(_flat(values.get("modules_in_block_to_quantize"))) or tuple(
        sorted(config.quantized)
    )
    rules = tuple(_rules(config, base))

    def group_of(layer: str, name: str) -> MethodGroup | None:
        if not layer.endswith(".experts") and not contains_listed(name, listed):
            return None
        return next((own for pattern, own in rules if pattern.match(layer)), group)

    return QuantMethod(
        name="gptq",
        skip_key="dynamic",
        groups=(group, *(own for _, own in rules if own)),
        group_of=group_of,
        quantizes_head=values.get("lm_head") is True,
    )


def _group(config: MethodConfig, values: Mapping[str, Json], name: str = "gptq") -> MethodGroup:
    size = values.get("group_size")
    if values.get("desc_act") is True and isinstance(size, int) and size > 0:
        config.add_problem(rules.REORDERED_COLUMNS, "desc_act")
    stored_as = Gptq(V2 if config.values.get("checkpoint_format") == V2 else V1)
    symmetric = values.get("sym") is not False
    return integer_group(name, stored_as, config, values.get("bits"), size, symmetric=symmetric)


def _rules(
    config: MethodConfig, base: Mapping[str, Json]
) -> Iterator[tuple[Patterns, MethodGroup | None]]:
    """Yield GPTQModel's overrides as patterns and groups.

    A pattern matches from the start of a layer's name. Patterns with `-:` leave layers unquantized.
    Patterns with `+:` or without a prefix change the layers' arguments.
    """
    dynamic = config.values.get("dynamic")
    for number, (pattern, changes) in enumerate(
        dynamic.items() if isinstance(dynamic, dict) else ()
    ):
        text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        if isinstance(refused := expression(text), str):
            config.add_problem(rules.PATTERN, "dynamic", pattern=pattern, reason=refused)
            continue
        kept = pattern.startswith("-:") or not isinstance(changes, dict)
        settings = None if kept or not isinstance(changes, dict) else {**base, **changes}
        yield (
            Patterns([REGEX + text]),
            None if settings is None else _group(config, settings, f"gptq dynamic {number}"),
        )


def _flat(listed: Json) -> Iterator[str]:
    for each in listed if isinstance(listed, list) else ():
        yield from _flat(each) if isinstance(each, list) else (str(each),)
