"""Environment variables of vLLM that choose kernels or precisions, and so may change an answer.

`VLLM_BATCH_INVARIANT=1` dequantizes packed weights from vLLM 0.33 on, `VLLM_MARLIN_INPUT_DTYPE` quantizes
inputs. Names: vllm/envs.py.
"""

import os
import re
from collections.abc import Mapping

NONE = "none"
_CHOOSES = re.compile(
    r"VLLM_(\w+_)?(AITER|ALLREDUCE|ATTENTION_BACKEND|BATCH_INVARIANT|DEEP_GEMM|EMULATION|FLASHINFER|FP4|FP8|"
    r"HUMMING|INT4|KERNELS?|MARLIN|MLA|MOE|MXFP[48]|NVFP4|PRECISION|QUANT|QUANTIZATION|REDUCE|SAMPLER|SKINNY|"
    r"TRITON)(_\w+)?"
)
# What the above would take too: places, sizes, and what vexport sets (`vexport.engine.session`).
_UNRELATED = re.compile(r"_(CACHE|DIR|SIZE|THREADS)(_|$)|^VLLM_CPU_INT4_W4A8$")


def answer_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Those that are set, by name: `VLLM_BATCH_INVARIANT=1`; "none" where none is."""
    names = (name for name in sorted(environment) if _CHOOSES.fullmatch(name) and not _UNRELATED.search(name))
    return " ".join(f"{name}={environment[name]}" for name in names) or NONE
