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
    problem,
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

SOURCE = "auto_gptq.py"
BITS, MARLIN_GROUPS = (4, 8), (-1, 32, 64, 128)
# Names of checkpoint formats. V1, AutoGPTQ's first format, stores each zero point minus one.
V1, V2 = "gptq", "gptq_v2"
FIX_ORDER = "quantize again without desc_act, or with static groups"


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
            if most + self.zero_offset >= 1 << bits:
                expected = f"zero points below {1 << bits}"
                got = f"a zero point of {most + self.zero_offset}"
                fix = "convert the checkpoint to gptq_v2 with GPTQModel"
                yield problem("qzeros", expected, got, fix, claim="values")
            return
        if least == most == middle - self.zero_offset:
            return
        if least == most and least in (middle - 1, middle):
            other = V2 if self.zero_offset else V1
            expected = (
                f"{middle - self.zero_offset} in all zero points (checkpoint_format {self.name})"
            )
            got = (
                f"{least}, which is the value of {other}; vLLM does not read zero points, but "
                f"other loaders would be off by one"
            )
            yield problem(
                "qzeros",
                expected,
                got,
                f"set checkpoint_format to {other}",
                "warning",
                claim="values",
            )
        else:
            expected = f"{middle - self.zero_offset} in all zero points, because sym is true"
            found = f"{least}" if least == most else f"{least} to {most}"
            got = f"{found}; vLLM does not read zero points, and uses {middle}"
            yield problem("qzeros", expected, got, "quantize again with sym=True", claim="values")

    def _order(
        self, args: Arguments, stored: Mapping[str, TensorInfo], reader: Reader
    ) -> Iterator[Finding]:
        """Report groups that do not consist of consecutive columns."""
        order, codes = stored.get("g_idx"), stored.get("qweight")
        size = args.weights.group
        if order is None or codes is None or size is None or not order.num_bytes:
            return
        groups = reader.array(order).reshape(-1)
        if not np.array_equal(groups, np.arange(groups.size) // size):
            expected = f"groups of {size} consecutive columns"
            got = "reordered columns (desc_act); vLLM ignores the order and would use wrong scales"
            yield problem("g_idx", expected, got, FIX_ORDER, claim="values")


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
        expected = "false, because vLLM does not support reordered columns (gptq_utils.py)"
        config.add_problem("desc_act", expected, "true", FIX_ORDER, claim="refused")
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
            config.add_problem(
                f"dynamic.{pattern}", "a valid regular expression", refused, claim="refused"
            )
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
