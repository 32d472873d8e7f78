"""`mxfp4`: the routed experts of gpt-oss, stacked in one tensor per projection.

No other layers are quantized. Source: GptOssMxfp4Config and GptOssMxfp4MoEMethod of
vllm/model_executor/layers/quantization/mxfp4.py, and _load_weights_mxfp4 of
vllm/model_executor/models/gpt_oss.py.
"""

from collections.abc import Mapping

from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodGroup,
    MethodMxfp4,
    QuantMethod,
    preset_group,
)
from vexport.formats.arguments import Arguments
from vexport.formats.base import GpuSupport, Parameter, Partition, exact
from vexport.numerics import MX_GROUP
from vexport.records import FLOATING, TensorInfo
from vexport.rules import config as rules

SOURCE = "mxfp4.py"
MODEL_TYPE = "gpt_oss"
# Bytes of a group.
BYTES = MX_GROUP // 2


class StackedMxfp4(MethodMxfp4):
    """One projection of all experts: blocks, scales (experts, out, in/32) and bias.

    blocks are (experts, out, in/32, 16). The checks treat the projection as a single layer with the
    rows of all experts. `rows` and `columns` are the size of one expert.
    """

    names = {"weight_packed": "blocks", "weight_scale": "scales"}

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__("mxfp4")
        self.experts, self.rows, self.columns = experts, rows, columns

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """Return the shape that config.json implies. vLLM views the tensors in this shape."""
        return self.experts * self.rows, self.columns

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        groups = self.columns // MX_GROUP
        return {
            "blocks": exact("U8", (self.experts, self.rows, groups, BYTES)),
            "scales": exact("U8", (self.experts, self.rows, groups)),
            "bias": Parameter(dtypes=FLOATING, shape=(self.experts, self.rows), dtype="BF16"),
        }

    def unsupported_shape(self, args: Arguments, partition: Partition) -> str | None:
        """Return None: each rank gets whole groups, and the last rank may get fewer.

        Source: per_rank_intermediate_size_block.
        """
        return None

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """Return the GPUs that run the experts with 16-bit inputs, vLLM's default.

        Source: _get_priority_backends_for_gpt_oss.
        """
        return GpuSupport(input_bits={80: 16}, stored_bits=16)


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it.

    vLLM computes all shapes from config.json, and ignores the keys of the quantization config.
    """
    kind = config.model.get("model_type")
    if kind != MODEL_TYPE:
        config.add_problem(rules.MXFP4_MODEL, "quant_method", value=kind, known=MODEL_TYPE)
    sizes = [
        _size(config, key) for key in ("num_local_experts", "hidden_size", "intermediate_size")
    ]
    experts, hidden, inner = sizes
    groups = {
        projection: preset_group(f"mxfp4 {projection}", stored_as, "MXFP4A16")
        for projection, stored_as in (
            ("gate_up_proj", StackedMxfp4(experts, 2 * inner, hidden)),
            ("down_proj", StackedMxfp4(experts, hidden, inner)),
        )
    }

    def group_of(layer: str, name: str) -> MethodGroup | None:
        parent, _, projection = name.rpartition(".")
        return groups.get(projection) if parent.endswith(".experts") else None

    return QuantMethod(
        name="mxfp4",
        skip_key="modules_to_not_convert",
        groups=tuple(groups.values()),
        group_of=group_of,
    )


def _size(config: MethodConfig, key: str) -> int:
    size = config.model.get(key)
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    config.add_problem(rules.MODEL_SIZE, "quant_method", key=key, value=size)
    return 0
