"""Known faults of vLLM: predicates on source text, and the lookup."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from vexport.architectures.faults import (
    FAULTS,
    RunningLayer,
    Source,
    faults_of,
    found_in,
    installed_source,
    recorded_faults,
)
from vexport.version import PINNED, Version, short_version

CT = "vllm/model_executor/layers/quantization/compressed_tensors"
HEAD = """
class ParallelLMHead:
    def __init__(self):
        self.params_dtype = dtype
"""
CUTLASS = """
class CutlassFP8ScaledMMLinearKernel:
    def process_weights_after_loading(self, layer):
        replace_parameter(layer, name, padded)
        {}
"""
SCHEME = """
class CompressedTensorsConfig:
    def _get_scheme(self):
        if self._is_mxfp4(weight_quant):
            return CompressedTensorsW4A4Mxfp4({})
"""
DEEP_GEMM = """
class CudaPlatform:
    @classmethod
    def support_deep_gemm(cls) -> Missing:
        return cls.is_device_capability(90) or cls.{}({})
"""
KERNEL = """
class {}:
    @classmethod
    def is_supported(cls, compute_capability: Missing = None) -> Missing:
        if not current_platform.is_cuda():
            return False, "requires CUDA"
        return {}, None
"""
BLOCKS = """
class CutlassFp8BlockScaledMMKernel:
    def can_implement(cls, config):
        return {}
"""
MXFP8 = """
class FlashInferCutlassMxfp8LinearKernel:
    def can_implement(cls, c):
        return {}
"""
UNGATED = """
class TrtLlmNvFp4ExpertsBase:
    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

class TrtLlmNvFp4ExpertsMonolithic(TrtLlmNvFp4ExpertsBase):
    {}
"""
WITHOUT_GATE = """@staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False
"""
LINEAR = "vllm/model_executor/kernels/linear"
CUTLASS_FILE = f"{LINEAR}/scaled_mm/cutlass.py"
PLATFORM = "vllm/platforms/cuda.py"
GROUPED = """
def cutlass_group_gemm_supported(capability: int) -> bool:
    if capability < 90 or capability >= {}:
        return False
    return torch.ops._C.cutlass_group_gemm_supported(capability)
"""
EXPERTS = """
class Method:
    def __init__(self, moe):
        self.use_cutlass = {}
"""
# File, text with the fault, and repaired text of each entry.
TEXTS = {
    "humming-head": (
        "vllm/model_executor/layers/vocab_parallel_embedding.py",
        HEAD,
        f"{HEAD}        self.output_partition_sizes = [size]\n        self.has_bias = bias\n",
    ),
    "cutlass-fp8-padding": (
        CUTLASS_FILE,
        CUTLASS.format("set_weight_attrs(weight, {'weight_loader': self.padded_weight_loader})"),
        CUTLASS.format("weight.weight_loader = self.padded_weight_loader"),
    ),
    "mxfp4-weight-only-inputs": (
        f"{CT}/compressed_tensors.py",
        SCHEME.format(""),
        SCHEME.format("input_quant"),
    ),
    "cutlass-fp8-before-ada": (
        CUTLASS_FILE,
        KERNEL.format("CutlassFP8ScaledMMLinearKernel", "True"),
        KERNEL.format("CutlassFP8ScaledMMLinearKernel", "cutlass_fp8_supported()"),
    ),
    "cutlass-int8-blackwell": (
        CUTLASS_FILE,
        KERNEL.format("CutlassInt8ScaledMMLinearKernel", "True"),
        KERNEL.format("CutlassInt8ScaledMMLinearKernel", "compute_capability < 100"),
    ),
    "cutlass-fp8-block-rows": (
        CUTLASS_FILE,
        BLOCKS.format("True, None"),
        BLOCKS.format("config.weight_shape[0] % 128 == 0, None"),
    ),
    "deep-gemm-sm12x": (
        PLATFORM,
        DEEP_GEMM.format("is_device_capability_family", 120),
        DEEP_GEMM.format("is_device_capability", 100),
    ),
    "deep-gemm-sm107": (
        PLATFORM,
        DEEP_GEMM.format("is_device_capability_family", 100),
        DEEP_GEMM.format("is_device_capability", 100),
    ),
    "mxfp8-small-sides": (
        f"{LINEAR}/mxfp8/flashinfer.py",
        MXFP8.format("True, None"),
        MXFP8.format("check(c.weight_shape)"),
    ),
    "trtllm-ungated-experts": (
        "vllm/model_executor/layers/fused_moe/experts/trtllm_nvfp4_moe.py",
        UNGATED.format("pass"),
        UNGATED.format(WITHOUT_GATE),
    ),
    "fp8-experts-sm12x": ("vllm/_custom_ops.py", GROUPED.format(110), GROUPED.format(130)),
    "mxfp4-experts-sm103": (
        f"{CT}/compressed_tensors_moe/compressed_tensors_moe_w4a4_mxfp4.py",
        EXPERTS.format("CutlassExpertsMxfp4._supports_current_device()"),
        EXPERTS.format("moe.moe_backend == 'cutlass'"),
    ),
}
# A layer with each fault, on a GPU.
LAYERS = {
    "humming-head": (80, RunningLayer(name="lm_head", group="head", kernel="HummingLinearKernel")),
    "cutlass-fp8-padding": (
        89,
        RunningLayer(
            name="down_proj",
            group="linear",
            kernel="CutlassFP8ScaledMMLinearKernel",
            sides=(64, 520),
        ),
    ),
    "mxfp4-weight-only-inputs": (
        90,
        RunningLayer(
            name="o_proj",
            group="linear",
            kernel="HummingMxFp4LinearKernel",
            stored="W4A16",
            runs="W4A8",
        ),
    ),
    "cutlass-fp8-before-ada": (
        86,
        RunningLayer(name="o_proj", group="linear", kernel="CutlassFP8ScaledMMLinearKernel"),
    ),
    "cutlass-int8-blackwell": (
        100,
        RunningLayer(
            name="o_proj",
            group="linear",
            kernel="CutlassInt8ScaledMMLinearKernel",
            sides=(64, 512),
        ),
    ),
    "cutlass-fp8-block-rows": (
        121,
        RunningLayer(
            name="kv_a_proj",
            group="linear",
            kernel="CutlassFp8BlockScaledMMKernel",
            sides=(576, 7168),
        ),
    ),
    "deep-gemm-sm12x": (
        120,
        RunningLayer(name="o_proj", group="linear", kernel="DeepGemmFp8BlockScaledMMKernel"),
    ),
    "deep-gemm-sm107": (
        107,
        RunningLayer(name="o_proj", group="linear", kernel="DeepGemmFp8BlockScaledMMKernel"),
    ),
    "mxfp8-small-sides": (
        100,
        RunningLayer(
            name="in_proj_ba",
            group="linear",
            kernel="FlashInferCutedslMxfp8LinearKernel",
            sides=(32, 1024),
        ),
    ),
    "trtllm-ungated-experts": (
        100,
        RunningLayer(
            name="experts",
            group="experts",
            kernel="TrtLlmNvFp4ExpertsMonolithic",
            stored="W4A4",
            gated=False,
        ),
    ),
    "fp8-experts-sm12x": (
        120,
        RunningLayer(name="experts", group="experts", kernel="TritonExperts", stored="W8A8"),
    ),
    "mxfp4-experts-sm103": (
        103,
        RunningLayer(name="experts", group="experts", kernel="CutlassExpertsMxfp4"),
    ),
}


# Changes to files of the pinned vLLM that repair what no release repairs: old and new text.
REPAIRS = {
    "cutlass-int8-blackwell": (
        'return False, "requires CUDA."\n        return True, None\n',
        'return False, "requires CUDA."\n        return compute_capability < 100, None\n',
    ),
    "cutlass-fp8-block-rows": (
        "    def apply_block_scaled_mm(",
        "    def process_weights_after_loading(self, layer):\n        pad(layer)\n\n"
        "    def apply_block_scaled_mm(",
    ),
    "deep-gemm-sm107": ("is_device_capability_family(100)", "is_device_capability(100)"),
    "mxfp4-weight-only-inputs": (
        "return CompressedTensorsW4A4Mxfp4()",
        "return CompressedTensorsW4A4Mxfp4(input_quant)",
    ),
    "fp8-experts-sm12x": (">= 110", ">= 130"),
    "mxfp4-experts-sm103": ("CutlassExpertsMxfp4._supports_current_device()", "False"),
    "trtllm-ungated-experts": (
        'Supports non-gated MoE (i.e. Nemotron-Nano)."""\n        return True',
        'Refuses non-gated MoE."""\n        return False',
    ),
}
OLDEST, NEWEST = (0, 23), (0, 33)


def versions() -> list[Version]:
    numbers = range(OLDEST[1], NEWEST[1] + 1)
    assert all(recorded_faults((0, number))[0] == (0, number) for number in numbers)
    return [(0, number) for number in numbers]


def results_of(source: Source, file: str) -> dict[str, bool | None]:
    """Return the results of the entries that read a file."""
    return {name: found_in(source)[name] for name in FAULTS if TEXTS[name][0] == file}


def add_deep_gemm(packages: Path, *kernels: str) -> None:
    """Write the files from which DeepGEMM compiles its kernels."""
    folder = packages / "vllm/third_party/deep_gemm/include/deep_gemm/impls"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("smxx_layout.cuh", *kernels):
        (folder / name).write_text("// kernel")


@pytest.mark.parametrize("name", FAULTS)
def test_predicates(name: str, tmp_path: Path) -> None:
    """Text that does not show the fault is unknown, also if it is no Python."""
    file, faulty, repaired = TEXTS[name]
    path = tmp_path / file
    source = installed_source(tmp_path)
    assert found_in(source) == dict.fromkeys(FAULTS)
    add_deep_gemm(tmp_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for text, value in ((faulty, True), (repaired, False)):
        path.write_text(text)
        assert results_of(source, file)[name] is value
    if name != "humming-head":
        for text in ("", "def (", "unrelated = 1"):
            path.write_text(text)
            assert found_in(source)[name] is None


def test_files_of_kernels_repair_deep_gemm(tmp_path: Path) -> None:
    """DeepGEMM compiles its kernels from files in the wheel: without them it has none."""
    file, faulty, _ = TEXTS["deep-gemm-sm12x"]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(faulty)
    found = []
    for kernels in (None, (), ("sm120_fp8_fp4_gemm_1d1d.cuh",)):
        if kernels is not None:
            add_deep_gemm(tmp_path, *kernels)
        found.append(found_in(installed_source(tmp_path))["deep-gemm-sm12x"])
    assert found == [None, True, False]


def packages() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent.parent


def test_installed_vllm_equals_record() -> None:
    found = found_in(installed_source(packages()))
    unknown = {name for name, value in found.items() if value is None}
    assert unknown <= {"deep-gemm-sm12x", "deep-gemm-sm107"}  # the CPU build has no DeepGEMM
    recorded = recorded_faults(PINNED)[1]
    assert found == {name: None if name in unknown else recorded[name] for name in FAULTS}


@pytest.mark.parametrize("name", [name for name in FAULTS if not FAULTS[name].repaired])
def test_patched_vllm_is_repaired(name: str, tmp_path: Path) -> None:
    """An entry that no release repairs is False in a patched copy of the installed vLLM."""
    file, (old, new) = TEXTS[name][0], REPAIRS[name]
    text = installed_source(packages())(file)
    assert old in text
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    add_deep_gemm(tmp_path)
    assert found_in(installed_source(tmp_path))[name] is True
    path.write_text(text.replace(old, new))
    assert found_in(installed_source(tmp_path))[name] is False


@pytest.mark.parametrize("name", FAULTS)
def test_every_entry_was_run_on_both(name: str) -> None:
    """Each entry is True in a version. It is False in a version, or has a patch."""
    results = {version: recorded_faults(version)[1][name] for version in versions()}
    assert set(results.values()) <= {True, False}
    assert True in results.values()
    assert False in results.values() or name in REPAIRS
    repaired = FAULTS[name].repaired
    for version, value in results.items():
        if repaired and version >= tuple(map(int, repaired.split("."))):
            assert value is False, short_version(version)
    assert bool(repaired) is not results[NEWEST]


def test_six_entries_concern_each_recent_version() -> None:
    for number in range(30, NEWEST[1] + 1):
        assert sum(value is True for value in recorded_faults((0, number))[1].values()) >= 6


def test_record_of_unknown_versions() -> None:
    assert recorded_faults((0, 99))[0] == NEWEST
    assert recorded_faults((0, 5))[0] == OLDEST


@pytest.mark.parametrize("name", FAULTS)
def test_lookup(name: str) -> None:
    sm, layer = LAYERS[name]
    (found,) = faults_of({**dict.fromkeys(FAULTS, False), name: True}, sm, [layer])
    assert (found.fault, found.layer, found.is_known) == (name, layer.name, True)
    (unknown,) = faults_of(dict.fromkeys(FAULTS), sm, [layer])
    assert not unknown.is_known
    assert [*faults_of(dict.fromkeys(FAULTS, False), sm, [layer])] == []


@pytest.mark.parametrize(
    ("sm", "layer"),
    [
        (80, RunningLayer(name="o_proj", group="linear", kernel="HummingLinearKernel")),
        (
            89,
            RunningLayer(
                name="o_proj",
                group="linear",
                kernel="CutlassFP8ScaledMMLinearKernel",
                sides=(64, 512),
            ),
        ),
        (
            80,
            RunningLayer(
                name="o_proj",
                group="linear",
                kernel="MarlinMxFp4LinearKernel",
                stored="W4A16",
                runs="W4A16",
            ),
        ),
        (
            100,
            RunningLayer(name="o_proj", group="linear", kernel="DeepGemmFp8BlockScaledMMKernel"),
        ),
        (
            120,
            RunningLayer(
                name="o_proj",
                group="linear",
                kernel="CutlassFp8BlockScaledMMKernel",
                sides=(512, 576),
            ),
        ),
        (
            100,
            RunningLayer(
                name="experts",
                group="experts",
                kernel="TrtLlmNvFp4ExpertsMonolithic",
                stored="W4A4",
            ),
        ),
        (
            100,
            RunningLayer(
                name="o_proj",
                group="linear",
                kernel="CutlassInt8ScaledMMLinearKernel",
                sides=(64, 520),
            ),
        ),
        (100, RunningLayer(name="experts", group="experts", kernel="CutlassExpertsMxfp4")),
        (89, RunningLayer(name="experts", group="experts", kernel="TritonExperts")),
        (
            120,
            RunningLayer(
                name="experts", group="experts", kernel="TritonExperts", stored="W8A8", blocks=True
            ),
        ),
    ],
)
def test_layers_without_fault(sm: int, layer: RunningLayer) -> None:
    assert [*faults_of(dict.fromkeys(FAULTS, True), sm, [layer])] == []
