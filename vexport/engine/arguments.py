"""Asks vLLM whether it takes the arguments that were given for it, before anything long begins."""

from collections.abc import Sequence
from pathlib import Path

from vexport.architectures.text_config import text_config
from vexport.checkpoint.index import read_index
from vexport.checks.vllm.layout import impossible_size
from vexport.engine.messages import ArgumentsRequest, FoundProblems
from vexport.engine.session import Worker, log_folder, raise_found
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.layers.ranks import Heads
from vexport.records import silent
from vexport.scenario.serve import Serve

# What every vLLM knows, and `Serve` has checked.
_CERTAIN = {"max_model_len", "enforce_eager"}


def require_arguments(serves: Sequence[Serve], vllm_python: Path | None) -> None:
    """Ask vLLM about what was given for its engine; the settings differ in their number of devices.

    InputError for all that this vLLM does not know, EnvironmentFault where the machine has too few GPUs or no
    Ray. Imports vLLM in a separate process, some seconds, and only where something was given.
    """
    largest = max(serves, key=lambda serve: serve.devices)
    if not largest.given.keys() - _CERTAIN:
        return
    with log_folder("vexport-arguments-") as folder:
        found = Worker(
            module="vexport.engine.arguments_worker",
            request=ArgumentsRequest(arguments=largest.given, devices=largest.devices),
            kind=FoundProblems,
            where="vLLM's arguments",
            log=folder / "vllm.log",
            timeout=largest.timeout,
            vllm_python=vllm_python,
        ).run(silent)
    raise_found(found)


def require_layers(checkpoint: Path) -> None:
    """InputError where config.json asks for layers or experts of which there cannot be tensors.

    vLLM builds one after the other and would not end. What cannot be read it judges itself.
    """
    try:
        index = read_index(checkpoint)
    except InputError:
        return
    if (impossible := impossible_size(index.config, len(index.tensors))) is not None:
        key, got = impossible
        raise InputError(
            f"{checkpoint / 'config.json'}: {key}",
            got=got,
            need="at most as many as there are tensors",
            fix="copy config.json from the source, or export the checkpoint again",
        )


def require_heads(checkpoint: Path, ranks: int) -> None:
    """InputError where vLLM could not cut the attention heads of a checkpoint for so many ranks."""
    text = text_config(read_json_object(checkpoint / "config.json"))
    queries, keys = text.get("num_attention_heads"), text.get("num_key_value_heads")
    heads = Heads(
        queries=queries if isinstance(queries, int) and queries > 0 else 0,
        # Latent attention (MLA) has none that are cut.
        keys=keys if isinstance(keys, int) and keys > 0 and not text.get("kv_lora_rank") else 0,
    )
    if (got := heads.uneven(ranks)) is not None:
        raise InputError(
            f"{checkpoint} (tensor_parallel_size {ranks})",
            got=got,
            need=f"heads that {ranks} ranks can share",
            fix=f"use --tp {heads.possible_ranks}",
        )
