"""Tables and norms that are all zero, and a type of the config that those on disk do not have."""

from collections.abc import Iterator

from vexport.architectures.decoders import decoders
from vexport.checks.tensors.payloads import is_zero
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.types import Finding

HALF = ("float16", "half")


def empty(view: CheckpointView, check: str) -> Iterator[Finding]:
    """Embeddings, heads and norms without any number but zero: no trained model has them.

    A class whose norms multiply by one more than their weight is passed over.
    """
    layout = view.layout
    if layout is None or decoders()[view.class_name].norms_above_one:
        return
    names = [f"{table}.weight" for table in layout.tables]
    names += [name for name in layout.parameters if name.endswith("norm.weight")]
    for name in names:
        tensor = view.index.tensors.get(name)
        if tensor is None or not tensor.num_bytes or tensor.dtype not in ("BF16", "F16", "F32"):
            continue
        if is_zero(view, tensor):
            fix = "export again, and look at this tensor in the source"
            yield error(check, name, expected="numbers other than zero", got="zeros only", fix=fix)


def narrowed(view: CheckpointView, check: str) -> Iterator[Finding]:
    """A config that says float16 of a model of bfloat16, whose larger numbers float16 does not have.

    Where scales are in float16 the producer meant it: AutoRound turns models to float16 for AWQ and GPTQ.
    """
    config = view.index.config
    dtype = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    stored = {tensor.dtype for name, tensor in view.index.tensors.items() if name.endswith("norm.weight")}
    if dtype in HALF and stored == {"BF16"}:
        meant = any(tensor.dtype == "F16" for tensor in view.index.tensors.values())
        yield (warning if meant else error)(
            check,
            f"{view.config_path}: dtype",
            expected="bfloat16, as the norms are stored",
            got=f"{dtype}, in which vLLM would run the model",
            fix="set it to bfloat16",
        )
