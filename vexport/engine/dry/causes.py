"""Put the cause of a refusal in front of vLLM's message."""

import re
from collections.abc import Mapping, Sequence

from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.stored_schemes import schemes_of_groups
from vexport.engine.messages import REASONS
from vexport.records import MESSAGE_SEPARATOR
from vexport.words import listed

# A message of at most this many characters is shown in full as the cause. For a longer message, the
# first sentence is the cause.
_LONGEST = 240
# Maximum number of characters of vLLM's message.
_MAX_CHARACTERS = 1000
# vLLM's messages if no kernel supports a layer: kernels/linear/__init__.py, compressed_tensors.py,
# and fused_moe/oracle. A reason for each kernel follows.
_NO_KERNEL = re.compile(
    r"Failed to find a kernel|No compressed-tensors compatible scheme was found"
    r"|Quantization scheme is not supported for the current GPU"
    r"|No [\w ]*MoE backend supports the deployment configuration"
)
# vLLM's message if no attention backend supports the model: platforms/cuda.py.
_NO_ATTENTION = re.compile(r"No valid attention backend")
# Parts of that message: the model's requirements on a backend, and each backend's objections to
# them (v1/attention/selector.py and backend.py). An objection may contain brackets itself.
_ATTENTION_SETTINGS = re.compile(r"\b(head_size|dtype|kv_cache_dtype|block_size)=([\w.]+)")
_OBJECTIONS = re.compile(r"\b([A-Z][A-Z0-9_]+): \[(.*?)\](?=, [A-Z][A-Z0-9_]+: \[|\}|$)")
_MLA = "use_mla=True"
# Objections of backends that only support another kind of attention than the model's.
_OTHER_KIND = re.compile(r"(?:non-)?(?:MLA|sparse) not supported")
_FIRST_SENTENCE = re.compile(r"^.{20,}?(?:[.:;](?= )|$)")


def with_cause(
    reason: str, capabilities: Sequence[int], groups: Sequence[ConfigGroup], vllm: str
) -> str:
    """Return one line with the cause of a refusal, followed by vLLM's message.

    `capabilities` are the capabilities of the cells that were refused for this reason.
    """
    version = ".".join(vllm.split(".")[:2])
    devices = listed([*map(str, capabilities)], "and")
    if _NO_KERNEL.search(reason):
        return (
            f"no kernel of vLLM {version} runs {_schemes_text(groups, capabilities)} on SM "
            f"{devices}{MESSAGE_SEPARATOR}{reason[:_MAX_CHARACTERS]}"
        )
    if _NO_ATTENTION.search(reason):
        cause = f"no attention backend of vLLM {version} runs this model on SM {devices}"
        return f"{cause}{_objection(reason)}{MESSAGE_SEPARATOR}{reason[:_MAX_CHARACTERS]}"
    reason = reason[:_MAX_CHARACTERS]
    first = _FIRST_SENTENCE.match(reason)
    if len(reason) <= _LONGEST or first is None or len(first[0]) == len(reason):
        return reason
    return f"{first[0].rstrip('.:;')}{MESSAGE_SEPARATOR}{reason}"


def _objection(reason: str) -> str:
    """Return why the attention backends refuse a model, from vLLM's message.

    Return "" if it is unknown.

    Backends for another kind of attention are ignored, unless there are no other backends. An
    objection of all backends is the cause. If there is no such objection, the result has the
    backends with the fewest objections, because these come closest to running the model.
    """
    config, _, reasons = reason.partition(REASONS)
    backends = {
        name: [each.strip() for each in objections.split(", ") if each.strip()]
        for name, objections in _OBJECTIONS.findall(reasons)
    }
    if not backends:
        return ""
    of_kind = {
        name: each for name, each in backends.items() if not any(map(_OTHER_KIND.fullmatch, each))
    }
    backends = of_kind or backends
    settings = dict(_ATTENTION_SETTINGS.findall(config))
    if _MLA in config and "head_size" in settings:
        # Two keys of config.json add up to the head size of vLLM's MLA backends.
        settings["head_size"] += " (kv_lora_rank + qk_rope_head_dim)"
    fewest = min(map(len, backends.values()))
    nearest = {name: each for name, each in backends.items() if len(each) == fewest}
    common = [
        objection
        for objection in next(iter(nearest.values()))
        if all(objection in each for each in backends.values())
    ]
    if common:
        return f": {_with_values(common, settings)}"
    words = (f"{name}: {_with_values(each, settings)}" for name, each in nearest.items())
    return f": {'; '.join(words)}"


def _with_values(objections: Sequence[str], settings: Mapping[str, str]) -> str:
    words = []
    for objection in objections:
        key, _, rest = objection.partition(" ")
        words.append(f"{key} {settings[key]} {rest}" if key in settings else objection)
    return ", ".join(words)


def _schemes_text(groups: Sequence[ConfigGroup], capabilities: Sequence[int]) -> str:
    """Return the names of the schemes that have no kernel on any of these capabilities.

    If every scheme has a kernel, the layers' shapes must be the cause. Then the text is "... layers
    of these shapes" with the names of all schemes.
    """
    schemes = list(schemes_of_groups(groups))
    refused = [
        each.name
        for each in schemes
        if all(each.format.gpu_support(each.args).refuses(sm) for sm in capabilities)
    ]
    if refused:
        return ", ".join(dict.fromkeys(refused))
    names = ", ".join(dict.fromkeys(each.name for each in schemes))
    return f"{names} layers of these shapes" if names else "this quantization"
