"""About how long the stages of a plan take and how much memory: from measured rates, all of which stand here.

They hold for two CPU cores and an idle machine.
Of reading only the processor's part is counted: a slow disk comes on top. A GPU is not considered.
"""

from dataclasses import dataclass

from vexport.architectures.text_config import text_config
from vexport.checkpoint.index import SourceIndex
from vexport.formats.schemes import get_scheme
from vexport.plan.linears import STACK
from vexport.plan.needs import needs_rounding, needs_search, ranges_need
from vexport.plan.smoothing import PASSES as SMOOTHING_PASSES
from vexport.plan.smoothing import SMOOTHING_ROWS, WEIGHING_ROWS
from vexport.rounding.settings import strength_of, waiting_bytes, weighs_tokens
from vexport.types import Estimate, Plan

# Start of a command, and nanoseconds a parameter by bits of a quantized weight: 1.1 B parameters, in memory,
# in 0.9 to 1.0 s (FP8, INT4) and 1.3 s (NVFP4, whose codes take arithmetic).
START_SECONDS = 1.1
NANOSECONDS, NANOSECONDS_FP4 = 0.9, 1.2
# Reading headers, planning and dividing the files, in each process whatever its share: Kimi-K2, of 69,975
# tensors, in 4.2 s of one core.
TENSOR_NANOSECONDS = 60_000
# What the kernel takes to bring a byte into memory, of two cores. Fitted to Llama 1 B, 8 B, 70 B and 405 B
# and Kimi-K2 in W4A16. Files that are in memory already do without: Llama 1 B took
# 3.4 s of processor time instead of 5.3.
READ_NANOSECONDS = 0.22
# A search for scales takes that of processor time instead, per parameter of two cores: SmolLM2-135M in
# NVFP4A16 and W8A8 with memoryless_mse, 17.7 and 6.2 s of processor time, 1.5 s without a search.
NANOSECONDS_SEARCH, NANOSECONDS_SEARCH_FP4 = 22.0, 76.0
SEARCH_MEMORY = 500_000_000
# What grows are the headers and the rows in flight, by their length. Fitted to Llama 1 B, 70 B and 405 B and
# Kimi-K2 in W4A16, which took 231, 358, 457 and 481 MB.
MEMORY, MEMORY_PER_TENSOR, MEMORY_PER_COLUMN = 210_000_000, 2_700, 5_000
# `check`, on one core: for each tensor, and for each byte read, with the kernel's part. Kimi-K2 in
# W4A16, of 209,191 tensors, took 25 s with its scales from memory, Llama 405 B, of 2,901, 13 s.
CHECK_TENSOR_NANOSECONDS, CHECK_NANOSECONDS = 85_000, 0.8
# 260 MB for 1.1 B parameters. What grows are the headers: DeepSeek-V3 in W4A16 has 136,247 tensors and took
# 820 MB.
CHECK_MEMORY, CHECK_MEMORY_PER_TENSOR = 260_000_000, 4_000
# Floating-point operations a second of a calibration's forward, by processor time of one thread of a CPU
# with bf16 matrix units: SmolLM2-135M in FP8, 28 rows of 512 tokens more took 16.8 s more. Without them it is
# several times as long. torch and transformers are loaded first.
FORWARD_FLOPS = 1.8e11
# The same of rounding by text, of which much is large products: SmolLM2-135M in W4A16_G64, 64 rows of 512
# tokens, one thread of a CPU with bf16 matrix units: gptq 105 s. Text runs once through the
# layers, for a refit through the source's, too.
ROUNDING_FLOPS = 2e11
RUNS, RUNS_OF_REFIT = 1, 2
CALIBRATION_START_SECONDS, CALIBRATION_MEMORY = 12.0, 650_000_000
# With the kernels that round.
ROUNDING_MEMORY = 980_000_000
# A decoder layer as stored, dequantized and in the model; matrices (in, in) in float32 that a group takes.
LAYER_COPIES, MATRICES, FLOAT32, BFLOAT16 = 3, 12, 4, 2
# Hidden states of one stream beyond this go to disk (calibration/hidden.py, which loads torch).
MOST_STATES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """How many calibration samples are run at most, how long each may be, and where they come from."""

    number: int
    tokens: int
    data: str = "vexport's own text unless --calibration names data"

    def __str__(self) -> str:
        """As a plan says it."""
        return f"{self.number:,} samples of {self.tokens:,} tokens at most; {self.data}"

    @property
    def all_tokens(self) -> int:
        """Tokens of all samples at most."""
        return self.number * self.tokens


def estimates(index: SourceIndex, plan: Plan, samples: Samples) -> tuple[Estimate, ...]:
    """An estimate for each stage that the plan will have."""
    looks_back = plan.smoothing or weighs_tokens(plan.groups)
    has_ranges = ranges_need(plan) and not needs_rounding(plan)
    calibrate = (_calibrate(index, plan, samples),) if looks_back or has_ranges else ()
    quantize = _quantize(index, plan)
    if needs_rounding(plan):
        quantize = _rounded(index, plan, samples, quantize)
    return (*calibrate, quantize, _check(index, plan))


def start_seconds(index: SourceIndex) -> float:
    """What of quantizing each process takes, whatever its share of the files."""
    return START_SECONDS + TENSOR_NANOSECONDS * len(index.tensors) / 1e9


def _quantize(index: SourceIndex, plan: Plan) -> Estimate:
    searched = needs_search(plan)
    nanoseconds = 0.0
    for group in plan.groups:
        fp4 = "FP4" in group.scheme
        slow, fast = (NANOSECONDS_SEARCH_FP4, NANOSECONDS_FP4) if fp4 else (NANOSECONDS_SEARCH, NANOSECONDS)
        rate = slow if searched else fast
        nanoseconds += rate * sum(one.out_features * one.in_features for one in group.members)
    quantized = sum(one.out_features * one.in_features for group in plan.groups for one in group.members)
    nanoseconds += NANOSECONDS * (plan.parameters - quantized)
    widest = max((one.in_features for group in plan.groups for one in group.members), default=0)
    memory = SEARCH_MEMORY if searched else MEMORY
    memory += MEMORY_PER_TENSOR * len(index.tensors) + MEMORY_PER_COLUMN * widest
    return Estimate(
        stage="quantize",
        seconds=start_seconds(index) + (nanoseconds + READ_NANOSECONDS * index.num_bytes) / 1e9,
        memory_bytes=memory,
        basis=f"{plan.parameters:,} parameters",
    )


def _rounded(index: SourceIndex, plan: Plan, samples: Samples, nearest: Estimate) -> Estimate:
    """Quantizing with weights that are rounded by the samples, a decoder layer at a time."""
    groups = [group for group in plan.groups if group.rounding != "nearest"]
    linears = [one for group in groups for one in group.members]
    weights = sum(one.out_features * one.in_features for one in linears)
    rounding = sum((one.out_features + samples.all_tokens) * one.in_features**2 for one in linears)
    runs = RUNS_OF_REFIT if any(strength_of(group).strength > 0 for group in groups) else RUNS
    operations = 2.0 * (weights * samples.all_tokens * runs + rounding)
    widest = max(one.in_features for one in linears)
    around, layer = _stored(index)
    memory = around + LAYER_COPIES * layer + 2 * min(_states(index, samples), MOST_STATES)
    memory += waiting_bytes(groups, samples.all_tokens) + MATRICES * widest**2 * FLOAT32
    return Estimate(
        stage="quantize",
        seconds=nearest.seconds + CALIBRATION_START_SECONDS + operations / ROUNDING_FLOPS,
        memory_bytes=max(nearest.memory_bytes, ROUNDING_MEMORY + memory),
        basis=f"{nearest.basis}, rounded by {samples.number:,} samples",
    )


def _stored(index: SourceIndex) -> tuple[int, int]:
    """Bytes outside of the decoder layers, and of the largest layer."""
    layers: dict[str, int] = {}
    around = 0
    for tensor in index.tensors.values():
        if stack := STACK.search(tensor.name):
            layers[stack[0]] = layers.get(stack[0], 0) + tensor.num_bytes
        else:
            around += tensor.num_bytes
    return around, max(layers.values(), default=0)


def _states(index: SourceIndex, samples: Samples) -> int:
    """Bytes of the hidden states of all samples in one stream."""
    hidden = text_config(index.config).get("hidden_size")
    return BFLOAT16 * samples.all_tokens * (hidden if isinstance(hidden, int) else 0)


def _check(index: SourceIndex, plan: Plan) -> Estimate:
    """Of each quantized weight there are about three tensors. Of codes some rows are read, and all of FP8,
    in which there may be NaN."""
    tensors, read = len(index.tensors), plan.output_bytes
    for group in plan.groups:
        weights = get_scheme(group.scheme).args.weights
        tensors += 2 * len(group.members)
        if weights.num_bits != 8 or not weights.is_float:
            read -= sum(one.out_features * one.in_features for one in group.members) * weights.num_bits // 8
    return Estimate(
        stage="check",
        seconds=START_SECONDS + (CHECK_TENSOR_NANOSECONDS * tensors + CHECK_NANOSECONDS * read) / 1e9,
        memory_bytes=CHECK_MEMORY + CHECK_MEMORY_PER_TENSOR * tensors,
        basis="without --source",
    )


def _calibrate(index: SourceIndex, plan: Plan, samples: Samples) -> Estimate:
    """Two operations a parameter and token; one decoder layer and the hidden states are in memory."""
    in_layers = sum(one.num_elements for one in index.tensors.values() if STACK.search(one.name))
    rows = samples.number if ranges_need(plan) and not needs_rounding(plan) else 0
    back = SMOOTHING_ROWS if plan.smoothing else WEIGHING_ROWS if weighs_tokens(plan.groups) else 0
    rows += SMOOTHING_PASSES * min(back, samples.number)
    return Estimate(
        stage="calibrate",
        seconds=CALIBRATION_START_SECONDS + 2.0 * in_layers * rows * samples.tokens / FORWARD_FLOPS,
        memory_bytes=CALIBRATION_MEMORY + _stored(index)[1] + 2 * _states(index, samples),
        basis=f"{samples.number:,} samples of {samples.tokens:,} tokens at most",
    )
