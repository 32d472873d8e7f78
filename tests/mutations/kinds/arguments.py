"""Mutations of quantization_config, and of config.json around it."""

from collections.abc import Iterator

from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    INPUTS,
    QUANTIZATION,
    WHOLE,
    Change,
    all_of,
    config,
    copy_group,
    json_config,
    without,
)
from tests.mutations.good import Sound
from vexport.records import Json

LISTED = ("lm_head",)
# Schemes that quantize inputs too.
WITH_INPUTS = ("NVFP4", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "MXFP4", "MXFP8")
KV_SCHEME: dict[str, Json] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
KV_SCHEME |= {"symmetric": True, "dynamic": False}
SPARSE: Json = {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]}
FUSED: Json = [
    f"re:.*{name}" for name in ("qkv_proj", "gate_up_proj", "o_proj", "down_proj", "experts.*")
]


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of the config group."""
    yield from _formats()
    yield from _widths(sound.scheme)
    yield from _sizes()
    yield from _missing_arguments()
    yield from _inputs(sound.scheme)


def _formats() -> Iterator[tuple[str, Change]]:
    yield "no format in the group", without(GROUP, "format")
    yield "no format at all", all_of(without(GROUP, "format"), without(QUANTIZATION, "format"))
    yield "unknown format in the group", config(GROUP, format="no-such-format")
    yield "format of packed integers", config(GROUP, format="pack-quantized")
    yield "format of floats", config(GROUP, format="float-quantized")
    yield "format of integers", config(GROUP, format="int-quantized")
    yield "format of NVFP4", config(GROUP, format="nvfp4-pack-quantized")
    yield "actorder group", config(ARGUMENTS, actorder="group")
    yield "actorder weight", config(ARGUMENTS, actorder="weight")


def _widths(scheme: str) -> Iterator[tuple[str, Change]]:
    yield "8 bits become 4, 4 become 8", config(ARGUMENTS, num_bits=8 if "4" in scheme else 4)
    yield "5 bits", config(ARGUMENTS, num_bits=5)
    other, is_asymmetric = "int" if "F" in scheme else "float", scheme == "W4A16_ASYM"
    yield "floats become integers, integers floats", config(ARGUMENTS, type=other)
    yield "symmetric" if is_asymmetric else "asymmetric", config(ARGUMENTS, symmetric=is_asymmetric)


def _sizes() -> Iterator[tuple[str, Change]]:
    yield "group size 64", config(ARGUMENTS, group_size=64)
    yield "group size 32", config(ARGUMENTS, group_size=32)
    yield "group size 0", config(ARGUMENTS, group_size=0)
    yield "group size 100", config(ARGUMENTS, group_size=100)
    for strategy in ("tensor", "channel", "group", "block"):
        yield f"strategy {strategy}", config(ARGUMENTS, strategy=strategy)


def _missing_arguments() -> Iterator[tuple[str, Change]]:
    yield "no strategy", without(ARGUMENTS, "strategy")
    yield "no type", without(ARGUMENTS, "type")
    yield "no bits", without(ARGUMENTS, "num_bits")
    yield "no symmetry", without(ARGUMENTS, "symmetric")
    yield "weights dynamic", config(ARGUMENTS, dynamic=True)
    yield "another scale dtype", config(ARGUMENTS, scale_dtype="torch.float16")


def _inputs(scheme: str) -> Iterator[tuple[str, Change]]:
    if scheme not in ("FP8_DYNAMIC", "FP8_BLOCK"):
        # Without inputs these are legal checkpoints of another scheme.
        yield "no inputs", config(GROUP, input_activations=None)
    if scheme == "FP8_BLOCK":
        yield "blocks of 64", config(ARGUMENTS, block_structure=[64, 64])
        yield "no blocks", config(ARGUMENTS, block_structure=None)
    if scheme not in WITH_INPUTS:
        return
    yield "inputs symmetric null", config(INPUTS, symmetric=None)
    yield "inputs dynamic", config(INPUTS, dynamic=True)
    yield "inputs static", config(INPUTS, dynamic=False)
    yield "inputs of 16 bits", config(INPUTS, num_bits=16)
    if not scheme.startswith("FP8"):
        yield "inputs of strategy tensor", config(INPUTS, strategy="tensor")
    other, name = ("int", "integers") if "F" in scheme else ("float", "floats")
    yield f"inputs of {name}", config(INPUTS, type=other)
    yield "unknown key in inputs", config(INPUTS, no_such_key=1)


def shared_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of the method, targets, ignore list, sparsity and KV cache."""
    yield from _methods()
    yield from _groups()
    yield from _other_keys()
    yield from _ignored(sound)
    yield from _targets()
    yield from _kv_caches()


def _methods() -> Iterator[tuple[str, Change]]:
    yield "no quantization_config", without(WHOLE, "quantization_config")
    yield "compression_config instead", json_config(_use_older_name)
    yield "quant_method missing", without(QUANTIZATION, "quant_method")
    yield "quant_method fp8", config(QUANTIZATION, quant_method="fp8")
    yield "quant_method gptq", config(QUANTIZATION, quant_method="gptq")
    yield "quant_method unknown", config(QUANTIZATION, quant_method="no-such-method")
    yield "quant_method in capitals", config(QUANTIZATION, quant_method="Compressed-Tensors")


def _groups() -> Iterator[tuple[str, Change]]:
    yield "no config groups", config(QUANTIZATION, config_groups={})
    yield "config groups missing", without(QUANTIZATION, "config_groups")
    yield "config groups a list", config(QUANTIZATION, config_groups=[])
    yield "no weights in the group", without(GROUP, "weights")
    yield "weights null in the group", config(GROUP, weights=None)
    yield "unknown key at the top", config(QUANTIZATION, no_such_key=1)
    yield "unknown key in the group", config(GROUP, no_such_key=1)
    yield "unknown key in weights", config(ARGUMENTS, no_such_key=1)


def _other_keys() -> Iterator[tuple[str, Change]]:
    yield "no format at the top", without(QUANTIZATION, "format")
    yield "unknown format at the top", config(QUANTIZATION, format="no-such-format")
    yield "observer is null", config(ARGUMENTS, observer=None)
    yield "observer unknown", config(ARGUMENTS, observer="no-such-observer")
    yield "no status", without(QUANTIZATION, "quantization_status")
    yield "another status", config(QUANTIZATION, quantization_status="frozen")
    yield "sparsity config empty", config(QUANTIZATION, sparsity_config={})
    yield "sparsity config with targets", config(QUANTIZATION, sparsity_config=SPARSE)
    yield (
        "sparsity config without targets",
        config(QUANTIZATION, sparsity_config={"format": "dense"}),
    )
    yield "transform config empty", config(QUANTIZATION, transform_config={})
    yield "a version from the future", config(QUANTIZATION, version="99.0")


def _ignored(sound: Sound) -> Iterator[tuple[str, Change]]:
    down, q = sound.mlp("down"), sound.attention("q")
    yield "nothing ignored", config(QUANTIZATION, ignore=[])
    yield "ignore missing", without(QUANTIZATION, "ignore")
    yield "ignore null", config(QUANTIZATION, ignore=None)
    yield "q_proj alone ignored", config(QUANTIZATION, ignore=[*LISTED, q])
    yield "a quantized layer ignored", config(QUANTIZATION, ignore=[*LISTED, down])
    attention = [sound.attention(leaf) for leaf in "qkvo"]
    yield "a whole attention ignored", config(QUANTIZATION, ignore=[*LISTED, *attention])
    yield "all ignored", config(QUANTIZATION, ignore=["re:.*"])
    yield "all linear layers ignored", config(QUANTIZATION, ignore=["Linear"])
    yield "unknown layer ignored", config(QUANTIZATION, ignore=[*LISTED, "model.layers.9.no_such"])
    yield "ignored by a bad pattern", config(QUANTIZATION, ignore=[*LISTED, "re:(["])


def _targets() -> Iterator[tuple[str, Change]]:
    yield "targets in small letters", config(GROUP, targets=["linear"])
    yield "targets MLPs only", config(GROUP, targets=["re:.*mlp.*"])
    yield "targets by pattern", config(GROUP, targets=["re:.*proj"])
    yield "targets by a pattern that must begin elsewhere", config(GROUP, targets=["re:proj"])
    yield "targets nothing", config(GROUP, targets=["re:nothing"])
    yield "targets empty", config(GROUP, targets=[])
    yield "targets missing", without(GROUP, "targets")
    yield "targets a string", config(GROUP, targets="Linear")
    yield "targets fused names", config(GROUP, targets=FUSED)
    yield "targets vLLM's class", config(GROUP, targets=["QKVParallelLinear"])
    yield "targets lm_head too", config(GROUP, targets=["Linear", "re:.*lm_head"])
    yield "a second group of the same", copy_group()
    yield "a second group of other bits, after", copy_group(num_bits=7)
    yield "a second group of other bits, before", copy_group(num_bits=7, first=True)


def _kv_caches() -> Iterator[tuple[str, Change]]:
    yield "KV cache announced without scales", config(QUANTIZATION, kv_cache_scheme=KV_SCHEME)
    yield "KV cache of integers", config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "type": "int"})
    yield "KV cache of 4 bits", config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "num_bits": 4})
    yield (
        "KV cache asymmetric",
        config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "symmetric": False}),
    )
    yield (
        "KV cache by channel",
        config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "strategy": "channel"}),
    )
    yield "KV cache dynamic", config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "dynamic": True})


def _use_older_name(whole: dict[str, Json]) -> None:
    whole["compression_config"] = whole.pop("quantization_config")


def model_kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield mutations of sizes, names and switches of the model."""
    yield "a layer more than there is", config(WHOLE, num_hidden_layers=sound.layers + 1)
    if sound.layers > 1:
        yield "a layer less than there is", config(WHOLE, num_hidden_layers=sound.layers - 1)
    yield "another hidden size", config(WHOLE, hidden_size=256)
    yield "another intermediate size", config(WHOLE, intermediate_size=512)
    yield "a smaller intermediate size", config(WHOLE, intermediate_size=64)
    yield "another vocabulary", config(WHOLE, vocab_size=320)
    yield "a vocabulary larger by one", config(WHOLE, vocab_size=385)
    yield "twice the heads", config(WHOLE, num_attention_heads=8)
    yield "half the heads", config(WHOLE, num_attention_heads=2)
    yield "other heads of keys", config(WHOLE, num_key_value_heads=2)
    yield "another head size", config(WHOLE, head_dim=64)
    yield "no head size", without(WHOLE, "head_dim")
    yield "no heads of keys", without(WHOLE, "num_key_value_heads")
    yield "no hidden size", without(WHOLE, "hidden_size")
    yield "no vocabulary", without(WHOLE, "vocab_size")
    yield "no number of layers", without(WHOLE, "num_hidden_layers")
    yield "hidden size a string", config(WHOLE, hidden_size="128")
    yield "unknown architecture", config(WHOLE, architectures=["NoSuchForCausalLM"])
    yield "no architecture", without(WHOLE, "architectures")
    yield "architectures empty", config(WHOLE, architectures=[])
    yield "architecture of another model", config(WHOLE, architectures=["OPTForCausalLM"])
    yield "no model type", without(WHOLE, "model_type")
    yield "unknown model type", config(WHOLE, model_type="no_such_model")
    yield "tied in the config", config(WHOLE, tie_word_embeddings=True)
    yield "untied in the config", config(WHOLE, tie_word_embeddings=False)
    yield "biases of attention in the config", config(WHOLE, attention_bias=True)
    yield "biases of MLPs in the config", config(WHOLE, mlp_bias=True)
    yield "unknown activation", config(WHOLE, hidden_act="no_such_act")
    yield "unknown dtype", config(WHOLE, dtype="float12")
    yield "older name of dtype", config(WHOLE, torch_dtype="bfloat16")
    yield "unknown key in the config", config(WHOLE, no_such_key=1)
    yield "another version of transformers", config(WHOLE, transformers_version="4.40.0")
