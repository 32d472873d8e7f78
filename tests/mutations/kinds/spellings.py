"""quantization_config in other words: spellings, kinds of values, groups that overlap."""

import copy
from collections.abc import Iterator, Mapping
from functools import partial

from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    INPUTS,
    QUANTIZATION,
    WHOLE,
    Change,
    all_of,
    config,
    json_config,
    node,
)
from tests.mutations.good import Sound
from tests.mutations.kinds.arguments import WITH_INPUTS
from vexport.types import Json

MLPS = "re:.*mlp.*"
# Rotations of every layer's input, as a transform_config has them.
ROTATION: Mapping[str, Json] = {
    "config_groups": {
        "R1": {
            "type": "hadamard",
            "apply": [{"targets": ["Linear"], "location": "input", "inverse": False, "ignore": ["lm_head"]}],
        }
    }
}


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those of the config group."""
    for key in ("num_bits", "group_size", "symmetric", "dynamic"):
        yield f"{key} a string", json_config(partial(_said, key=key))
    yield "a fraction of a bit", config(ARGUMENTS, num_bits=4.5)
    yield "bits as a float", json_config(_as_float)
    yield "no bits at all", config(ARGUMENTS, num_bits=0)
    yield "16 bits", config(ARGUMENTS, num_bits=16)
    yield "bits null", config(ARGUMENTS, num_bits=None)
    yield "type in capitals", json_config(lambda whole: _in_capitals(whole, "type"))
    yield "strategy in capitals", json_config(lambda whole: _in_capitals(whole, "strategy"))
    yield "strategy unknown", config(ARGUMENTS, strategy="no-such-strategy")
    yield "strategy token", config(ARGUMENTS, strategy="token")
    yield "strategy tensor_group", config(ARGUMENTS, strategy="tensor_group")
    yield "type unknown", config(ARGUMENTS, type="complex")
    yield "group size -1", config(ARGUMENTS, group_size=-1)
    yield "group size 16", config(ARGUMENTS, group_size=16)
    yield "group size null", config(ARGUMENTS, group_size=None)
    yield "actorder true", config(ARGUMENTS, actorder=True)
    yield "actorder false", config(ARGUMENTS, actorder=False)
    yield "actorder static", config(ARGUMENTS, actorder="static")
    yield "actorder dynamic", config(ARGUMENTS, actorder="dynamic")
    yield "actorder unknown", config(ARGUMENTS, actorder="no-such-order")
    yield "scale dtype unknown", config(ARGUMENTS, scale_dtype="no-such-dtype")
    yield "options of an observer", config(ARGUMENTS, observer_kwargs={"maxshrink": 0.2})
    yield "options of an observer null", config(ARGUMENTS, observer_kwargs=None)
    yield "weights local", config(ARGUMENTS, dynamic="local")
    yield "blocks of 128 in words", config(ARGUMENTS, block_structure="128x128")
    yield "outputs quantized", json_config(_with_outputs)
    if sound.scheme in WITH_INPUTS:
        yield "inputs an empty object", config(GROUP, input_activations={})
        yield "inputs local", config(INPUTS, dynamic="local")
        yield "inputs asymmetric", config(INPUTS, symmetric=False)
        yield "inputs of strategy channel", config(INPUTS, strategy="channel")
        yield "inputs of 4 bits", config(INPUTS, num_bits=4)
        yield "inputs grouped by 64", config(INPUTS, strategy="group", group_size=64)
    else:
        yield "inputs quantized to 8 bits", config(GROUP, input_activations=_tokens("int"))
        yield "inputs quantized to fp8", config(GROUP, input_activations=_tokens("float"))


def _tokens(kind: str) -> Json:
    return {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Those of the rest."""
    yield from _places()
    yield from _groups(sound)
    yield "quantization config null", config(WHOLE, quantization_config=None)
    yield "quantization config a string", config(WHOLE, quantization_config="compressed-tensors")
    yield "quantization config a list", config(WHOLE, quantization_config=[])
    yield "quantization config empty", config(WHOLE, quantization_config={})
    yield "quant_method with an underscore", config(QUANTIZATION, quant_method="compressed_tensors")
    yield "quant_method null", config(QUANTIZATION, quant_method=None)
    yield "ignore a string", config(QUANTIZATION, ignore="lm_head")
    yield "ignore a number", config(QUANTIZATION, ignore=[1])
    yield "format in capitals", config(QUANTIZATION, format="PACK-QUANTIZED")
    yield "format null", config(QUANTIZATION, format=None)
    yield "KV cache an empty object", config(QUANTIZATION, kv_cache_scheme={})
    yield "KV cache a string", config(QUANTIZATION, kv_cache_scheme="fp8")
    yield "a rotation announced", config(QUANTIZATION, transform_config=dict(ROTATION))
    yield (
        "sparsity of two in four",
        config(QUANTIZATION, sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
    )
    yield "sparsity a string", config(QUANTIZATION, sparsity_config="2:4")


def _places() -> Iterator[tuple[str, Change]]:
    yield "quantization config of a text model too", json_config(lambda whole: _nested(whole, keep=True))
    yield "quantization config of a text model only", json_config(lambda whole: _nested(whole, keep=False))


def _groups(sound: Sound) -> Iterator[tuple[str, Change]]:
    q, down = sound.attention("q"), sound.mlp("down")
    yield "group under another name", json_config(_renamed_group)
    yield "group null", json_config(lambda whole: _all_groups(whole).update(group_0=None))
    yield "targets a number", config(GROUP, targets=[1])
    yield "targets q_proj only", config(GROUP, targets=[q])
    yield "targets q_proj too", config(GROUP, targets=["Linear", q])
    yield "targets all but down_proj", config(GROUP, targets=[f"re:^(?!{down}).*_proj$"])
    yield "targets by part of a class's name", config(GROUP, targets=["ParallelLinear"])
    yield "targets by a pattern of a class's name", config(GROUP, targets=["re:.*Linear"])
    yield "targets in capitals", config(GROUP, targets=["LINEAR"])
    yield "targets embeddings too", config(GROUP, targets=["Linear", "Embedding"])
    yield "targets attention's class", config(GROUP, targets=["LlamaAttention"])
    yield "targets LMHead too", config(GROUP, targets=["Linear", "ParallelLMHead"])
    yield "ignores fused names", config(QUANTIZATION, ignore=["lm_head", "re:.*qkv_proj"])
    yield "ignores a decoder layer", config(QUANTIZATION, ignore=["lm_head", "re:.*layers.0.*"])
    yield "ignores by a class's name", config(QUANTIZATION, ignore=["lm_head", "ParallelLMHead"])
    yield "a second group for MLPs, after", json_config(lambda whole: _second(whole, [MLPS]))
    yield "a second group for MLPs, before", json_config(lambda whole: _second(whole, [MLPS], first=True))
    yield "a second group for q_proj", json_config(lambda whole: _second(whole, [q]))
    yield (
        "a second group of the same target, before",
        json_config(lambda whole: _second(whole, ["Linear"], first=True)),
    )
    yield "a second group of the same target, after", json_config(lambda whole: _second(whole, ["Linear"]))
    yield "a second group for nothing", json_config(lambda whole: _second(whole, ["re:nothing"]))
    yield (
        "a second group for attention's class",
        json_config(lambda whole: _second(whole, ["LlamaAttention"])),
    )
    yield (
        "a second group for nothing, with activation ordering",
        all_of(
            json_config(lambda whole: _second(whole, ["re:nothing"])),
            config((*QUANTIZATION, "config_groups", "second", "weights"), actorder="group"),
        ),
    )


def _all_groups(whole: dict[str, Json]) -> dict[str, Json]:
    return node(whole, (*QUANTIZATION, "config_groups"))


def _second(whole: dict[str, Json], targets: list[Json], *, first: bool = False) -> None:
    """A group of 8-bit integers by channel, which fits no layer of these checkpoints but those of W8A8."""
    group: dict[str, Json] = copy.deepcopy(node(whole, GROUP))
    group |= {"targets": targets, "input_activations": None, "format": "pack-quantized"}
    group["weights"] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = _all_groups(whole)
    node(whole, QUANTIZATION)["config_groups"] = (
        {"second": group, **groups} if first else {**groups, "second": group}
    )


def _renamed_group(whole: dict[str, Json]) -> None:
    groups = _all_groups(whole)
    node(whole, QUANTIZATION)["config_groups"] = {"NVFP4A16": next(iter(groups.values()))}


def _nested(whole: dict[str, Json], *, keep: bool) -> None:
    whole["text_config"] = {"quantization_config": copy.deepcopy(whole["quantization_config"])}
    if not keep:
        del whole["quantization_config"]


def _said(whole: dict[str, Json], key: str) -> None:
    arguments = node(whole, ARGUMENTS)
    arguments[key] = str(arguments.get(key))


def _as_float(whole: dict[str, Json]) -> None:
    bits = node(whole, ARGUMENTS)["num_bits"]
    assert isinstance(bits, int)
    node(whole, ARGUMENTS)["num_bits"] = float(bits)


def _in_capitals(whole: dict[str, Json], key: str) -> None:
    arguments = node(whole, ARGUMENTS)
    arguments[key] = str(arguments[key]).upper()


def _with_outputs(whole: dict[str, Json]) -> None:
    args: Json = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    node(whole, GROUP)["output_activations"] = args
