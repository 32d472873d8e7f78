"""INT8 weights in groups of columns, INT8 inputs per token."""

from collections.abc import Mapping

from vexport.formats.arguments import Arguments
from vexport.formats.base import WITH_INPUTS, Parameter, Partition, partial_group
from vexport.formats.integer import Int8


class GroupedInt8(Int8):
    """INT8 weights with a scale for each group of columns."""

    def matches(self, args: Arguments, stored_as: str) -> bool:
        """True for symmetric INT8 weights in groups with dynamic INT8 inputs per token."""
        weights, inputs = args.weights, args.input_activations
        if stored_as not in WITH_INPUTS or inputs is None or weights.is_float or inputs.is_float:
            return False
        eight = weights.num_bits == inputs.num_bits == 8 and weights.symmetric
        return eight and weights.strategy == "group" and inputs.is_by_token

    def unwritten(self, args: Arguments) -> str | None:
        return None

    def vllm_scheme(self, args: Arguments) -> str:
        return "CompressedTensorsW8A8GroupedInt8"

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        return partial_group(partition, args.weights.group)

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """weight (out, in), weight_scale (out, groups)."""
        return super().parameters(args, shape)
