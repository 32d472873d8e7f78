"""Load one checkpoint for one cell (tensor parallel size and GPU) with vLLM's model class.

vLLM's configuration and loaders are used as well. Tensors have no data in memory, except stored
tensors that vLLM casts to another dtype.
"""

import fcntl
import hashlib
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from vexport.checkpoint.index import TOKENIZER_FILES
from vexport.engine.dry.audit import Audit, HeaderFile
from vexport.engine.dry.fake_platform import (
    NeedsDevice,
    PlaceholderValues,
    asked_for_toolkit,
    join_group,
    set_capability,
    set_toolkit,
)
from vexport.engine.dry.layers import (
    compiled_parts,
    faulty_layers,
    layer_kinds,
    raising_layer,
    rank_memory,
)
from vexport.engine.messages import (
    REASONS,
    WITHOUT_WEIGHTS,
    CellResult,
    DryTry,
    Miscopy,
    Outcome,
    speculative_config,
)
from vexport.engine.process import one_line
from vexport.errors.extras import is_memory
from vexport.files import from_json, to_json, write_text
from vexport.scenario.serve import EngineArguments

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Limit of a message, with the reasons of each kernel or attention backend. `with_cause` shortens it
# for reports.
_MAX_MESSAGE = 4000
# Errors about a missing device, package, value or memory. They show a limit of the dry load. vLLM
# itself may accept the checkpoint.
_LIMIT_ERRORS = (NeedsDevice, ImportError, MemoryError)
_LIMIT_MESSAGES = re.compile(
    r"meta tensor|meta device|NVIDIA driver|CUDA enabled|re-initialize CUDA|No CUDA GPUs|CUDA "
    r"is initialised"
    r"|_Uncallable"
)
_NO_PACKAGE = re.compile(
    r"[Pp]lease install|requires? [^.;]*(?:to be installed|in the current vLLM environment)"
)
# Files of vLLM's model classes, except the registry that finds the classes.
_CLASS_CODE = re.compile(r"/vllm/(?:model_executor/)?models/(?!registry\.py$)")
# pydantic's text around a validator's message.
_PYDANTIC = re.compile(r"^\d+ validation errors? for \w+\s+Value error,|\[type=.*\Z", re.DOTALL)
# Parameters that vLLM registers and never reads. vLLM's weight tracking leaves out
# `input_scale_ub`, too.
_UNUSED_PARAMETERS = ("weight_shape", "input_scale_ub")
_UNUSED_GPTQ_PARAMETERS = ("qzeros", "_bias")
# Prefix of the drafter's layers in a report.
DRAFTER = "drafter."
# Parameters that a drafter may take from the target instead of the checkpoint:
# `_maybe_share_embeddings` and `_maybe_share_lm_head` in vllm/v1/spec_decode/llm_base_proposer.py.
_SHARED = re.compile(r"(?:^|\.)(?P<shared>embed_tokens|lm_head|shared_head\.head)\.")


def try_cell(attempt: DryTry) -> CellResult:
    """Build and load a checkpoint as a rank of a cell. `fake_cuda` must be called before."""
    return replace(_try_cell(attempt), asks_toolkit=asked_for_toolkit())


def _try_cell(attempt: DryTry) -> CellResult:
    audit = Audit(attempt.cell.tp)
    try:
        return _load(attempt, audit)
    except Exception as error:
        traceback.print_exception(error)
        text = " ".join(_PYDANTIC.sub(" ", str(error)).split())
        reason = (f"{type(error).__name__}: {text}" if text else one_line(error))[:_MAX_MESSAGE]
        hit_limit = isinstance(error, _LIMIT_ERRORS) or is_limit(text) or is_memory(reason)
        outcome: Outcome = "unknown" if hit_limit else "refused"
        place = audit.last_source
        return CellResult(
            cell=attempt.cell,
            outcome=outcome,
            reason=reason,
            where=place,
            built=audit.model_is_built,
            in_class=_is_raised_in_class(error),
        )


def is_limit(text: str) -> bool:
    """Return True if vLLM's message is about a limit of the dry load instead of the checkpoint.

    A kernel that lacks an optional package is not such a limit if the other kernels refuse the
    layer as well.
    """
    cause = text.partition(REASONS)[0]
    return bool(_LIMIT_MESSAGES.search(text) or _NO_PACKAGE.search(cause))


def _is_raised_in_class(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(_CLASS_CODE.search(frame.f_code.co_filename) for frame, _ in frames)


def configure(
    checkpoint: Path,
    arguments: EngineArguments,
    *,
    tp: int,
    trust_remote_code: bool,
    speculative: str = "",
) -> "VllmConfig":
    """Return vLLM's configuration for a checkpoint and the user's arguments.

    Raises vLLM's errors.
    """
    from vllm.engine.arg_utils import EngineArgs

    fixed = {
        "model": str(checkpoint),
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "safetensors_load_strategy": "lazy",
        "trust_remote_code": trust_remote_code,
    }
    if (drafts := speculative_config(speculative)) is not None:
        fixed["speculative_config"] = drafts
    return EngineArgs(**{**arguments, **fixed}).create_engine_config()


def _load(attempt: DryTry, audit: Audit) -> CellResult:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    cell, request = attempt.cell, attempt.request
    set_capability(cell.sm)
    set_toolkit(cell.toolkit)
    config = configure(
        attempt.checkpoint,
        request.arguments,
        tp=cell.tp,
        trust_remote_code=request.trust_remote_code,
        speculative=request.speculative,
    )
    log = _Log(config)
    with set_current_vllm_config(config):
        join_group(cell.tp, attempt.rank)
        with (
            torch.device("meta"),
            PlaceholderValues(),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            models = {"": initialize_model(config)}
            known_faults = faulty_layers(models[""], cell.sm)
            layers = layer_kinds(models[""])  # a drafter changes names in the quant config
            if (drafter := build_drafter(config)) is not None:
                models[DRAFTER] = drafter
                layers += tuple(
                    replace(kind, name=DRAFTER + kind.name) for kind in layer_kinds(drafter)
                )
                known_faults += tuple(
                    replace(each, layer=DRAFTER + each.layer)
                    for each in faulty_layers(drafter, cell.sm)
                )
        messages = log.ended()
        audit.model_is_built = True
        if attempt.control in WITHOUT_WEIGHTS:
            return CellResult(cell=cell, outcome="loaded")
        memory = rank_memory([*models.values()], config, cell.tp)
        compiled = compiled_parts(models.values(), config, cell.sm)
        shared_file = attempt.shared_result_file(_signature(models))
        with shared_file.with_suffix(".lock").open("w") as lock:
            # The first try loads the weights. Tries with the same signature wait for its result.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not shared_file.is_file():
                if attempt.rank == 0:
                    _open_tokenizer(attempt.checkpoint, config)
                faults = _load_weights(models[""], config, config.model_config, audit)
                if drafter is not None:
                    faults = _with_drafter(faults, drafter, config, audit)
                loaded = CellResult(cell=cell, outcome="loaded", faults=faults)
                write_text(shared_file, to_json(loaded))
    result = replace(from_json(CellResult, shared_file), cell=cell, memory=memory, log=messages)
    if (raising := raising_layer(known_faults, cell.sm)) is not None:
        where, reason = raising
        return replace(result, outcome="refused", where=where, reason=reason)
    return replace(result, layers=layers, known_faults=known_faults, compiled=compiled)


class _Log(logging.Handler):
    """Collects vLLM's messages, after those that an engine writes about its configuration.

    It is made after the configuration, because vLLM then sets up its loggers.
    """

    def __init__(self, config: "VllmConfig") -> None:
        from vllm import __version__ as version

        super().__init__(logging.INFO)
        self._messages = [
            f"Resolved architecture: {config.model_config.architecture}",
            f"Initializing a V1 LLM engine (v{version}) with config: {config}",
        ]
        logging.getLogger("vllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        place = f"{record.filename}:{record.lineno}"
        self._messages.append(f"{record.levelname} [{place}] {record.getMessage()}")

    def ended(self) -> tuple[str, ...]:
        logging.getLogger("vllm").removeHandler(self)
        return tuple(self._messages)


def _open_tokenizer(checkpoint: Path, config: "VllmConfig") -> None:
    """Open the files that a server opens before the first request.

    These are the tokenizer and generation_config.json. If the checkpoint has no tokenizer, a server
    uses the tokenizer of another checkpoint, and only generation_config.json is opened.
    """
    from vllm.tokenizers.registry import get_tokenizer

    if any(TOKENIZER_FILES.match(file.name) for file in checkpoint.iterdir()):
        get_tokenizer(checkpoint, trust_remote_code=config.model_config.trust_remote_code)
    config.model_config.try_get_generation_config()


def _load_weights(
    model: torch.nn.Module, config: "VllmConfig", loaded: "ModelConfig", audit: Audit
) -> tuple[Miscopy, ...]:
    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    weight_utils.safe_open = partial(HeaderFile, audit)
    with torch.device("meta"), audit:
        DefaultModelLoader(config.load_config).load_weights(model, loaded)
    faults = tuple(audit.faults(model, optional=frozenset(_optional(model))))
    harmless = _harmless_casts(faults, Path(loaded.model))
    return tuple(fault for fault in faults if fault not in harmless)


def _harmless_casts(faults: Sequence[Miscopy], checkpoint: Path) -> set[Miscopy]:
    """Return the casts that keep all values of a stored tensor.

    The audit sees only dtypes, so the values are read here. A cast from or to integers is never
    harmless, because stored integers are codes or bytes, and not the numbers that they represent.
    """
    casts: dict[str, list[Miscopy]] = {}
    for fault in faults:
        if fault.kind == "cast" and all(
            _dtype(name).is_floating_point for name in (fault.got, fault.expected)
        ):
            casts.setdefault(fault.where, []).append(fault)
    harmless = set[Miscopy]()
    for file in sorted(checkpoint.glob("*.safetensors")) if casts else ():
        with safe_open(file, framework="pt") as stream:
            for name in casts.keys() & set(stream.keys()):
                tensor = stream.get_tensor(name)
                harmless.update(fault for fault in casts[name] if _keeps_values(tensor, fault))
    return harmless


def _keeps_values(tensor: torch.Tensor, cast: Miscopy) -> bool:
    stored = tensor.to(_dtype(cast.got))
    again = stored.to(_dtype(cast.expected)).to(stored.dtype)
    return bool(torch.equal(stored.nan_to_num(), again.nan_to_num()))


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _with_drafter(
    faults: tuple[Miscopy, ...], drafter: torch.nn.Module, config: "VllmConfig", audit: Audit
) -> tuple[Miscopy, ...]:
    """Return the faults of a target and its drafter.

    If both read the same folder, a tensor is unused only if neither of them reads it.
    """
    draft, shared = (
        config.speculative_config.draft_model_config,
        frozenset(shared_parameters(drafter)),
    )
    audit.begin()
    own = []
    for fault in _load_weights(drafter, config, draft, audit):
        if fault.kind != "missing" or fault.where not in shared:
            where = DRAFTER + fault.where if fault.kind == "missing" else fault.where
            own.append(replace(fault, where=where, layer=DRAFTER + fault.layer))
    if draft.model != config.model_config.model:
        return (*faults, *own)
    unused_parameters = {fault.where for fault in own if fault.kind == "unused"}
    read = [fault for fault in faults if fault.kind != "unused" or fault.where in unused_parameters]
    return (*read, *(fault for fault in own if fault.kind != "unused"))


def _signature(models: Mapping[str, torch.nn.Module]) -> str:
    """Return a digest of the properties of models on which loading depends.

    These are the parameters, and the classes of the modules and of the methods that load them.
    """
    digest = hashlib.sha256()
    for model in models.values():
        for name, module in model.named_modules():
            parts = [module, getattr(module, "quant_method", None), getattr(module, "scheme", None)]
            digest.update(f"{name} {[*map(type, parts)]}\n".encode())
        for name, parameter in model.named_parameters():
            digest.update(
                f"{name} {type(parameter)} {parameter.shape} {parameter.dtype}\n".encode()
            )
    return digest.hexdigest()[:16]


def _optional(model: torch.nn.Module) -> Iterator[str]:
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # Scales of the KV cache are 1 unless the checkpoint has them.
        scales = isinstance(method, BaseKVCacheMethod)
        # A weight-only NVFP4 MoE registers scales for inputs that it does not quantize.
        weight_only = getattr(method, "use_a16", False)
        # Symmetric GPTQ does not use zero points. It drops bias parameters of experts without bias.
        is_gptq = type(method).__name__.startswith("AutoGPTQ")
        unused_parameters = (
            (*_UNUSED_PARAMETERS, *_UNUSED_GPTQ_PARAMETERS) if is_gptq else _UNUSED_PARAMETERS
        )
        for parameter, _ in module.named_parameters(recurse=False):
            unread_scale = weight_only and "input_global_scale" in parameter
            if scales or unread_scale or parameter.endswith(unused_parameters):
                yield f"{name}.{parameter}"


def build_drafter(config: "VllmConfig") -> torch.nn.Module | None:
    """Return the draft model of a configuration.

    Return None if there is no speculative decoding, or if its method has no weights.
    """
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.model_loader.utils import initialize_model

    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is None or draft.runner_type != "draft":
        return None
    with set_model_tag("eagle_head"):
        drafter: torch.nn.Module = initialize_model(config, model_config=draft)
    return drafter


def shared_parameters(drafter: torch.nn.Module) -> Iterator[str]:
    """Yield the parameters that a loaded drafter takes from its target.

    A drafter keeps its embeddings or output head if its loader has set `has_own_embed_tokens` or
    `has_own_lm_head`. `shared_head.head` of MTP layers is always taken from the target.
    """
    own = {
        "embed_tokens": getattr(drafter, "has_own_embed_tokens", False),
        "lm_head": getattr(drafter, "has_own_lm_head", False),
        "shared_head.head": False,
    }
    for name, _ in drafter.named_parameters():
        if (part := _SHARED.search(name)) and not own[part["shared"]]:
            yield name
