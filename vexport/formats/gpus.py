"""The GPUs that vLLM's rules are about: compute capabilities and the generations that have them.

Sources: NVIDIA's list (developer.nvidia.com/cuda-gpus), and what vLLM 0.32 names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GENERATIONS: Mapping[int, str] = {
    **dict.fromkeys((60, 61, 62), "Pascal"),
    **dict.fromkeys((70, 72), "Volta"),
    75: "Turing",
    **dict.fromkeys((80, 86, 87, 88), "Ampere"),
    89: "Ada",
    90: "Hopper",
    **dict.fromkeys((100, 101, 103), "Blackwell"),
    107: "Rubin",
    **dict.fromkeys((110, 120, 121), "Blackwell"),
}


# What tensor cores multiply: inputs of these kinds, with sums in float32 or int32.
Arithmetic = Literal["bf16", "fp8", "int8", "fp4"]
# vLLM's default of --gpu-memory-utilization (vllm/config/cache.py, 0.32).
UTILIZATION = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU that models are served on: its memory in bytes as the driver reports it, and its capability.

    One of AMD has 0 for `sm`, and `gfx` instead. `bandwidth` of the memory is in bytes a second, `peak` in
    operations a second by what is multiplied, dense and with sums of 32 bits; both as the manufacturer states
    them.
    """

    name: str
    memory_bytes: int
    sm: int
    bandwidth: float
    peak: Mapping[Arithmetic, float]
    gfx: str = ""

    @property
    def architecture(self) -> str:
        """`SM 90 (Hopper)`, or `gfx942`."""
        return self.gfx or generation(self.sm)

    @property
    def usable_bytes(self) -> int:
        """What vLLM takes of the memory."""
        return int(self.memory_bytes * UTILIZATION)

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step of `vllm serve` (get_batch_defaults in vllm/engine/arg_utils.py)."""
        if self.memory_bytes >= 160 * _GIB:
            return 16384
        return 8192 if self.memory_bytes >= 70 * _GIB and not self.name.startswith("A100") else 2048


_MIB, _GIB = 2**20, 2**30
_GB, _TERA = 1e9, 1e12


def _peak(
    bf16: float, *, fp8: float | None = None, int8: float, fp4: float | None = None
) -> Mapping[Arithmetic, float]:
    """Peaks in operations a second, of those in tera that there are."""
    tera: Mapping[Arithmetic, float | None] = {"bf16": bf16, "fp8": fp8, "int8": int8, "fp4": fp4}
    return {kind: value * _TERA for kind, value in tera.items() if value is not None}


_A100 = _peak(312, int8=624)
_HOPPER = _peak(989.4, fp8=1978.9, int8=1978.9)
# Total memory as `nvidia-smi` prints it. Peaks are dense: half of what data sheets state with sparsity.
# GeForce cards sum FP16 and FP8 in float32 at half their rate.
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        # NVIDIA A100 Tensor Core GPU datasheet (SXM): 312 TFLOPS BF16, 624 TOPS INT8; 80 GB: 2,039 GB/s,
        # 40 GB: 1,555 GB/s.
        Card(
            name="A100",
            memory_bytes=81_920 * _MIB,
            sm=80,
            bandwidth=2_039 * _GB,
            peak=_A100,
        ),
        Card(
            name="A100-40GB",
            memory_bytes=40_960 * _MIB,
            sm=80,
            bandwidth=1_555 * _GB,
            peak=_A100,
        ),
        # NVIDIA L4 datasheet: 300 GB/s; with sparsity 242 TFLOPS BF16, 485 FP8 and INT8.
        Card(
            name="L4",
            memory_bytes=23_034 * _MIB,
            sm=89,
            bandwidth=300 * _GB,
            peak=_peak(121, fp8=242.5, int8=242.5),
        ),
        # NVIDIA L40S datasheet: 864 GB/s, 362.05 TFLOPS BF16, 733 FP8 and INT8.
        Card(
            name="L40S",
            memory_bytes=46_068 * _MIB,
            sm=89,
            bandwidth=864 * _GB,
            peak=_peak(362.05, fp8=733, int8=733),
        ),
        # White paper "NVIDIA Ada GPU Architecture", table of the GeForce RTX 4090.
        Card(
            name="RTX4090",
            memory_bytes=24_564 * _MIB,
            sm=89,
            bandwidth=1_008 * _GB,
            peak=_peak(165.2, fp8=330.3, int8=660.6),
        ),
        # NVIDIA H100 datasheet (SXM): 3.35 TB/s; with sparsity 1,979 TFLOPS BF16, 3,958 FP8 and INT8.
        Card(name="H100", memory_bytes=81_559 * _MIB, sm=90, bandwidth=3_350 * _GB, peak=_HOPPER),
        # NVIDIA H200 datasheet (SXM): 4.8 TB/s, operations as H100.
        Card(name="H200", memory_bytes=143_771 * _MIB, sm=90, bandwidth=4_800 * _GB, peak=_HOPPER),
        # NVIDIA DGX B200 datasheet, an eighth: 64 TB/s; 72 PFLOPS FP8 and 144 FP4 with sparsity. BF16 and
        # INT8: NVIDIA Blackwell architecture brief, HGX B200.
        Card(
            name="B200",
            memory_bytes=183_359 * _MIB,
            sm=100,
            bandwidth=8_000 * _GB,
            peak=_peak(2_250, fp8=4_500, int8=4_500, fp4=9_000),
        ),
        # White paper "NVIDIA RTX Blackwell GPU Architecture", table of the GeForce RTX 5090.
        Card(
            name="RTX5090",
            memory_bytes=32_607 * _MIB,
            sm=120,
            bandwidth=1_792 * _GB,
            peak=_peak(209.5, fp8=419, int8=838, fp4=1_676),
        ),
        # AMD Instinct MI300X data sheet: 5.3 TB/s, 1,307.4 TFLOPS BF16, 2,614.9 FP8 and INT8.
        # gfx942: AMD GPU specifications (rocm.docs.amd.com).
        Card(
            name="MI300X",
            memory_bytes=196_592 * _MIB,
            sm=0,
            bandwidth=5_300 * _GB,
            peak=_peak(1_307.4, fp8=2_614.9, int8=2_614.9),
            gfx="gfx942",
        ),
    )
}


# What vLLM 0.32 multiplies on ROCm, gfx942: the kernels of PlatformEnum.ROCM in kernels/linear/__init__.py,
# and their conditions. What has an emulation alone has none here; of schemes in neither nothing is known.
ROCM_KINDS: Mapping[str, Arithmetic] = {
    **dict.fromkeys(("FP8", "FP8_DYNAMIC", "FP8_BLOCK"), "fp8"),
    **dict.fromkeys(("W8A8", "INT8"), "int8"),
    **dict.fromkeys(("W4A16", "W4A16_ASYM"), "bf16"),
}
ROCM_EMULATED = frozenset(("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"))


def parse_capability(text: str) -> int | None:
    """90 for `90`, `9.0` and `sm90`; None for what no GPU of the table has."""
    written = re.fullmatch(r"(?:sm[ _-]?)?(\d+)(?:\.(\d))?[af]?", text.lower())
    number = int(written[1] + (written[2] or "")) if written else 0
    return number if number in GENERATIONS else None


def generation(sm: int) -> str:
    """`SM 90 (Hopper)`."""
    return f"SM {sm} ({GENERATIONS[sm]})" if sm in GENERATIONS else f"SM {sm}"
