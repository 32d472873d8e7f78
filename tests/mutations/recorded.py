"""Records of the real vLLM's behaviour with each mutation, and harmless differences.

scripts/mutations/record.py writes the records.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
# The newest vLLM that runs on a CPU.
PINNED_RECORDS = FOLDER / "vllm-0.32.0.jsonl"

_ANOTHER_SCHEME = "the result is a sound checkpoint of another scheme"
_SIXTEEN_BITS = "a scale changes by 0.4 % at most"
_ROUNDED_TO_INTEGER = "a global scale of thousands is rounded to an integer"
# Harmless mutations: vLLM's answers change, but are as close to the unquantized model as those of
# the sound checkpoint. The check may pass them or warn.
HARMLESS_REASONS: Mapping[str, str] = {
    "all weight_scale as bfloat16": "other producers write this dtype; it costs less than rounding "
    "the codes",
    "no inputs": _ANOTHER_SCHEME,
    "inputs of integers": _ANOTHER_SCHEME,
    "k_scale and v_scale exchanged": "keys and values are equally large: the scales differ by 1 %",
    "input_scale of down_proj tenfold": "e4m3 has enough exponents: only tiny values are lost",
    "input_global_scale of o_proj as bfloat16": "all inputs change by the same 0.4 % at most",
    "input_global_scale of o_proj as float16": "all inputs change by the same 0.05 % at most",
    "weight_scale of o_proj as bfloat16": _SIXTEEN_BITS,
    "weight_scale of o_proj as float16": _SIXTEEN_BITS,
    "input_scale of o_proj as bfloat16": _SIXTEEN_BITS,
    "input_scale of o_proj as float16": _SIXTEEN_BITS,
    "k_scale as bfloat16": _SIXTEEN_BITS,
    "v_scale as bfloat16": _SIXTEEN_BITS,
    "weight_global_scale as int32": _ROUNDED_TO_INTEGER,
    "input_global_scale as int32": _ROUNDED_TO_INTEGER,
    "a code of -128": "one weight changes by less than the rounding error of all weights",
}
# Mutations of parts that vLLM does not read. Its answers stay the same, and are wrong.
UNREAD_PARTS: Mapping[tuple[str, str], str] = {
    (
        "gptq",
        "columns in another order",
    ): "vLLM drops g_idx, so that columns get the scales of other columns",
    ("gptq", "zero points that vLLM drops"): "vLLM uses 8 for all zero points",
    ("awq", "another layout"): "vLLM unpacks codes in GEMV's layout as in GEMM's layout",
    ("quark-fp8", "a scale of keys that is zero"): "the CPU's KV cache is not quantized",
}
# Wrong scales that inputs could have. Only a run of the model with text finds them.
FOUND_BY_RUNNING = {
    "FP8: input_scale of down_proj thousandfold: wrong",
    "FP8: input_scale of down_proj times 10000: wrong",
    "NVFP4: input_global_scale of down_proj tenfold: wrong",
    "NVFP4: input_global_scale of down_proj thousandfold: wrong",
}
# Mutations that the static check passes. In a dry load, vLLM fails to build its ModelConfig or
# model.
FOUND_BY_LOADERS = {
    *(
        f"{good}: unknown dtype: raises"
        for good in ("FP8_DYNAMIC with biases", "NVFP4", "W4A16", "W8A8 tied")
    ),
    *(f"{good}: dtype auto: raises" for good in ("FP8_BLOCK", "W4A16_ASYM of Gemma")),
    "FP8_BLOCK: activation null: raises",
}
# Mutations of which the check only warns: vLLM's default scale of 1.0 in all layers of an FP8 KV
# cache suits many models, but not these.
FOUND_WITH_WARNING = {
    *(
        f"{good}: KV cache announced without scales: wrong"
        for good in ("FP8_DYNAMIC with biases", "NVFP4", "W4A16", "W8A8 tied")
    ),
    *(f"{good}: KV cache dynamic: wrong" for good in ("NVFP4A16", "W4A16_ASYM", "peer's NVFP4A16")),
}
# Most divergence of a harmless mutation from the unquantized model, as a multiple of the sound
# checkpoint's divergence.
MOST_DIVERGENCE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record of one mutation.

    `outcome` is "raises", "wrong" (loads, but answers differ), "alike", or "loads" (only a dry load
    ran, which computes nothing). `detail` is vLLM's message, or the largest difference of a log-
    probability. `further` is the mean KL divergence from the unquantized model's answers, as a
    multiple of the sound checkpoint's divergence. It is None if it was not recorded.
    """

    good: str
    name: str
    outcome: str
    detail: str
    further: float | None = None


def read_records(file: Path = PINNED_RECORDS) -> list[Record]:
    """Return all records of one version of vLLM in order, or none without a file."""
    if not file.exists():
        return []
    return [Record(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def write_record(record: Record, file: Path) -> None:
    """Add a record. Replace an existing record of the same mutation."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    line = (
        json.dumps({key: value for key, value in asdict(record).items() if value is not None})
        + "\n"
    )
    start = json.dumps({"good": record.good, "name": record.name})[:-1] + ","
    places = [number for number, known in enumerate(lines) if known.startswith(start)]
    for number in places or [len(lines)]:
        lines[number : number + 1] = [line]
    file.write_text("".join(lines), encoding="utf-8")


def is_as_good(record: Record) -> bool:
    """Return True if recorded answers differ but are no worse, for a listed reason."""
    return (
        record.name in HARMLESS_REASONS
        and record.further is not None
        and record.further <= MOST_DIVERGENCE
    )


def is_counted(record: Record) -> bool:
    """Return True if vLLM has computed with the changed part. A dry load computes nothing."""
    return record.outcome != "loads" and (record.good, record.name) not in UNREAD_PARTS
