"""Rules of the chosen version of vLLM."""

from vexport.rules.book import Rule

_DRY_LOAD = "load it in that version: `vexport load CHECKPOINT --dry --vllm-python PATH`"
_OTHER = "serve it with another version of vLLM, or use another scheme"

UNKNOWN_VERSION = Rule(
    "versions/unknown-version",
    "warning",
    got="another version, checked by the rules of vLLM {judged_by}",
    need="a version of vLLM that vexport has rules for ({oldest} to {newest})",
    do=_DRY_LOAD,
)
MODEL_CLASS = Rule(
    "versions/model-class",
    claim="refused",
    got="{model}, which vLLM {version} does not have",
    need="a model class of vLLM {version}",
    do="serve it with vLLM {newer}",
)
UNKNOWN_METHOD = Rule(
    "versions/unknown-method",
    "warning",
    got="vLLM {version}, checked by the rules of vLLM {judged_by}",
    need="a version of vLLM for which vexport has rules for {method}",
    do=_DRY_LOAD,
)
ZERO_POINTS = Rule(
    "versions/zero-points",
    claim="refused",
    got="vLLM {version}, which does not support {zero_points}",
    need="a version of vLLM that supports {zero_points}",
    do=_OTHER,
)
MXFP4_INPUTS = Rule(
    "versions/mxfp4-inputs",
    "warning",
    "precision",
    got="vLLM {version}, which quantizes the inputs to MXFP4 on GPUs with FP4 kernels",
    need="a version of vLLM that supports MXFP4 weights with FP8 inputs",
    do=_OTHER,
)
