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

# What answers otherwise and does no harm: the check may pass it or warn of it.
_ANOTHER_SCHEME = "a sound checkpoint of another scheme, weights and all"
_SIXTEEN_BITS = "a scale moves by .4 % at most"
_WHOLE = "a global scale of thousands, as a whole number"
# Other answers, as near to the unquantized model's as those of the sound checkpoint: no loss to be
# found.
AS_GOOD: Mapping[str, str] = {
    "all weight_scale as bfloat16": "what others write; rounded afterwards it costs less than "
    "codes do",
    "no inputs": _ANOTHER_SCHEME,
    "inputs of integers": _ANOTHER_SCHEME,
    "k_scale and v_scale exchanged": "keys and values of one size: the scales differ by a "
    "hundredth",
    "input_scale of down_proj tenfold": "e4m3 has exponents left: what is rounded away was "
    "next to nothing",
    "input_global_scale of o_proj as bfloat16": "what enters a layer moves by .4 % at most, alike",
    "input_global_scale of o_proj as float16": "what enters a layer moves by .05 % at most, alike",
    "weight_scale of o_proj as bfloat16": _SIXTEEN_BITS,
    "weight_scale of o_proj as float16": _SIXTEEN_BITS,
    "input_scale of o_proj as bfloat16": _SIXTEEN_BITS,
    "input_scale of o_proj as float16": _SIXTEEN_BITS,
    "k_scale as bfloat16": _SIXTEEN_BITS,
    "v_scale as bfloat16": _SIXTEEN_BITS,
    "weight_global_scale as int32": _WHOLE,
    "input_global_scale as int32": _WHOLE,
    "a code of -128": "one weight of a layer, by less than rounding takes from all of them",
}
# What a checkpoint says and vLLM does not read: it answers as before, and not with what the
# checkpoint means.
UNREAD: Mapping[tuple[str, str], str] = {
    (
        "gptq",
        "columns in another order",
    ): "g_idx is dropped: the columns take other columns' scales",
    ("gptq", "zero points that vLLM drops"): "8 is taken for all of them",
    ("awq", "another layout"): "codes packed by GEMV are unpacked as GEMM packs them",
    ("quark-fp8", "a scale of keys that is zero"): "the CPU's KV cache is not quantized",
}
# Wrong scales of inputs, as large as inputs could be: only text that runs through the model shows
# it.
ONLY_RUNNING_SHOWS = {
    "FP8: input_scale of down_proj thousandfold: wrong",
    "FP8: input_scale of down_proj times 10000: wrong",
    "NVFP4: input_global_scale of down_proj tenfold: wrong",
    "NVFP4: input_global_scale of down_proj thousandfold: wrong",
}
# What a check without vLLM passes: building vLLM's ModelConfig or model fails, in a dry load.
ONLY_LOADERS_SHOW = {
    *(
        f"{good}: unknown dtype: raises"
        for good in ("FP8_DYNAMIC with biases", "NVFP4", "W4A16", "W8A8 tied")
    ),
    *(f"{good}: dtype auto: raises" for good in ("FP8_BLOCK", "W4A16_ASYM of Gemma")),
    "FP8_BLOCK: activation null: raises",
}
# Up to this multiple of the sound checkpoint's divergence from the unquantized model answers are as
# near.
AS_NEAR = 1.1


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
    return record.name in AS_GOOD and record.further is not None and record.further <= AS_NEAR


def is_counted(record: Record) -> bool:
    """Return True if vLLM has computed with the changed part. A dry load computes nothing."""
    return record.outcome != "loads" and (record.good, record.name) not in UNREAD
