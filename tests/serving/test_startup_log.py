"""Statements of start-up logs, worded after logs of several GPUs and log formats."""

import io
import json
from pathlib import Path

import pytest

from tests.command import vexport
from vexport.errors import InputError
from vexport.records.serving import StartupLog
from vexport.serving.startup_log import MOST_MEGABYTES, read_startup_log

ENGINE = (
    "Initializing a V1 LLM engine (v0.33.0) with config: model='/models/qwen3, fp8', "
    "speculative_config=SpeculativeConfig(method='mtp', model='other', num_spec_tokens=2), "
    "tokenizer='/models/qwen3', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=2, "
    "quantization=compressed-tensors, quantization_config={'dtype': 'x', 'model': 'y'}, "
    "kv_cache_dtype=fp8, device_config=cuda, kernel_config=KernelConfig(dtype=None)"
)
SELECTED = {
    "Selected MarlinFP8ScaledMMLinearKernel for CompressedTensorsW8A16Fp8": (
        *("kernel", "CompressedTensorsW8A16Fp8", "MarlinFP8ScaledMMLinearKernel"),
    ),
    "Using MarlinLinearKernel for CompressedTensorsWNA16": (
        *("kernel", "CompressedTensorsWNA16", "MarlinLinearKernel"),
    ),
    "Selected DeepGemmFp8BlockScaledMMKernel for Fp8LinearMethod": (
        *("kernel", "Fp8LinearMethod", "DeepGemmFp8BlockScaledMMKernel"),
    ),
    "Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM": (
        *("kernel", "NVFP4 GEMM", "FlashInferCutlassNvFp4LinearKernel"),
    ),
    "Using MacheteLinearKernel for mixed-precision linear": (
        *("kernel", "mixed-precision linear", "MacheteLinearKernel"),
    ),
    "Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend out of potential backends: ['MARLIN'].": (
        *("experts", "NvFp4 MoE backend", "FLASHINFER_CUTLASS"),
    ),
    "Using FlashInfer CUTLASS Unquantized MoE backend out of potential backends: ['TRITON'].": (
        *("experts", "Unquantized MoE backend", "FlashInfer CUTLASS"),
    ),
    "Using CutlassExpertsMxfp4 for MXFP4 MoE": (*("experts", "MXFP4 MoE", "CutlassExpertsMxfp4"),),
    "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].": (
        *("attention", "attention backend", "FLASH_ATTN"),
    ),
    "Using AttentionBackendEnum.TRITON_ATTN backend.": ("attention", "backend", "TRITON_ATTN"),
}


def _read(*lines: str) -> StartupLog:
    return read_startup_log(io.BytesIO("\n".join(lines).encode()), "log")


def _line(message: str, level: str = "INFO", before: str = "(EngineCore pid=7) ") -> str:
    return f"{before}{level} 11-29 05:06:41 [core.py:133] {message}"


def test_engine_configuration() -> None:
    log = _read(_line(ENGINE))
    found = [log.version, log.model, log.method, log.dtype, log.kv_cache_dtype, log.device]
    assert [each.value for each in found if each] == [
        *("0.33.0", "/models/qwen3, fp8", "compressed-tensors", "bfloat16", "fp8", "cuda")
    ]
    assert log.tensor_parallel_size is not None
    assert log.tensor_parallel_size.value == "2"
    assert log.max_model_len is not None
    assert (log.max_model_len.value, log.max_model_len.line) == ("32768", 1)


@pytest.mark.parametrize("message", SELECTED)
def test_selections(message: str) -> None:
    (selection,) = _read(_line(message)).selections
    assert (selection.kind, selection.subject, selection.choice) == SELECTED[message]


@pytest.mark.parametrize(
    "message",
    [
        "Using FlashInfer for top-p & top-k sampling.",
        "Using FlashAttention version 3",
        "Using Triton/FLA GDN prefill kernel",
        "Using Ray backend requires installation of ray.",
    ],
)
def test_other_choices_are_no_selections(message: str) -> None:
    assert not _read(_line(message)).selections


def test_ranks_state_a_selection_once() -> None:
    message = "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"
    log = _read(*(_line(message, before=f"(Worker_TP{rank} pid={rank}) ") for rank in range(4)))
    assert [each.line for each in log.selections] == [1]


@pytest.mark.parametrize(
    "form",
    [
        lambda text: f"2026-11-29T05:06:41.123456789Z stdout F {_line(text)}",
        lambda text: (
            f"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m \x1b[32mINFO\x1b[0m [core.py:1] {text}"
        ),
        lambda text: json.dumps({"levelname": "INFO", "name": "vllm.core", "message": text}),
        lambda text: json.dumps({"level": "info", "event": text}),
        lambda text: json.dumps({"text": text, "record": {"level": {"name": "INFO"}}}),
        lambda text: json.dumps({"log": f"{_line(text)}\n", "stream": "stdout"}),
        lambda text: json.dumps({"textPayload": _line(text), "severity": "INFO"}),
        lambda text: json.dumps({"resource": {"pod": "a"}, "jsonPayload": {"line": _line(text)}}),
        lambda text: f"pod/server-0 {json.dumps({'message': text})}",
    ],
)
def test_forms_of_lines(form: object) -> None:
    assert callable(form)
    log = _read(form(ENGINE))
    assert log.version is not None
    assert log.version.value == "0.33.0"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_encodings(encoding: str) -> None:
    text = "\r\n".join([_line("Resolved architecture: A"), _line(ENGINE), _line("end")])
    log = read_startup_log(io.BytesIO(text.encode(encoding)), "log")
    assert log.version is not None
    assert (log.version.value, log.version.line) == ("0.33.0", 2)


def test_last_start_counts() -> None:
    kernel = "Selected {}Kernel for CompressedTensorsW8A8Fp8"
    first = ["Resolved architecture: A", ENGINE, kernel.format("Marlin"), "Checkpoint size: 1 GiB"]
    log = _read(
        *map(_line, ["non-default args: {'model': 'a', 'dtype': 'half'}", *first]),
        _line("Auto-disabled DeepGemm for model_type=qwen3.", "WARNING"),
        *map(_line, ["non-default args: {'model': 'b'}", kernel.format("Cutlass")]),
    )
    assert (log.begin, log.arguments) == (7, {"model": "b"})
    assert [each.choice for each in log.selections] == ["CutlassKernel"]
    assert (log.version, log.architecture, log.checkpoint_gib, log.remarks) == (None,) * 3 + ((),)


def test_arguments_without_secrets() -> None:
    text = "non-default args: {'model_tag': 'x', 'api_key': ['abc'], 'kernel': Odd(1, 2), 'n': 2}"
    log = _read(_line(text))
    assert log.arguments == {"model_tag": "x", "api_key": "***", "kernel": "Odd(1, 2)", "n": 2}


def test_remarks_are_warnings_by_kind() -> None:
    log = _read(
        _line("Auto-disabled DeepGemm for model_type=qwen3 on Blackwell.", "WARNING"),
        _line("Using KV cache scaling factor 1.0 for fp8_e4m3.", "WARNING"),
        _line("Requantizing experts to groupwise int4", "WARNING"),
        _line("Scale-out endpoints are disabled.", "INFO"),
    )
    assert [each.kind for each in log.remarks] == ["disabled", "scales", "requantized"]


def test_cache() -> None:
    log = _read(
        _line(
            "GPU KV cache size: 699,008 tokens, Maximum concurrency for 256 tokens per request: "
            "2730.50x"
        )
    )
    assert log.cache_tokens is not None
    assert log.cache_tokens.value == "699008"
    assert log.max_concurrency is not None
    assert log.max_concurrency.value == "2730.50"


@pytest.mark.parametrize("text", ["", "hello", "\x00\xff" * 50, '{"message": 3}', "{" * 5000])
def test_no_log(text: str) -> None:
    with pytest.raises(InputError) as error:
        _read(text)
    assert error.value.rule == "serving/no-log"


def test_too_large() -> None:
    class Endless(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            return b"x" * (1 << 20)

    with pytest.raises(InputError) as error:
        read_startup_log(Endless(), "log")
    assert error.value.facts == {"most": MOST_MEGABYTES}


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(_line(ENGINE))
    called = vexport("load", "--log", str(file), "--format", "json")
    assert called.code == 0
    assert json.loads(called.stdout)["version"] == {"value": "0.33.0", "line": 1}
    assert vexport("load", "--log", str(tmp_path / "absent")).code == 2
    assert vexport("load", str(tmp_path), "--log", str(file)).code == 2
    assert vexport("load").code == 2


def test_first_error_of_a_failed_start() -> None:
    died = "EngineCore failed to start."
    log = _read(_line(ENGINE), _line(died, "ERROR"), _line("Later error", "ERROR"))
    assert log.failure is not None
    assert (log.failure.value, log.failure.line) == (died, 2)
    assert _read(_line(ENGINE), _line("ERROR is a word here")).failure is None
    record = {"levelname": "ERROR", "message": died}
    assert _read(_line(ENGINE), json.dumps(record)).failure == log.failure
