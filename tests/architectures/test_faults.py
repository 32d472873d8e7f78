"""Known faults of vLLM: predicates on source text, and the lookup."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from vexport.architectures.faults import FAULTS, RunningLayer, faults_of, found_in, installed_source
from vexport.architectures.versions import facts_of, known_versions
from vexport.version import PINNED, short_version

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
        return cls.is_device_capability(90) or cls.{}(120)
"""
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
        "vllm/model_executor/kernels/linear/scaled_mm/cutlass.py",
        CUTLASS.format("set_weight_attrs(weight, {'weight_loader': self.padded_weight_loader})"),
        CUTLASS.format("weight.weight_loader = self.padded_weight_loader"),
    ),
    "mxfp4-weight-only-inputs": (
        f"{CT}/compressed_tensors.py",
        SCHEME.format(""),
        SCHEME.format("input_quant"),
    ),
    "deep-gemm-sm121": (
        "vllm/platforms/cuda.py",
        DEEP_GEMM.format("is_device_capability_family"),
        DEEP_GEMM.format("is_device_capability"),
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
    "deep-gemm-sm121": (
        121,
        RunningLayer(name="o_proj", group="linear", kernel="DeepGemmFp8BlockScaledMMKernel"),
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


@pytest.mark.parametrize("name", FAULTS)
def test_predicates(name: str, tmp_path: Path) -> None:
    """Text that does not show the fault is unknown, also if it is no Python."""
    file, faulty, repaired = TEXTS[name]
    path = tmp_path / file
    source = installed_source(tmp_path)
    assert found_in(source) == dict.fromkeys(FAULTS)
    path.parent.mkdir(parents=True)
    for text, value in ((faulty, True), (repaired, False)):
        path.write_text(text)
        assert found_in(source) == {**dict.fromkeys(FAULTS), name: value}
    if name != "humming-head":
        for text in ("", "def (", "unrelated = 1"):
            path.write_text(text)
            assert found_in(source)[name] is None


def test_installed_vllm_equals_record() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    found = found_in(installed_source(Path(spec.origin).parent.parent))
    assert found == facts_of(PINNED).faults


@pytest.mark.parametrize("version", known_versions())
@pytest.mark.parametrize("name", FAULTS)
def test_records_agree_with_repairing_version(name: str, version: tuple[int, int]) -> None:
    repaired = FAULTS[name].repaired
    is_repaired = bool(repaired) and tuple(map(int, repaired.split("."))) <= version
    assert facts_of(version).faults[name] is not is_repaired, short_version(version)


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
        (100, RunningLayer(name="experts", group="experts", kernel="CutlassExpertsMxfp4")),
        (89, RunningLayer(name="experts", group="experts", kernel="TritonExperts")),
    ],
)
def test_layers_without_fault(sm: int, layer: RunningLayer) -> None:
    assert [*faults_of(dict.fromkeys(FAULTS, True), sm, [layer])] == []
