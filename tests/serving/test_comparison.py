"""Comparisons of start-up logs with dry loads: servers on several GPUs, and what may be wrong.

The dry loads use vLLM's own classes, so the logs have the messages of the same version.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.command import Ran, vexport
from tests.inference.replying import Sent, replying, with_card
from tests.models import Good, quantize, save_llama, save_qwen3, save_qwen3_moe
from tests.serving.logs import (
    FLASH_ATTN,
    FLASHINFER,
    Line,
    Served,
    coloured,
    composed,
    in_container,
    in_json,
    plain,
)
from tests.texts import assert_contains

pytestmark = pytest.mark.vllm

MARLIN = (
    ("__init__.py:923", "Using MarlinLinearKernel for mixed-precision linear"),
    ("compressed_tensors_wNa16.py:138", "Using MarlinLinearKernel for CompressedTensorsWNA16"),
    FLASH_ATTN,
)


def _fp8(kernel: str, place: str = "__init__.py:797") -> tuple[tuple[str, str], ...]:
    return ((place, f"Selected {kernel} for CompressedTensorsW8A8Fp8"), FLASH_ATTN)


def _block(kernel: str) -> tuple[tuple[str, str], ...]:
    return _fp8(kernel, "__init__.py:758")


def _nvfp4(kernel: str, attention: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("__init__.py:1240", f"Using {kernel} for NVFP4 GEMM"), attention)


# The log of a real server of the micro Llama in W4A16, by vLLM's CPU build.
ON_CPU = (Path(__file__).parent / "w4a16_on_cpu.txt").read_text()
CUTLASS = _fp8("CutlassFP8ScaledMMLinearKernel")
DEEP_GEMM = _block("FlashInferFp8DeepGEMMDynamicBlockScaledKernel")
INT8 = (
    ("__init__.py:846", "Selected CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8"),
    FLASH_ATTN,
)
# Scheme, GPU, server, and form of the lines.
RUNNING: Mapping[str, tuple[str, str, Served, Callable[[Line], str]]] = {
    "ampere": ("W4A16", "A10G", Served(selected=MARLIN), plain),
    "ada, two ranks": ("FP8_DYNAMIC", "L40S", Served(selected=CUTLASS, tp=2), composed),
    "hopper": ("FP8_BLOCK", "H100", Served(selected=DEEP_GEMM), in_container),
    "blackwell": (
        *("NVFP4", "B200"),
        Served(selected=_nvfp4("FlashInferCuteDslNvFp4LinearKernel", FLASHINFER)),
        in_json,
    ),
    "gb10": (
        *("NVFP4", "GB10"),
        Served(selected=_nvfp4("FlashInferCutlassNvFp4LinearKernel", FLASH_ATTN)),
        coloured,
    ),
    "arguments": (
        *("FP8_DYNAMIC", "H100"),
        Served(
            selected=CUTLASS,
            length=128,
            arguments={"max_model_len": 128, "enable_prefix_caching": False, "api_key": ["x"]},
        ),
        plain,
    ),
}


def _compare(checkpoint: Path, log: str, folder: Path, *options: str) -> Ran:
    file = folder / "server.log"
    file.write_text(log)
    return vexport("load", checkpoint, "--log", file, *options, "--quiet")


def _report(ran: Ran) -> dict[str, object]:
    (report,) = json.loads(ran.stdout)
    assert isinstance(report, dict)
    return report


def _statuses(report: Mapping[str, object]) -> dict[str, str]:
    server = report["server"]
    assert isinstance(server, dict)
    return {value["name"]: value["status"] for value in server["values"]}


def _rules(report: Mapping[str, object]) -> list[str]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return [finding["rule"] for finding in findings]


@pytest.mark.parametrize("case", RUNNING)
def test_same_server(case: str, good: Good, tmp_path: Path) -> None:
    scheme, gpu, served, form = RUNNING[case]
    ran = _compare(good(scheme), served.text(form), tmp_path, "--gpu", gpu, "--format", "json")
    assert (ran.code, ran.stderr) == (0, "")
    statuses = _statuses(_report(ran))
    assert {*statuses.values()} == {"equal"}
    assert {"quantization method", "attention backend", "sequences in the KV cache"} <= {*statuses}
    assert any(name.startswith("kernel of") for name in statuses)


@pytest.mark.parametrize(
    ("scheme", "gpu", "served", "reason"),
    [
        (
            *("FP8_DYNAMIC", "H100"),
            Served(
                selected=_fp8("MarlinFP8ScaledMMLinearKernel"),
                arguments={"linear_backend": "marlin"},
            ),
            "because of linear_backend=marlin in the log",
        ),
        (
            *("FP8_BLOCK", "H100", Served(selected=_block("DeepGemmFp8BlockScaledMMKernel"))),
            "as on a host without a CUDA toolkit (nvcc)",
        ),
        (
            *("NVFP4", "GB10"),
            Served(selected=_nvfp4("CutlassNvFp4LinearKernel", FLASH_ATTN)),
            "as on a host without a CUDA toolkit (nvcc)",
        ),
        (
            *("FP8_DYNAMIC", "H100", Served(selected=_fp8("TritonFP8ScaledMMLinearKernel"))),
            "",
        ),
    ],
)
def test_other_kernel(
    scheme: str, gpu: str, served: Served, reason: str, good: Good, tmp_path: Path
) -> None:
    ran = _compare(good(scheme), served.text(), tmp_path, "--gpu", gpu, "--format", "json")
    assert ran.code == 1
    report = _report(ran)
    (value,) = (
        each
        for each in report["server"]["values"]  # type: ignore[index]
        if each["status"] == "differs"
    )
    assert value["reason"] == reason
    assert _rules(report) == ["serving/difference"]


def test_tested_argument(good: Good, tmp_path: Path) -> None:
    served = Served(
        selected=_fp8("MarlinFP8ScaledMMLinearKernel"), arguments={"linear_backend": "marlin"}
    )
    options = ("--gpu", "H100", "--engine-arg", "linear_backend=marlin")
    assert _compare(good("FP8_DYNAMIC"), served.text(), tmp_path, *options).code == 0


def test_unknown_tested_argument_is_bad_input(good: Good, tmp_path: Path) -> None:
    log = Served(selected=CUTLASS).text()
    ran = _compare(good("FP8_DYNAMIC"), log, tmp_path, "--gpu", "H100", "--engine-arg", "unknown=1")
    assert ran.code == 2
    assert "engine/unknown-argument" in ran.stderr


def test_restarted_server(good: Good, tmp_path: Path) -> None:
    earlier = Served(selected=_fp8("MarlinFP8ScaledMMLinearKernel"), model="/models/earlier")
    log = earlier.text() + Served(selected=CUTLASS).text()
    options = ("--gpu", "H100", "--format", "json")
    ran = _compare(good("FP8_DYNAMIC"), log, tmp_path, *options)
    assert ran.code == 0
    spots = _report(ran)["blind_spots"]
    assert isinstance(spots, list)
    assert any(spot.startswith("the starts of the server before line ") for spot in spots)


def test_known_fault_of_the_running_kernel(good: Good, tmp_path: Path) -> None:
    """Humming rounds inputs that the checkpoint leaves in 16 bits, which is a warning."""
    selected = (("__init__.py:1120", "Using HummingMxFp4LinearKernel for MXFP4 GEMM"), FLASH_ATTN)
    log = Served(selected=selected).text()
    ran = _compare(good("MXFP4A16"), log, tmp_path, "--sm", "90", "--format", "json")
    assert ran.code == 0
    report = _report(ran)
    assert _rules(report) == ["faults/fewer-bits"]
    assert {*_statuses(report).values()} == {"equal"}


def test_fault_that_an_argument_avoids(good: Good, tmp_path: Path) -> None:
    served = Served(
        selected=_block("MarlinFP8ScaledMMLinearKernel"), arguments={"linear_backend": "marlin"}
    )
    ran = _compare(good("FP8_BLOCK"), served.text(), tmp_path, "--sm", "121", "--format", "json")
    assert ran.code == 1
    assert _rules(_report(ran)) == ["serving/difference"]


def test_without_gpu_kernels_are_not_compared(good: Good, tmp_path: Path) -> None:
    served = Served(selected=_fp8("TritonFP8ScaledMMLinearKernel"))
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path)
    assert ran.code == 0
    assert "not verified: the kernels: name the server's GPU with --gpu or --sm" in ran.stdout


@pytest.mark.parametrize(
    ("scheme", "served"),
    [
        ("FP8_DYNAMIC", Served(selected=CUTLASS)),  # other kernels on SM 80
        ("W8A8", Served(selected=INT8)),  # refused on SM 100
    ],
)
def test_findings_on_other_gpus_are_left_out(
    scheme: str, served: Served, good: Good, tmp_path: Path
) -> None:
    ran = _compare(good(scheme), served.text(), tmp_path, "--format", "json")
    assert (ran.code, _rules(_report(ran))) == (0, [])


def test_server_on_a_cpu(good: Good, tmp_path: Path) -> None:
    ran = _compare(good("W4A16"), ON_CPU, tmp_path, "--format", "json")
    assert ran.code == 0
    report = _report(ran)
    statuses = _statuses(report)
    assert {*statuses.values()} == {"equal"}
    assert {"architecture", "quantization method", "dtype", "KV cache dtype"} <= {*statuses}
    assert {"checkpoint size, GiB", "maximum length", "sequences in the KV cache"} <= {*statuses}
    assert not any(name.startswith(("kernel", "attention")) for name in statuses)
    spots = report["blind_spots"]
    assert "the kernels: the server runs on cpu, and a dry load selects kernels for CUDA" in spots  # type: ignore[operator]


def test_server_of_another_checkpoint_on_a_cpu(llama: Path, tmp_path: Path) -> None:
    plain_model = _compare(llama, ON_CPU, tmp_path)
    assert (plain_model.code, "[serving/other-model]" in plain_model.stderr) == (2, True)
    source = save_llama(tmp_path / "llama", num_key_value_heads=4)
    other = quantize(source, tmp_path / "other", "W4A16")
    larger_cache = _compare(other, ON_CPU, tmp_path, "--format", "json")
    assert larger_cache.code == 1
    statuses = _statuses(_report(larger_cache))
    different = [name for name, status in statuses.items() if status == "differs"]
    assert different == ["sequences in the KV cache"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model with experts in FP8_DYNAMIC."""
    folder = tmp_path_factory.mktemp("moe")
    return quantize(save_qwen3_moe(folder / "source"), folder / "moe", "FP8_DYNAMIC")


def _experts(backend: str, **arguments: object) -> Served:
    line = (
        f"Using {backend} Fp8 MoE backend out of potential backends: ['AITER', "
        "'FLASHINFER_TRTLLM', 'FLASHINFER_CUTLASS', 'DEEPGEMM', 'VLLM_CUTLASS', 'TRITON']."
    )
    return Served(
        architecture="Qwen3MoeForCausalLM",
        selected=(*CUTLASS, ("fp8.py:525", line)),
        arguments=arguments,
    )


@pytest.mark.parametrize(
    ("served", "status", "reason"),
    [
        (_experts("VLLM_CUTLASS"), "equal", ""),
        (_experts("DEEPGEMM"), "differs", ""),
        (
            *(_experts("TRITON", moe_backend="triton"), "differs"),
            "because of moe_backend=triton in the log",
        ),
    ],
)
def test_experts(served: Served, status: str, reason: str, moe: Path, tmp_path: Path) -> None:
    ran = _compare(moe, served.text(), tmp_path, "--gpu", "H100", "--format", "json")
    assert ran.code == (status == "differs")
    report = _report(ran)
    values = {each["name"]: each for each in report["server"]["values"]}  # type: ignore[index]
    backend = values.pop("Fp8 MoE backend")
    assert (backend["status"], backend["reason"]) == (status, reason)
    assert {each["status"] for each in values.values()} == {"equal"}
    assert not any("does not log" in spot for spot in report["blind_spots"])  # type: ignore[attr-defined]


def test_log_without_the_backend_of_experts(moe: Path, tmp_path: Path) -> None:
    served = Served(architecture="Qwen3MoeForCausalLM", selected=CUTLASS)
    ran = _compare(moe, served.text(), tmp_path, "--gpu", "H100")
    assert (ran.code, "Fp8 MoE backend: not in the log" in ran.stdout) == (3, True)


def test_gpu_in_the_log(good: Good, tmp_path: Path) -> None:
    config = (
        "fp8_utils.py:980",
        "Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file "
        "not found at /vllm/configs/N=256,K=256,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,"
        "block_shape=[128,128].json",
    )
    served = Served(selected=_fp8("TritonFP8ScaledMMLinearKernel"), while_loading=[config])
    assert _compare(good("FP8_DYNAMIC"), served.text(), tmp_path).code == 1


@pytest.mark.parametrize(
    ("served", "name"),
    [
        (Served(selected=CUTLASS, kv_cache_dtype="fp8"), "KV cache dtype"),
        (Served(selected=CUTLASS, dtype="torch.float16"), "dtype"),
        (Served(selected=CUTLASS, length=200), "maximum length"),
        (Served(selected=CUTLASS, cache_tokens_factor=2.0), "sequences in the KV cache"),
    ],
)
def test_other_value(served: Served, name: str, good: Good, tmp_path: Path) -> None:
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path, "--sm", "90", "--format", "json")
    assert ran.code == 1
    statuses = _statuses(_report(ran))
    assert [each for each in statuses if statuses[each] == "differs"] == [name]


@pytest.mark.parametrize(
    "served",
    [
        Served(selected=MARLIN, architecture="Qwen3ForCausalLM"),
        Served(selected=CUTLASS, method="fp8"),
        Served(selected=CUTLASS, checkpoint_gib="14.96"),
    ],
)
def test_other_model(served: Served, good: Good, tmp_path: Path) -> None:
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path, "--sm", "90")
    assert ran.code == 2
    assert "[serving/other-model]" in ran.stderr


def test_other_folder_of_this_machine(good: Good, tmp_path: Path) -> None:
    other = save_qwen3(tmp_path / "qwen3")
    served = Served(selected=CUTLASS, model=str(other))
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path)
    assert (ran.code, "[serving/other-model]" in ran.stderr) == (2, True)


def test_other_version(good: Good, tmp_path: Path) -> None:
    served = Served(selected=CUTLASS, version="0.33.0+cu130")
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path, "--gpu", "H100")
    assert ran.code == 3
    assert "--vllm-python to an interpreter with vLLM 0.33.0" in ran.stderr


@pytest.mark.parametrize("end", [4, -2])
def test_half_a_start(end: int, good: Good, tmp_path: Path) -> None:
    log = "\n".join(Served(selected=CUTLASS).text().splitlines()[:end])
    ran = _compare(good("FP8_DYNAMIC"), log, tmp_path, "--gpu", "H100")
    assert ran.code == 3
    assert "[serving/" in ran.stderr


@pytest.mark.parametrize(
    "selected",
    [
        CUTLASS[1:],
        (*CUTLASS, ("__init__.py:1240", "Using MarlinNvFp4LinearKernel for NVFP4 GEMM")),
    ],
)
def test_missing_and_unknown_selections(
    selected: tuple[tuple[str, str], ...], good: Good, tmp_path: Path
) -> None:
    ran = _compare(good("FP8_DYNAMIC"), Served(selected=selected).text(), tmp_path, "--sm", "90")
    assert ran.code == 3
    assert ran.stdout.startswith("INCONCLUSIVE")


def test_selections_while_loading_are_not_verified(good: Good, tmp_path: Path) -> None:
    late = [("modular_kernel.py:77", "Using TritonExperts MoE backend")]
    served = Served(selected=CUTLASS, while_loading=late)
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path, "--sm", "90", "--format", "json")
    assert ran.code == 0
    spots = _report(ran)["blind_spots"]
    assert any("MoE backend TritonExperts in line 11" in spot for spot in spots)  # type: ignore[attr-defined]
    assert not any("does not log" in spot for spot in spots)  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [{}, {"linear_backend": "marlin"}])
def test_kernels_that_vllm_does_not_log(
    arguments: Mapping[str, str], good: Good, tmp_path: Path
) -> None:
    served = Served(selected=[FLASH_ATTN], arguments=arguments)
    ran = _compare(good("FP8_DYNAMIC"), served.text(), tmp_path, "--gpu", "A100")
    assert ran.code == 0
    chosen = ", and the log has linear_backend=marlin" if arguments else ""
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert_contains(
        ran.stdout,
        f"not compared: kernels of {', '.join(f'model.layers.*.{each}' for each in layers)} (this "
        f"vLLM does not log them; the dry load has HummingFP8ScaledMMLinearKernel{chosen})",
        "environment variables of the server",
    )


def test_remarks(good: Good, tmp_path: Path) -> None:
    text = "Using KV cache scaling factor 1.0 for fp8_e4m3."
    served = Served(selected=CUTLASS, warnings=[("kv_cache.py:120", text)])
    options = ("--sm", "90", "--format", "json")
    report = _report(_compare(good("FP8_DYNAMIC"), served.text(), tmp_path, *options))
    assert (report["ok"], _rules(report)) == (True, ["serving/numbers"])


@pytest.mark.parametrize("log", ["", "nothing of vLLM\n" * 50, "\x00\xff" * 400, "{}" * 90])
def test_garbage(log: str, good: Good, tmp_path: Path) -> None:
    assert _compare(good("FP8_DYNAMIC"), log, tmp_path).code == 2


def test_checkpoint_is_validated_first(tmp_path: Path) -> None:
    ran = vexport("load", tmp_path / "absent", "--log", tmp_path / "absent.log")
    assert (ran.code, "absent.log" in ran.stderr) == (2, False)


def test_formats_for_ci(good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    log = Served(selected=_fp8("TritonFP8ScaledMMLinearKernel")).text()
    junit = _compare(good("FP8_DYNAMIC"), log, tmp_path, "--sm", "90", "--format", "junit").stdout
    assert '<failure message="' in junit
    github = _compare(good("FP8_DYNAMIC"), log, tmp_path, "--sm", "90", "--format", "github").stdout
    assert github.startswith("::error ")
    assert "TritonFP8ScaledMMLinearKernel" in summary.read_text()
    half = "\n".join(Served(selected=CUTLASS).text().splitlines()[:-2])
    junit = _compare(good("FP8_DYNAMIC"), half, tmp_path, "--sm", "90", "--format", "junit").stdout
    assert 'type="INCONCLUSIVE"' in junit


@pytest.mark.parametrize(
    "options", [("--dry",), ("--tp", "2"), ("--run-dir", "x"), ("--mode", "both")]
)
def test_options_without_meaning(options: tuple[str, ...], tmp_path: Path) -> None:
    ran = vexport("load", tmp_path, "--log", "-", *options)
    assert (ran.code, "--log" in ran.stderr) == (2, True)


def test_running_server(good: Good) -> None:
    checkpoint = good("FP8_DYNAMIC")
    info = 'vllm:cache_config_info{cache_dtype="auto",kv_cache_memory_bytes="None"} 1.0\n'

    def reply(path: str, body: dict[str, object]) -> Sent:
        if path == "/metrics":
            return Sent(content=info.encode())
        return with_card(root="/models/served", max_model_len=200)(path, body)

    with replying(reply) as url:
        other = vexport("load", checkpoint, "--log", url, "--quiet", "--format", "json")
        same = vexport("load", checkpoint, "--log", url, "--quiet", "--max-model-len", "200")
    assert (other.code, same.code) == (1, 0)
    statuses = _statuses(_report(other))
    assert (statuses["maximum length"], statuses["KV cache dtype"]) == ("differs", "equal")
    assert "a running server does not state them" in same.stdout
