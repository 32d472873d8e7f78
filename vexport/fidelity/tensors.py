"""Are the tensors that are not quantized those of the source, and is none of the source's missing?"""

import re
from collections.abc import Iterator, Set

import torch

from vexport.architectures.text_config import text_config
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.tensors import TORCH_DTYPES, read_tensor
from vexport.checks import SOURCE
from vexport.checks.vllm.layers import layers_of
from vexport.checks.vllm.view import CheckpointView, error
from vexport.fidelity.source import SourceTensors
from vexport.plan.linears import PREDICTION
from vexport.types import Finding, Severity, TensorInfo

# What vLLM computes itself and skips when it loads (AutoWeightsLoader and the load_weights of its models).
COMPUTED = re.compile(r".*\b(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)$")
# Scales that a checkpoint has and its source does not: of the KV cache and of the queries.
ADDED = re.compile(r".*\b[qkv]_scale$|.*\bkv_scale$")
NORM = re.compile(r".*norm\.weight$")
TABLE = "model.embed_tokens.weight"
TIED = ("lm_head.weight", "embed_out.weight")


def changed(
    view: CheckpointView, reader: Reader, origins: SourceTensors, quantized: Set[str], explained: Set[str]
) -> Iterator[Finding]:
    """Findings on tensors that are kept, changed without a need, new or lost; `explained` are as they are
    because layers after them were smoothed."""
    for name, tensor in view.index.tensors.items():
        module, _, parameter = name.rpartition(".")
        if ADDED.match(name) or name in explained or (module in quantized and parameter != "bias"):
            continue
        yield from _kept(view, reader, origins, tensor)
    origins.release()
    for tensor in origins.missing():
        yield from _lost(view, tensor)


def _kept(
    view: CheckpointView, reader: Reader, origins: SourceTensors, tensor: TensorInfo
) -> Iterator[Finding]:
    origin = origins.tensor(tensor.name)
    if origin is None and tensor.name.endswith(TIED) and _is_tied(view):
        origin = origins.tensor(TABLE)
    if origin is None:
        yield from _regrouped(view, origins, tensor)
        return
    if same_bytes(reader, origin, view.reader, tensor):
        return
    if origin.shape == tensor.shape and _same_values(reader, origin, view.reader, tensor):
        yield _finding("warning", tensor.name, f"dtype {origin.dtype}", f"the same values in {tensor.dtype}")
        return
    if NORM.match(tensor.name) and _went_through_one(reader, origin, view.reader, tensor):
        return
    got = "other values" if origin.shape == tensor.shape else f"shape {list(tensor.shape)}"
    yield error(
        SOURCE,
        tensor.name,
        expected=f"the bytes of the source ({origin.dtype} {list(origin.shape)})",
        got=got,
        fix="export it again; for weights that were smoothed or rotated, name the source after that",
    )


def _is_tied(view: CheckpointView) -> bool:
    return bool(text_config(view.index.config).get("tie_word_embeddings", False))


def _same_values(old: Reader, origin: TensorInfo, new: Reader, tensor: TensorInfo) -> bool:
    """Whether the source's values in the checkpoint's dtype are the checkpoint's."""
    if origin.dtype == tensor.dtype or origin.dtype not in TORCH_DTYPES or tensor.dtype not in TORCH_DTYPES:
        return False
    values = read_tensor(new, tensor)
    return torch.equal(read_tensor(old, origin).to(values.dtype), values)


def _went_through_one(old: Reader, origin: TensorInfo, new: Reader, tensor: TensorInfo) -> bool:
    """Whether a norm is the source's, rounded as 1 + weight.

    llm-compressor stores norms that multiply by 1 + weight (Gemma's, Qwen3-Next's) after this way there and
    back (norm_calibration_context in llmcompressor/modeling/offset_norm.py).
    """
    if (origin.shape, origin.dtype) != (tensor.shape, tensor.dtype) or origin.dtype not in TORCH_DTYPES:
        return False
    return torch.equal((read_tensor(old, origin) + 1) - 1, read_tensor(new, tensor))


def _regrouped(view: CheckpointView, origins: SourceTensors, tensor: TensorInfo) -> Iterator[Finding]:
    """A kept weight that the source stores together with others, or apart."""
    layer = layers_of(view).get(tensor.name.removesuffix(".weight"))
    pieces = origins.weight(layer) if layer is not None and tensor.dtype in TORCH_DTYPES else ()
    if not pieces:
        yield _finding("warning", tensor.name, "a tensor of the source's", "none there of this name")
        return
    values, start = read_tensor(view.reader, tensor), 0
    same = values.shape[0] == sum(len(piece) for piece in pieces)
    for piece in pieces if same else ():
        same = same and torch.equal(values[start : start + len(piece)], piece.to(values.dtype))
        start += len(piece)
    if not same:
        yield error(
            SOURCE,
            tensor.name,
            expected="the weight of the source",
            got="other values",
            fix="export the checkpoint again",
        )


def _lost(view: CheckpointView, tensor: TensorInfo) -> Iterator[Finding]:
    if COMPUTED.match(tensor.name) or (_is_tied(view) and tensor.name.endswith(TIED)):
        return
    if PREDICTION.search(tensor.name):
        yield _finding("warning", tensor.name, "the source's tensor", "none: vLLM could not draft with it")
        return
    yield error(
        SOURCE,
        tensor.name,
        expected="the source's tensor, as it is or quantized",
        got="no such tensor: vLLM would read uninitialized memory",
        fix="export the checkpoint again",
    )


def _finding(severity: Severity, where: str, expected: str, got: str) -> Finding:
    return Finding(
        check=SOURCE,
        severity=severity,
        where=where,
        expected=expected,
        got=got,
        fix="nothing, if it is meant",
    )
