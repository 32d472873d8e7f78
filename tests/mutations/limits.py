"""What answers otherwise and does no harm: the check may pass it or warn of it."""

from collections.abc import Mapping

from tests.mutations.recorded import Record

_ANOTHER_SCHEME = "a sound checkpoint of another scheme, weights and all"
_SIXTEEN_BITS = "a scale moves by .4 % at most"
_WHOLE = "a global scale of thousands, as a whole number"
# Other answers, as near to the unquantized model's as those of the sound checkpoint: no loss to be found.
AS_GOOD: Mapping[str, str] = {
    "all weight_scale as bfloat16": "what others write; rounded afterwards it costs less than codes do",
    "no inputs": _ANOTHER_SCHEME,
    "inputs of integers": _ANOTHER_SCHEME,
    "k_scale and v_scale exchanged": "keys and values of one size: the scales differ by a hundredth",
    "input_scale of down_proj tenfold": "e4m3 has exponents left: what is rounded away was next to nothing",
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
# What a checkpoint says and vLLM does not read: it answers as before, and not with what the checkpoint means.
UNREAD: Mapping[tuple[str, str], str] = {
    ("gptq", "columns in another order"): "g_idx is dropped: the columns take other columns' scales",
    ("gptq", "zero points that vLLM drops"): "8 is taken for all of them",
    ("awq", "another layout"): "codes packed by GEMV are unpacked as GEMM packs them",
    ("quark-fp8", "a scale of keys that is zero"): "the CPU's KV cache is not quantized",
}
# Wrong scales of inputs, as large as inputs could be: only text that runs through the model shows it.
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
    "FP8_BLOCK: activation null: raises",
}
# Up to this multiple of the sound checkpoint's divergence from the unquantized model answers are as near.
AS_NEAR = 1.1


def is_as_good(record: Record) -> bool:
    """Whether other answers were recorded that are no worse, for a reason that is given."""
    return record.name in AS_GOOD and record.further is not None and record.further <= AS_NEAR


def is_counted(record: Record) -> bool:
    """Whether vLLM has computed with what was changed: a dry load computes nothing."""
    return record.outcome != "loads" and (record.good, record.name) not in UNREAD
