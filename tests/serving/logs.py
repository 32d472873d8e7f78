"""Start-up logs of `vllm serve`, made from vLLM's messages for servers on several GPUs.

The messages and their order are vLLM's. A test chooses the values, and the form of the lines.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

# Process, level, place in vLLM's code, and message.
Line = tuple[str, str, str, str]
_API, _CORE = "APIServer pid=41", "EngineCore pid=118"
# Bytes of the KV cache of the micro Llama: keys and values, 3 layers, 2 heads of 64 in 16 bits.
_TOKEN_BYTES = 2 * 3 * 2 * 64 * 2
_GIB = 2**30
FLASH_ATTN = (
    "cuda.py:506",
    "Using FLASH_ATTN attention backend out of potential backends: "
    "['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION'].",
)
FLASHINFER = (
    "cuda.py:506",
    "Using FLASHINFER attention backend out of potential backends: "
    "['FLASHINFER', 'FLASH_ATTN', 'TRITON_ATTN', 'FLEX_ATTENTION'].",
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server of the micro Llama. `selected` are places and messages about kernels."""

    version: str = "0.32.0"
    model: str = "/models/served"
    architecture: str = "LlamaForCausalLM"
    method: str = "compressed-tensors"
    dtype: str = "torch.bfloat16"
    kv_cache_dtype: str = "auto"
    length: int = 256
    tp: int = 1
    selected: Sequence[tuple[str, str]] = ()
    while_loading: Sequence[tuple[str, str]] = ()
    warnings: Sequence[tuple[str, str]] = ()
    arguments: Mapping[str, object] = field(default_factory=dict)
    cache_gib: float = 20.25
    checkpoint_gib: str = "0.00"
    cache_tokens_factor: float = 1.0

    def lines(self) -> list[Line]:
        """Return the lines of a whole start."""
        workers = [
            f"Worker_TP{rank} pid={200 + rank}" if self.tp > 1 else _CORE for rank in range(self.tp)
        ]
        given = {"model": self.model, "host": "0.0.0.0", "port": 8000, **self.arguments}
        if self.tp > 1:
            given["tensor_parallel_size"] = self.tp
        config = (
            f"model='{self.model}', speculative_config=None, tokenizer='{self.model}', "
            f"skip_tokenizer_init=False, tokenizer_mode=auto, revision=None, trust_remote_code="
            f"False, dtype={self.dtype}, max_seq_len={self.length}, download_dir=None, "
            f"load_format=auto, tensor_parallel_size={self.tp}, pipeline_parallel_size=1, "
            f"data_parallel_size=1, quantization={self.method}, enforce_eager=False, "
            f"kv_cache_dtype={self.kv_cache_dtype}, device_config=cuda, seed=0, "
            f"served_model_name=chat, compilation_config={{'mode': 3, 'dtype': 'x'}}"
        )
        sequence = self.length * _TOKEN_BYTES / self.tp
        concurrency = self.cache_tokens_factor * self.cache_gib * _GIB / sequence
        tokens = int(concurrency * self.length)
        beginning: list[Line] = [
            (_API, "INFO", "api_utils.py:286", f"non-default args: {given}"),
            (_API, "INFO", "model.py:733", f"Resolved architecture: {self.architecture}"),
            (_API, "INFO", "model.py:2152", f"Using max model len {self.length}"),
            (_API, "INFO", "scheduler.py:252", "Chunked prefill is enabled."),
            *((_API, "WARNING", place, text) for place, text in self.warnings),
            (
                *(_CORE, "INFO", "core.py:118"),
                f"Initializing a V1 LLM engine (v{self.version}) with config: {config}",
            ),
        ]
        ends: list[Line] = [
            (_CORE, "INFO", "kv_cache_utils.py:2327", self._cache(tokens, concurrency)),
            (
                *(_CORE, "INFO", "core.py:402"),
                "init engine (profile, create kv cache, warmup model) took 41.27 s",
            ),
            (_API, "INFO", "entry.py:140", "Starting vLLM server on http://0.0.0.0:8000"),
        ]
        mixed = zip_longest(*map(self._of_worker, workers))
        return [*beginning, *filter(None, chain.from_iterable(mixed)), *ends]

    def _cache(self, tokens: int, concurrency: float) -> str:
        return (
            f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {self.length:,} "
            f"tokens per request: {concurrency:.2f}x"
        )

    def _of_worker(self, worker: str) -> list[Line]:
        size = (
            f"Filesystem type for checkpoints: XFS. Checkpoint size: {self.checkpoint_gib} GiB. "
            "Available RAM: 412.08 GiB."
        )
        return [
            (worker, "INFO", "gpu_model_runner.py:4812", f"Starting to load model {self.model}..."),
            *((worker, "INFO", place, text) for place, text in self.selected),
            (worker, "INFO", "weight_utils.py:1108", size),
            (worker, "INFO", "default_loader.py:501", "Loading weights took 0.31 seconds"),
            *((worker, "INFO", place, text) for place, text in self.while_loading),
            (
                *(worker, "INFO", "gpu_model_runner.py:5089"),
                "Model loading took 0.01 GiB memory and 1.200341 seconds",
            ),
            (
                *(worker, "INFO", "gpu_worker.py:773"),
                f"Available KV cache memory: {self.cache_gib} GiB",
            ),
        ]

    def text(self, form: Callable[[Line], str] | None = None) -> str:
        """Return the log with each line in a form."""
        return "\n".join(map(form or plain, self.lines())) + "\n"


def plain(line: Line) -> str:
    """Return the line as vLLM writes it to a file."""
    process, level, place, message = line
    return f"({process}) {level} 11-28 21:14:03 [{place}] {message}"


def in_container(line: Line) -> str:
    """Return the line as a container runtime stores it."""
    return f"2026-11-28T21:14:03.512345678Z stderr F {plain(line)}"


def coloured(line: Line) -> str:
    """Return the line as on a terminal."""
    process, level, place, message = line
    return f"\x1b[0;36m({process})\x1b[0;0m \x1b[32m{level}\x1b[0m 11-28 [{place}] {message}"


def in_json(line: Line) -> str:
    """Return the line as a JSON object."""
    _, level, place, message = line
    return json.dumps({"levelname": level, "filename": place, "message": message})


def composed(line: Line) -> str:
    """Return the line as Docker Compose prints it, with the name of the service."""
    return f"vllm-1  | {plain(line)}"
