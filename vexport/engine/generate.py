"""Asks a loaded engine for greedy continuations, full-vocabulary log-probabilities and its
kernels.
"""

import json
import math
import os
import platform
import re
from array import array
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors.torch import save_file

from vexport.engine.kernels import activation_bits, kernel_of
from vexport.engine.messages import CANARY_TOKENS, DRAFT_TOKENS, SessionRequest, draft_counts
from vexport.files import atomic_path
from vexport.records import Canary, DraftCounts, EngineInfo, OnProgress
from vexport.scenario.serve import TYPED, EngineArguments

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput
    from vllm.tokenizers import TokenizerLike

_ROWS_AT_ONCE = 16
# What the CPU build's kernels leave out, measured or read in vLLM's model_executor/kernels/linear.
_KERNEL_BLIND_SPOTS = {
    "CPUFp8BlockScaledMMKernel": "FP8 block activations stay in the model's dtype "
    "(scaled_mm/cpu.py)",
    # From vLLM 0.33 on.
    "CPUFp8ChannelWiseScaledMMLinearKernel": "FP8 activations stay in the model's dtype "
    "(scaled_mm/cpu.py)",
    "CPUFp8PerTensorScaledMMLinearKernel": "static FP8 input scales are ignored (scaled_mm/cpu.py)",
    "EmulationMxfp8LinearKernel": "MXFP8 activations stay in the model's dtype "
    "(mxfp8/emulation.py)",
}
_CPU_BLIND_SPOT = "GPU kernels were not run: their rounding order, their limits on shapes"
NONE = "none"
# The layer's number in front of a module's kind.
_LAYER = re.compile(r"\.\d+\.")
_CHOOSES = re.compile(
    r"VLLM_(\w+_)?(AITER|ALLREDUCE|ATTENTION_BACKEND|BATCH_INVARIANT|DEEP_GEMM|EMULATION|FLASHINFER|FP4|FP8|"
    r"HUMMING|INT4|KERNELS?|MARLIN|MLA|MOE|MXFP[48]|NVFP4|PRECISION|QUANT|QUANTIZATION|REDUCE|SAMPLER|SKINNY|"
    r"TRITON)(_\w+)?"
)
# Settings that match the above but are left out: paths, sizes, and vexport's own.
_UNRELATED = re.compile(r"_(CACHE|DIR|SIZE|THREADS)(_|$)|^VLLM_CPU_INT4_W4A8$")


def run_canaries(llm: "LLM", request: SessionRequest, report: OnProgress) -> tuple[Canary, ...]:
    """Continue each prompt greedily by CANARY_TOKENS tokens, or as many as the longest sequence
    leaves.

    The engine does not stop where the model ends the sequence: that place is noted, and what comes
    after it still shows whether the numbers stay finite.
    """
    from vllm import SamplingParams

    report("canaries", 0, len(request.canaries))
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in request.canaries]
    longest = llm.llm_engine.model_config.max_model_len
    lengths = [max(1, min(CANARY_TOKENS, longest - len(prompt))) for prompt in prompts]
    samplings = [
        SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0, seed=request.seed
        )
        for length in lengths
    ]
    outputs = _answers(llm, prompts, samplings)
    report("canaries", len(outputs), len(outputs))
    # The tokens at which vLLM would stop: the tokenizer's own and those of generation_config.json.
    stops = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
    return tuple(
        _canary(text, output.outputs[0], ends, tokenizer)
        for text, output in zip(request.canaries, outputs, strict=True)
    )


def _answers(
    llm: "LLM", prompts: Sequence[Sequence[int]], sampling: "SamplingParams | list[SamplingParams]"
) -> "list[RequestOutput]":
    """The answers to prompts of token ids."""
    tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs: list[RequestOutput] = llm.generate(tokens, sampling, use_tqdm=False)
    return outputs


def _canary(
    prompt: str, output: "CompletionOutput", ends: Set[int | None], tokenizer: "TokenizerLike"
) -> Canary:
    """The continuation up to the first end of the sequence, and how far the engine went."""
    tokens = list(output.token_ids)
    ended = next((number for number, token in enumerate(tokens) if token in ends), None)
    chosen = [
        entry[token].logprob for entry, token in zip(output.logprobs or (), tokens, strict=True)
    ]
    return Canary(
        prompt=prompt,
        text=output.text
        if ended is None
        else tokenizer.decode(tokens[:ended], skip_special_tokens=True),
        tokens=len(tokens),
        finish_reason=str(output.finish_reason) if ended is None else "stop",
        ended_after=ended,
        non_finite=sum(not math.isfinite(value) for value in chosen),
    )


def write_logprobs(
    llm: "LLM", prompts: Sequence[Sequence[int]], path: Path, report: OnProgress
) -> None:
    """Write log-probabilities of the next token at every position but the last of each prompt.

    `path` becomes a safetensors file with one float32 tensor (len(prompt) - 1, vocabulary) a
    prompt, named `prompt.0`, `prompt.1`, ... One prompt is asked at a time: vLLM answers in Python
    lists, some 100 bytes a number.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    tensors: dict[str, torch.Tensor] = {}
    for number, prompt in enumerate(prompts):
        report("logprobs", number, len(prompts))
        (output,) = _answers(llm, [prompt], sampling)
        tensors[f"prompt.{number}"] = dense(output.prompt_logprobs)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    report("logprobs", len(prompts), len(prompts))


def write_text_scores(
    llm: "LLM", rows: Sequence[Sequence[int]], path: Path, report: OnProgress
) -> None:
    """Write what each token of the rows but the first costs, and the token that was likeliest in
    its place.

    `path` becomes a safetensors file with `nll.0` (float32, nats) and `likeliest.0` (int64), both
    of shape (len(row) - 1,), and so on for each row.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    tensors: dict[str, torch.Tensor] = {}
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        report("text", start, len(rows))
        some = rows[start : start + _ROWS_AT_ONCE]
        for number, (row, output) in enumerate(
            zip(some, _answers(llm, some, sampling), strict=True), start
        ):
            positions = [
                position for position in output.prompt_logprobs or () if position is not None
            ]
            costs = [
                -position[token].logprob for token, position in zip(row[1:], positions, strict=True)
            ]
            best = [
                max(position, key=lambda token: position[token].logprob) for position in positions
            ]
            tensors[f"nll.{number}"] = torch.tensor(costs, dtype=torch.float32)
            tensors[f"likeliest.{number}"] = torch.tensor(best, dtype=torch.int64)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    report("text", len(rows), len(rows))


def count_drafts(
    llm: "LLM", prompts: Sequence[Sequence[int]], report: OnProgress
) -> tuple[DraftCounts, ...]:
    """Continue the prompts greedily, one at a time, and count what was drafted and accepted after
    each.

    The engine does not stop where the model ends the sequence: each prompt has the same number of
    tokens.
    """
    from vllm import SamplingParams

    def counters() -> DraftCounts:
        return draft_counts(
            {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        )

    longest = llm.llm_engine.model_config.max_model_len
    counts, before = list[DraftCounts](), counters()
    for number, prompt in enumerate(prompts):
        report("drafts", number, len(prompts))
        most = max(1, min(DRAFT_TOKENS, longest - len(prompt)))
        sampling = SamplingParams(
            temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False
        )
        _answers(llm, [prompt], sampling)
        after = counters()
        counts.append(after - before)
        before = after
    report("drafts", len(prompts), len(prompts))
    return tuple(counts)


def dense(flat: "FlatLogprobs") -> torch.Tensor:
    """vLLM's flat lists as a matrix (positions, vocabulary); the first position has none and is
    left out.

    Each position lists the prompt's own token and then the whole vocabulary, best first.
    """
    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True):
        # An array reads a list some ten times as fast as torch does: a position has the whole
        # vocabulary.
        tokens = torch.frombuffer(array("q", flat.token_ids[start:end]), dtype=torch.int64)
        values = torch.frombuffer(array("f", flat.logprobs[start:end]), dtype=torch.float32)
        row = torch.full((int(tokens.max()) + 1,), float("-inf"))
        rows.append(row.scatter_(0, tokens, values))
    return torch.stack(rows)


class DescribeKernels:
    """Mixed into vLLM's worker (`worker_extension_cls`), so that a string names the method to call
    there.
    """

    def vexport_kernels(self) -> list[list[str]]:
        """Return five texts for each linear or expert layer.

        These are its name, its scheme, its kernel, what the kernel leaves out, and how many bits
        the kernel's inputs have (empty if that is unknown).
        """
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return [
            [name, *_describe_layer(layer)]
            for name, layer in model.named_modules()
            if hasattr(layer, "quant_method")
            and hasattr(layer, "weight_loader")
            and "Embedding" not in type(layer.quant_method).__name__
        ]


def _describe_layer(layer: torch.nn.Module) -> tuple[str, str, str, str]:
    """Return the scheme, the kernel, the kernel's blind spot and the bits of its inputs for one
    layer.
    """
    scheme = getattr(layer, "scheme", None) or layer.quant_method
    chosen, name = kernel_of(scheme)
    bits = activation_bits(scheme, chosen, name)
    if not name and getattr(scheme, "use_batch_invariant", False):
        name = (
            "dequantized, batch-invariant"  # VLLM_BATCH_INVARIANT from 0.33 on: no kernel of INT4
        )
    kernel = name or type(layer.quant_method).__name__
    return type(scheme).__name__, kernel, _blind_spot(layer, scheme, kernel), str(bits or "")


def _blind_spot(layer: torch.nn.Module, scheme: object, kernel: str) -> str:
    if type(scheme).__module__.endswith("w8a8_int8") and getattr(
        scheme, "is_static_input_scheme", False
    ):
        return "static INT8 input scales are ignored (scaled_mm/cpu.py)"
    if getattr(layer, "use_w4a8", False):
        return "weight-only INT4 ran with INT8 activations (mixed_precision/cpu.py)"
    emulated = f"{kernel} stands in for the GPU kernel" if "Emulation" in kernel else ""
    return "; ".join(filter(None, (emulated, _KERNEL_BLIND_SPOTS.get(kernel))))


def describe(llm: "LLM", given: EngineArguments, *, start_seconds: float) -> EngineInfo:
    """EngineInfo of a loaded engine, started with what was `given`; asks its workers, wherever they
    run.
    """
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    # Ranks of tensor parallelism have the same layers, stages of a pipeline each its own.
    rows = [row for rank in llm.collective_rpc("vexport_kernels") for row in rank]
    on_cpu = current_platform.is_cpu()
    spots = dict.fromkeys(row[3] for row in rows if row[3])
    # `mlp.down_proj: Kernel (Scheme)`, once for each kind of layer and kernel, in the model's
    # order.
    kernels = dict.fromkeys(
        f"{_LAYER.split(name)[-1]}: {kernel}" + (f" ({scheme})" if scheme != kernel else "")
        for name, scheme, kernel, *_ in rows
    )
    config = llm.llm_engine.vllm_config
    unseen = (
        ", their collectives"
        if config.parallel_config.world_size > 1
        else ", and tensor parallelism"
    )
    mode = config.compilation_config.mode
    return EngineInfo(
        vllm=vllm_version,
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=str(current_platform.device_type),
        processor=_processor() if on_cpu else str(current_platform.get_device_name()),
        dtype=str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        compilation=str(getattr(mode, "name", mode)),  # a number or an enum, by the version
        settings=_settings(llm, given),
        multiprocess=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1",
        emulated=any("Emulation" in row[2] for row in rows),
        kernels=tuple(kernels),
        input_bits=min((int(row[4]) for row in rows if row[4]), default=None),
        blind_spots=(_CPU_BLIND_SPOT + unseen, *spots) if on_cpu else (),
        start_seconds=start_seconds,
    )


def _settings(llm: "LLM", given: EngineArguments) -> dict[str, str]:
    """The engine's arguments, vLLM's defaults too: names of EngineArgs to values in words.

    `kv_cache_dtype` is what was asked for: vLLM's own answer depends on the checkpoint.
    """
    config = llm.llm_engine.vllm_config
    others = {name: value for name, value in given.items() if name not in TYPED}
    return {
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.parallel_config.pipeline_parallel_size),
        "distributed_executor_backend": str(config.parallel_config.distributed_executor_backend),
        "gpu_memory_utilization": str(config.cache_config.gpu_memory_utilization),
        "max_num_seqs": str(config.scheduler_config.max_num_seqs),
        "kv_cache_dtype": str(given.get("kv_cache_dtype", "auto")),
        "max_model_len": str(config.model_config.max_model_len),
        "engine_args": json.dumps(others, sort_keys=True) if others else "none",
        "environment": answer_environment(),
    }


def _processor() -> str:
    """The CPU's model name and the widest of the instruction sets that vLLM's kernels look for."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set(re.findall(r"\b(amx_tile|avx512_bf16|avx512f|avx2)\b", text))
    widest = [flag for flag in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return (
        f"{name.group(1) if name else platform.machine()} "
        f"({', '.join(widest) or platform.machine()})"
    )


def answer_environment(environment: Mapping[str, str] = os.environ) -> str:
    """The variables that are set, by name: `VLLM_BATCH_INVARIANT=1`; "none" if none is."""
    names = (
        name
        for name in sorted(environment)
        if _CHOOSES.fullmatch(name) and not _UNRELATED.search(name)
    )
    return " ".join(f"{name}={environment[name]}" for name in names) or NONE
