"""Checkpoints of other quantization methods: sound ones have no error, spoiled ones have, in their names."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.architectures.families import save_family
from tests.checks.quant_methods import (
    CHECKPOINTS,
    QUARK_FP8,
    awq_packed,
    quark_config,
    write,
    write_gpt_oss,
)
from tests.command import vexport
from tests.models import problems
from tests.mutations.edits import (
    QUANTIZATION,
    Change,
    Tensors,
    all_of,
    config,
    drop,
    put,
    rename,
    spoiled,
    swap,
    tensors,
)
from vexport import checks
from vexport.architectures.known_bad import KnownBad
from vexport.checks import check_checkpoint
from vexport.checks.vllm.producers import PRODUCERS
from vexport.checks.vllm.quant_methods import METHODS
from vexport.checks.vllm.target import Target
from vexport.types import Finding, Json

LAYER = "model.layers.1"
GATE = f"{LAYER}.mlp.gate_proj"
DOWN, Q, K, V = f"{LAYER}.mlp.down_proj", *(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")
Written = Callable[[str], Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Written:
    """The micro Llama quantized by a method; read it, never write to it."""
    root = tmp_path_factory.mktemp("methods")

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else write(name, llama, root / name)

    return make


def scaled(name: str, factor: float) -> Change:
    return put(name, lambda value: (value.float() * factor).to(value.dtype))


def filled(name: str, number: float) -> Change:
    """The first element of a tensor, whatever its dtype."""

    def change(value: torch.Tensor) -> torch.Tensor:
        flat = value.float().reshape(-1).clone()
        flat[0] = number
        return flat.reshape(value.shape).to(value.dtype)

    return put(name, change)


def inverted(name: str) -> Change:
    return put(name, lambda value: 1 / value)


def cast(name: str, dtype: torch.dtype) -> Change:
    return put(name, lambda value: value.to(dtype))


def powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - 127)


def transposed(name: str) -> Change:
    return put(name, lambda value: value.T)


def quantization(**changes: Json) -> Change:
    return config(QUANTIZATION, **changes)


def unquantized(module: str, shape: tuple[int, int]) -> Change:
    """A layer in bfloat16 in the place of a quantized one."""

    def change(values: Tensors) -> None:
        for name in [name for name in values if name.startswith(f"{module}.")]:
            del values[name]
        values[f"{module}.weight"] = torch.full(shape, 0.01, dtype=torch.bfloat16)

    return tensors(change)


# What is done, the family that finds it, and where.
SPOILED: Mapping[str, Mapping[str, tuple[Change, str, str]]] = {
    "gptq": {
        "other bits": (quantization(bits=8), "shapes", "qweight"),
        "other groups": (quantization(group_size=128), "shapes", "scales"),
        "groups of 16": (quantization(group_size=16), "config", "quantization_config"),
        "columns in order of activation": (quantization(desc_act=True), "config", "desc_act"),
        "zero points that vLLM refuses": (quantization(sym=False), "config", "quantization_config"),
        "no number of bits": (config(QUANTIZATION, bits=None), "config", "bits"),
        "no scales": (drop(f"{DOWN}.scales"), "completeness", f"{DOWN}.scales"),
        "no codes": (drop(f"{DOWN}.qweight"), "completeness", f"{DOWN}.qweight"),
        "a scale that is NaN": (filled(f"{DOWN}.scales", float("nan")), "values", f"{DOWN}.scales"),
        "scales that are far too large": (scaled(f"{DOWN}.scales", 3000), "values", f"{DOWN}.scales"),
        "columns in another order": (
            put(f"{DOWN}.g_idx", lambda value: value.flip(0)),
            "shapes",
            f"{DOWN}.g_idx",
        ),
        "zero points that vLLM drops": (
            put(f"{DOWN}.qzeros", lambda value: value ^ 3),
            "shapes",
            f"{DOWN}.qzeros",
        ),
        "codes of the inputs last": (transposed(f"{DOWN}.qweight"), "shapes", f"{DOWN}.qweight"),
        "codes of another dtype": (cast(f"{DOWN}.qweight", torch.float32), "shapes", f"{DOWN}.qweight"),
        "a part that is not quantized": (unquantized(K, (128, 256)), "targets", "qkv_proj"),
        "a rule that keeps what is quantized": (
            quantization(dynamic={"-:.*layers.1.mlp.down": {}}),
            "targets",
            DOWN,
        ),
        "a layer's norm gone": (drop(f"{LAYER}.input_layernorm.weight"), "completeness", "input_layernorm"),
        "codes all zero": (put(f"{DOWN}.qweight", torch.zeros_like), "values", DOWN),
    },
    "awq": {
        "other bits": (quantization(bits=8), "config", "quantization_config"),
        "other groups": (quantization(group_size=128), "shapes", "scales"),
        "another layout": (quantization(version="gemv"), "config", "version"),
        "no groups": (config(QUANTIZATION, group_size="all"), "config", "group_size"),
        "no zero points": (drop(f"{DOWN}.qzeros"), "completeness", f"{DOWN}.qzeros"),
        "no scales": (drop(f"{DOWN}.scales"), "completeness", f"{DOWN}.scales"),
        "an infinite scale": (filled(f"{DOWN}.scales", float("inf")), "values", f"{DOWN}.scales"),
        "scales that are zero": (put(f"{DOWN}.scales", torch.zeros_like), "values", f"{DOWN}.scales"),
        "packed along the inputs": (
            put(f"{DOWN}.qweight", lambda value: awq_packed(torch.zeros(256, 512))),
            "shapes",
            f"{DOWN}.qweight",
        ),
        "zero points the other way": (transposed(f"{DOWN}.qzeros"), "shapes", f"{DOWN}.qzeros"),
        "a list that keeps what is quantized": (
            quantization(modules_to_not_convert=["layers.1.mlp.down_proj"]),
            "targets",
            DOWN,
        ),
        "a list that keeps a part": (
            quantization(modules_to_not_convert=["layers.1.self_attn.k_proj"]),
            "targets",
            "qkv_proj",
        ),
        "a part that is not quantized": (unquantized(V, (128, 256)), "targets", "qkv_proj"),
        "codes all zero": (put(f"{DOWN}.qweight", torch.zeros_like), "values", DOWN),
    },
    "auto-round": {
        "other bits": (quantization(bits=8), "shapes", "qweight"),
        "other groups": (quantization(group_size=128), "shapes", "scales"),
        "zero points that vLLM refuses": (quantization(sym=False), "config", "quantization_config"),
        "another layout": (quantization(packing_format="auto_round:gptqmodel"), "config", "packing_format"),
        "the layout of AWQ": (quantization(packing_format="auto_round:auto_awq"), "shapes", "qweight"),
        "another type of data": (quantization(data_type="nv_fp"), "config", "data_type"),
        "no number of bits": (config(QUANTIZATION, bits=None), "config", "bits"),
        "a layer that its settings keep": (
            quantization(extra_config={DOWN: {"bits": 16}}),
            "targets",
            DOWN,
        ),
        "a part that its settings keep": (
            quantization(extra_config={K: {"bits": 16}}),
            "targets",
            "qkv_proj",
        ),
        "a pattern with other bits": (
            quantization(extra_config={r"layers\.1\.mlp\.down": {"bits": 8}}),
            "shapes",
            f"{DOWN}.qweight",
        ),
        "blocks that are not quantized": (
            quantization(block_name_to_quantize="model.layers.0"),
            "targets",
            DOWN,
        ),
        "no scales": (drop(f"{DOWN}.scales"), "completeness", f"{DOWN}.scales"),
        "a scale that is NaN": (filled(f"{DOWN}.scales", float("nan")), "values", f"{DOWN}.scales"),
        "codes of the inputs last": (transposed(f"{DOWN}.qweight"), "shapes", f"{DOWN}.qweight"),
    },
    "auto-round-mxfp4": {
        "other groups": (quantization(group_size=64), "config", "group_size"),
        "another layout": (quantization(packing_format="auto_round:auto_gptq"), "config", "packing_format"),
        "other bits": (quantization(bits=8), "completeness", f"{DOWN}.weight"),
        "zero points": (quantization(sym=False), "config", "group_size"),
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "no codes": (drop(f"{DOWN}.weight_packed"), "completeness", f"{DOWN}.weight_packed"),
        "one byte a code": (
            put(f"{GATE}.weight_packed", lambda value: value.repeat(1, 2)),
            "shapes",
            f"{GATE}.weight_packed",
        ),
        "scales as numbers": (put(f"{DOWN}.weight_scale", powers), "shapes", f"{DOWN}.weight_scale"),
        "a scale that is NaN": (filled(f"{DOWN}.weight_scale", 255), "values", f"{DOWN}.weight_scale"),
        "codes all zero": (put(f"{DOWN}.weight_packed", torch.zeros_like), "values", DOWN),
        "a layer that is not quantized": (unquantized(DOWN, (256, 512)), "targets", DOWN),
    },
    "quark-fp8": {
        "no export": (config(QUANTIZATION, export=None), "config", "export"),
        "a cache of which nothing is said": (quantization(layer_quant_config={}), "config", "kv_cache_group"),
        "another kind of weights": (
            quantization(global_quant_config={"weight": {"dtype": "fp6_e3m2"}}),
            "config",
            "global_quant_config",
        ),
        "inputs that are not quantized": (
            quantization(global_quant_config={"weight": QUARK_FP8, "input_tensors": None}),
            "config",
            "global_quant_config",
        ),
        "nothing that says how": (quantization(global_quant_config=None), "config", "global_quant_config"),
        "a layer that is excluded": (quantization(exclude=["lm_head", DOWN]), "targets", DOWN),
        "a part that is excluded": (quantization(exclude=["lm_head", K]), "targets", "qkv_proj"),
        "a pattern that keeps what is quantized": (
            quantization(exclude=["lm_head", r"re:.*layers\.1\.mlp"]),
            "targets",
            DOWN,
        ),
        "no scale": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "a scale upside down": (inverted(f"{DOWN}.weight_scale"), "values", f"{DOWN}.weight_scale"),
        "inputs of one layer scaled otherwise": (scaled(f"{K}.input_scale", 3), "fusion", "input_scale"),
        "a scale of keys that is zero": (filled(f"{K}.output_scale", 0.0), "kv_cache", "output_scale"),
        "a weight in e5m2": (
            put(f"{DOWN}.weight", lambda value: value.float().to(torch.float8_e5m2)),
            "shapes",
            f"{DOWN}.weight",
        ),
    },
    "quark-int4": {
        "other groups": (
            quantization(**quark_config({"dtype": "int4", "group_size": 128, "symmetric": True}, None)),
            "shapes",
            "weight_scale",
        ),
        "one scale a row": (
            quantization(**quark_config({"dtype": "int4", "group_size": None}, None)),
            "config",
            "global_quant_config",
        ),
        "packed by another method": (
            quantization(export={"kv_cache_group": [], "pack_method": "other"}),
            "config",
            "global_quant_config",
        ),
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "an infinite scale": (filled(f"{DOWN}.weight_scale", float("inf")), "values", f"{DOWN}.weight_scale"),
        "packed along the inputs": (
            put(f"{DOWN}.weight", lambda value: awq_packed(torch.zeros(256, 512))),
            "shapes",
            f"{DOWN}.weight",
        ),
        "codes of another dtype": (cast(f"{DOWN}.weight", torch.float32), "shapes", f"{DOWN}.weight"),
        "a part that is not quantized": (unquantized(V, (128, 256)), "targets", "v_proj"),
        "scales that are zero": (
            put(f"{DOWN}.weight_scale", torch.zeros_like),
            "values",
            f"{DOWN}.weight_scale",
        ),
    },
    "quark-int8": {
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "a weight that is cut": (
            put(f"{GATE}.weight", lambda value: value[:256]),
            "shapes",
            f"{GATE}.weight",
        ),
        "a negative scale": (filled(f"{DOWN}.weight_scale", -1.0), "values", f"{DOWN}.weight_scale"),
    },
    "quark-mxfp4": {
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "a scale that is NaN": (filled(f"{DOWN}.weight_scale", 255), "values", f"{DOWN}.weight_scale"),
        "scales as numbers": (put(f"{DOWN}.weight_scale", powers), "shapes", f"{DOWN}.weight_scale"),
        "codes all zero": (put(f"{DOWN}.weight", torch.zeros_like), "values", DOWN),
    },
    "fp8-block": {
        "other blocks": (quantization(weight_block_size=[64, 64]), "shapes", "weight_scale_inv"),
        "half a block": (quantization(weight_block_size=[128]), "config", "weight_block_size"),
        "static inputs": (quantization(activation_scheme="static"), "config", "activation_scheme"),
        "no word of inputs": (config(QUANTIZATION, activation_scheme="none"), "config", "activation_scheme"),
        "experts in FP4": (quantization(store_dtype="mxfp4"), "config", "store_dtype"),
        "no scales": (drop(f"{DOWN}.weight_scale_inv"), "completeness", f"{DOWN}.weight_scale_inv"),
        "scales by compressed-tensors' name": (
            rename(f"{DOWN}.weight_scale_inv", f"{DOWN}.weight_scale"),
            "completeness",
            f"{DOWN}.weight_scale_inv",
        ),
        "scales upside down": (inverted(f"{DOWN}.weight_scale_inv"), "values", f"{DOWN}.weight_scale_inv"),
        "a negative scale": (filled(f"{DOWN}.weight_scale_inv", -1.0), "values", f"{DOWN}.weight_scale_inv"),
        "a weight that is NaN": (filled(f"{DOWN}.weight", float("nan")), "values", f"{DOWN}.weight"),
        "scales the other way": (
            transposed(f"{DOWN}.weight_scale_inv"),
            "shapes",
            f"{DOWN}.weight_scale_inv",
        ),
        "a weight as bytes": (
            put(f"{DOWN}.weight", lambda value: value.view(torch.uint8)),
            "shapes",
            f"{DOWN}.weight",
        ),
        "a layer that is not quantized": (unquantized(DOWN, (256, 512)), "targets", DOWN),
        "a list that keeps what is quantized": (quantization(modules_to_not_convert=[DOWN]), "targets", DOWN),
        "a list that keeps a part": (quantization(modules_to_not_convert=[K]), "targets", "qkv_proj"),
    },
    "fp8-static": {
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "inputs of one layer scaled otherwise": (scaled(f"{K}.input_scale", 3), "fusion", "input_scale"),
        "no scale": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "a scale upside down": (inverted(f"{DOWN}.weight_scale"), "values", f"{DOWN}.weight_scale"),
        "a scale that is zero": (filled(f"{DOWN}.weight_scale", 0.0), "values", f"{DOWN}.weight_scale"),
        "a scale for each row": (
            put(f"{DOWN}.weight_scale", lambda value: value.repeat(256)),
            "shapes",
            f"{DOWN}.weight_scale",
        ),
        "in blocks": (
            quantization(weight_block_size=[128, 128], activation_scheme="dynamic"),
            "completeness",
            "weight_scale_inv",
        ),
        "dynamic inputs": (quantization(activation_scheme="dynamic"), "completeness", "input_scale"),
        "a weight in e5m2": (
            put(f"{DOWN}.weight", lambda value: value.float().to(torch.float8_e5m2)),
            "shapes",
            f"{DOWN}.weight",
        ),
        "a scale of inputs that is NaN": (
            filled(f"{DOWN}.input_scale", float("nan")),
            "values",
            f"{DOWN}.input_scale",
        ),
    },
    "modelopt-fp8": {
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "another algorithm": (quantization(quant_algo="FP9"), "config", "quant_algo"),
        "another algorithm's scales": (
            quantization(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
            "shapes",
            "weight_scale",
        ),
        "a head that is not kept": (quantization(ignore=[]), "targets", "lm_head"),
        "a pattern that keeps what is quantized": (
            quantization(ignore=["lm_head", "*layers.1.mlp*"]),
            "targets",
            DOWN,
        ),
        "a scale upside down": (inverted(f"{DOWN}.weight_scale"), "values", f"{DOWN}.weight_scale"),
        "inputs of one layer scaled otherwise": (scaled(f"{V}.input_scale", 0.1), "fusion", "input_scale"),
        "a layer that is not quantized": (unquantized(DOWN, (256, 512)), "targets", DOWN),
        "a weight too short": (put(f"{DOWN}.weight", lambda value: value[:200]), "shapes", f"{DOWN}.weight"),
        "a scale of inputs far too large": (
            scaled(f"{DOWN}.input_scale", 1e6),
            "values",
            f"{DOWN}.input_scale",
        ),
    },
    "modelopt-nvfp4": {
        "no second scale": (drop(f"{DOWN}.weight_scale_2"), "completeness", f"{DOWN}.weight_scale_2"),
        "a second scale upside down": (
            inverted(f"{DOWN}.weight_scale_2"),
            "values",
            f"{DOWN}.weight_scale_2",
        ),
        "a second scale of another layer": (scaled(f"{K}.weight_scale_2", 2), "fusion", "weight_scale_2"),
        "a second scale that is zero": (
            filled(f"{DOWN}.weight_scale_2", 0.0),
            "values",
            f"{DOWN}.weight_scale_2",
        ),
        "inputs of one layer scaled otherwise": (scaled(f"{Q}.input_scale", 2), "fusion", "input_scale"),
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "scales as bytes": (
            put(f"{DOWN}.weight_scale", lambda value: value.view(torch.uint8)),
            "shapes",
            f"{DOWN}.weight_scale",
        ),
        "a scale that is NaN": (
            filled(f"{DOWN}.weight_scale", float("nan")),
            "values",
            f"{DOWN}.weight_scale",
        ),
        "groups of 32": (quantization(group_size=32), "config", "group_size"),
        "no algorithm": (quantization(quant_algo=None), "config", "quant_algo"),
        "a head that is not kept": (quantization(ignore=["other"]), "targets", "lm_head"),
        "one byte a code": (
            put(f"{GATE}.weight", lambda value: value.repeat(1, 2)),
            "shapes",
            f"{GATE}.weight",
        ),
        "a scale of keys that is zero": (filled(f"{K}.k_scale", 0.0), "kv_cache", "k_scale"),
        "weights only, without a list": (quantization(quant_algo="W4A8_NVFP4_FP8"), "config", "quant_algo"),
    },
}
CASES = [(method, name) for method, changes in SPOILED.items() for name in changes]


def found(root: Path, *, severity: str = "error") -> list[Finding]:
    return [each for each in problems(root) if each.severity == severity]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_sound_checkpoint_has_no_finding(written: Written, name: str) -> None:
    assert problems(written(name)) == []


@pytest.mark.parametrize(("method", "name"), CASES)
def test_a_spoiled_checkpoint_is_found(written: Written, tmp_path: Path, method: str, name: str) -> None:
    change, family, where = SPOILED[method][name]
    findings = found(spoiled(written(method), tmp_path / "spoiled", change))
    assert any(each.check == family and where in each.where for each in findings), findings
    translated = "weight_packed" if method != "auto-round-mxfp4" else "qweight"
    assert not any(translated in each.where or each.check == "internal" for each in findings), findings


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro gpt-oss with its experts in MXFP4; read it, never write to it."""
    root = tmp_path_factory.mktemp("gpt-oss")
    source = save_family(
        "gpt-oss", root / "model", num_key_value_heads=4, intermediate_size=256, num_hidden_layers=3
    )
    return write_gpt_oss(source, root / "mxfp4")


EXPERTS = f"{LAYER}.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.down_proj_scales"
# Of gpt-oss: what is done, the family that finds it, and where.
SPOILED_EXPERTS: Mapping[str, tuple[Change, str, str]] = {
    "no codes": (drop(BLOCKS), "completeness", BLOCKS),
    "no scales": (drop(SCALES), "completeness", SCALES),
    "no bias": (drop(f"{EXPERTS}.down_proj_bias"), "completeness", f"{EXPERTS}.down_proj_bias"),
    "an expert gone": (put(BLOCKS, lambda value: value[:3]), "shapes", BLOCKS),
    "other sizes in the config": (config((), intermediate_size=128), "shapes", BLOCKS),
    "other experts in the config": (config((), num_local_experts=8), "shapes", BLOCKS),
    "scales as numbers": (put(SCALES, powers), "shapes", SCALES),
    "a scale that is NaN": (filled(SCALES, 255), "values", SCALES),
    "codes all zero": (put(BLOCKS, torch.zeros_like), "values", f"{EXPERTS}.gate_up_proj"),
    "another type of model": (config((), model_type="llama"), "config", "quant_method"),
    "a layer's norm gone": (drop(f"{LAYER}.input_layernorm.weight"), "completeness", "input_layernorm"),
    "scales of other groups": (put(SCALES, lambda value: value[..., ::2]), "shapes", SCALES),
}


def test_gpt_oss_is_judged(gpt_oss: Path) -> None:
    report = check_checkpoint(str(gpt_oss), Target(tp=(1, 2), sm=(75, 80, 90)))
    assert {(each.check, each.severity) for each in report.findings} == {
        ("tokenizer", "warning"),
        ("devices", "error"),
    }
    assert all("sm 75" in each.where for each in report.findings if each.check == "devices")


@pytest.mark.parametrize("name", SPOILED_EXPERTS)
def test_spoiled_experts_of_gpt_oss_are_found(gpt_oss: Path, tmp_path: Path, name: str) -> None:
    change, family, where = SPOILED_EXPERTS[name]
    findings = found(spoiled(gpt_oss, tmp_path / "spoiled", change))
    assert any(each.check == family and where in each.where for each in findings), findings
    assert not any("weight_packed" in each.where or each.check == "internal" for each in findings), findings


def first_expert(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: torch.cat([change(value[:1]), value[1:]])


# Of gpt-oss what only the source shows: what is done, and where.
UNLIKE_THE_SOURCE: Mapping[str, tuple[Change, str]] = {
    "experts in another order": (put(BLOCKS, lambda value: value.roll(1, 0)), f"{EXPERTS}.gate_up_proj"),
    "one expert twice as large": (
        put(SCALES, first_expert(lambda value: value + 1)),
        f"{EXPERTS}.down_proj",
    ),
    "gate before up": (
        put(BLOCKS, lambda value: torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)),
        f"{EXPERTS}.gate_up_proj",
    ),
    "codes of the other half of a byte": (
        put(BLOCKS, lambda value: value << 4 | value >> 4),
        f"{EXPERTS}.gate_up_proj",
    ),
    "another bias": (
        put(f"{EXPERTS}.down_proj_bias", lambda value: value.roll(1, 0) + 1),
        f"{EXPERTS}.down_proj_bias",
    ),
}


@pytest.mark.parametrize("name", UNLIKE_THE_SOURCE)
def test_experts_of_gpt_oss_are_compared_with_the_source(gpt_oss: Path, tmp_path: Path, name: str) -> None:
    """Stored by (experts, out, in) blocks, in the source by (experts, in, out), some of them square."""
    change, where = UNLIKE_THE_SOURCE[name]
    wrong = spoiled(gpt_oss, tmp_path / "wrong", change)
    ran = vexport(
        "check", gpt_oss, wrong, "--source", gpt_oss.parent / "model", "--format", "json", "--quiet"
    )
    right, other = json.loads(ran.stdout)
    assert (ran.code, right["ok"]) == (1, True), right["findings"]
    assert {each["check"] for each in right["findings"] if each["severity"] == "warning"} <= {"tokenizer"}
    errors = {each["where"] for each in other["findings"] if each["severity"] == "error"}
    assert errors == {where}


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro Qwen3 MoE; read it, never write to it."""
    return save_family(
        "qwen3-moe",
        tmp_path_factory.mktemp("experts") / "model",
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


def routed(name: str, source: Path, folder: Path) -> Path:
    """The model with experts by a method, whose list names what its producers keep."""
    gates: list[Json] = [f"model.layers.{number}.mlp.gate" for number in range(2)]
    lists: Mapping[str, dict[str, Json]] = {
        "fp8-block": {"modules_to_not_convert": gates},
        "modelopt-nvfp4": {"ignore": ["lm_head", *gates]},
    }
    return write(name, source, folder, **lists.get(name, {}))


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block", "modelopt-nvfp4"])
def test_experts_are_judged_as_vllm_fuses_them(experts: Path, tmp_path: Path, name: str) -> None:
    sound = routed(name, experts, tmp_path / "sound")
    assert problems(sound) == []
    expert = f"{LAYER}.mlp.experts.1.gate_proj"
    scale = {"gptq": "scales", "awq": "scales", "fp8-block": "weight_scale_inv"}.get(name, "weight_scale_2")
    (finding,) = found(spoiled(sound, tmp_path / "spoiled", drop(f"{expert}.{scale}")))
    assert (finding.check, finding.where) == ("completeness", f"{expert}.{scale}")


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block", "fp8-static", "modelopt-nvfp4"])
def test_weights_are_compared_with_the_source(
    written: Written, llama: Path, tmp_path: Path, name: str
) -> None:
    up, gate = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.gate_proj"
    codes = "qweight" if name in ("gptq", "awq") else "weight"
    wrong = spoiled(written(name), tmp_path / "wrong", swap(f"{up}.{codes}", f"{gate}.{codes}"))
    ran = vexport("check", written(name), wrong, "--source", llama, "--format", "json", "--quiet")
    right, swapped = json.loads(ran.stdout)
    assert (ran.code, right["ok"], swapped["ok"]) == (1, True, False)
    errors = {each["where"] for each in swapped["findings"] if each["severity"] == "error"}
    assert errors == {up, gate}


def test_what_autoround_writes_on_purpose_is_a_warning(written: Written, tmp_path: Path) -> None:
    """In AWQ's format: symmetric codes whose zero points are stored, and a model in float16."""
    change = all_of(quantization(zero_point=False), config((), dtype="float16"))
    findings = problems(spoiled(written("awq"), tmp_path / "written", change))
    assert {(each.check, each.severity) for each in findings} == {("config", "warning"), ("model", "warning")}


def test_what_harms_nothing_is_a_warning(written: Written, tmp_path: Path) -> None:
    """vLLM reads neither zero points of symmetric codes nor the order of columns, other loaders do."""
    mislabelled = spoiled(written("gptq"), tmp_path / "v2", quantization(checkpoint_format="gptq_v2"))
    assert {each.severity for each in problems(mislabelled)} == {"warning"}
    assert "gptq stores them" in problems(mislabelled)[0].got
    without = spoiled(written("gptq"), tmp_path / "less", drop(f"{DOWN}.qzeros", f"{DOWN}.g_idx"))
    (finding,) = problems(without)
    assert (finding.severity, finding.where) == ("warning", f"{DOWN}.qzeros")


def test_the_older_file_of_modelopt_is_judged(written: Written, tmp_path: Path) -> None:
    def move(folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        inner = {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        }
        del whole["quantization_config"]
        (folder / "config.json").write_text(json.dumps(whole))
        older = {"producer": {"name": "modelopt"}, "quantization": inner}
        (folder / "hf_quant_config.json").write_text(json.dumps(older))

    older = spoiled(written("modelopt-nvfp4"), tmp_path / "older", move)
    assert problems(older) == []
    file = older / "hf_quant_config.json"
    content = json.loads(file.read_text())
    del content["quantization"]["group_size"]
    file.write_text(json.dumps(content))
    (finding,) = found(older)
    assert (finding.check, "no group_size" in finding.got) == ("config", True)


def test_gpus_that_run_no_fp8_cache_are_told(written: Written, tmp_path: Path) -> None:
    """Triton's attention refuses it below SM 89, FlashInfer's runs it from 80 on with usual heads."""

    def refused(root: Path) -> list[str]:
        report = check_checkpoint(str(root), Target(sm=(75, 80, 89)))
        return [each.where for each in report.findings if each.where.startswith("the FP8 KV cache")]

    sound = written("modelopt-nvfp4")
    assert refused(sound) == ["the FP8 KV cache (sm 75)"]
    odd = spoiled(sound, tmp_path / "odd", config((), num_attention_heads=8, head_dim=32))
    assert refused(odd) == ["the FP8 KV cache (sm 75/80)"]
    assert refused(written("modelopt-fp8")) == refused(written("quark-fp8")) == []


def test_another_version_is_judged_by_the_rules_of_this_one(written: Written) -> None:
    report = check_checkpoint(str(written("gptq")), Target(vllm=(0, 28)))
    (told,) = [each for each in report.findings if each.check == "versions"]
    assert (report.ok, told.severity) == (True, "warning")
    assert "rules of 0.32" in told.got


def test_each_method_is_one_of_a_producer() -> None:
    assert {*METHODS} <= {*PRODUCERS}


# What of the spoiled ones a load without values sees, with what it says of each.
REFUSED = {
    "auto-round": (
        "zero points that vLLM refuses",
        "another layout",
        "another type of data",
        "no scales",
        "a part that its settings keep",
        "blocks that are not quantized",
    ),
    "auto-round-mxfp4": ("other groups", "no scales", "one byte a code"),
    "quark-fp8": (
        "no export",
        "a cache of which nothing is said",
        "another kind of weights",
        "inputs that are not quantized",
        "a layer that is excluded",
        "a part that is excluded",
        "no scale",
    ),
    "quark-int4": ("one scale a row", "packed by another method", "no scales", "packed along the inputs"),
    "quark-int8": ("no scales", "a weight that is cut"),
    "quark-mxfp4": ("no scales",),
    "gptq": (
        "groups of 16",
        "columns in order of activation",
        "zero points that vLLM refuses",
        "no scales",
        "no number of bits",
        "a part that is not quantized",
    ),
    "awq": ("other bits", "no zero points", "zero points the other way", "a list that keeps a part"),
    "fp8-block": (
        "static inputs",
        "half a block",
        "no scales",
        "a layer that is not quantized",
        "a list that keeps what is quantized",
    ),
    "fp8-static": ("no scale of inputs", "a weight in e5m2"),
    "modelopt-fp8": ("another algorithm", "a head that is not kept", "a weight too short"),
    "modelopt-nvfp4": ("no second scale", "scales as bytes", "no algorithm", "one byte a code"),
}


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_loads_the_sound_and_refuses_the_spoiled(
    written: Written, experts: Path, gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an SM 90, by vLLM's own classes and loaders; what is publicly known of a class is told with it."""
    known = KnownBad(what="slow", vllm=("0.32",), sm=(90,), classes="Qwen3Moe", fix="wait", source="here")
    monkeypatch.setattr(checks.known_bad, "known_bad", lambda: (known,))
    sound = [*map(written, CHECKPOINTS)]
    sound += [
        routed(name, experts, tmp_path / name) for name in ("gptq", "awq", "fp8-block", "modelopt-nvfp4")
    ]
    sound.append(gpt_oss)
    broken = [
        spoiled(gpt_oss, tmp_path / f"gpt-oss-{number}", SPOILED_EXPERTS[name][0])
        for number, name in enumerate(("no codes", "an expert gone", "scales of other groups"))
    ]
    broken += [
        spoiled(written(method), tmp_path / f"{method}-{number}", SPOILED[method][name][0])
        for method, names in REFUSED.items()
        for number, name in enumerate(names)
    ]
    missing = tmp_path / "missing"  # leaves the answers on the others
    ran = vexport("load", "--dry", *sound, missing, *broken, "--sm", "90", "--format", "json", "--quiet")
    answers = {answer["checkpoint"]: answer for answer in json.loads(ran.stdout)}
    assert [*answers] == [*map(str, (*sound, missing, *broken))]
    assert (ran.code, len(ran.errors), answers[str(missing)]["findings"][0]["got"]) == (
        2,
        1,
        "no such folder",
    )
    told = {path: [each["check"] for each in answers[path]["findings"]] for path in map(str, sound)}
    assert {path for path, names in told.items() if names} == {*map(str, sound[len(CHECKPOINTS) : -1])}
    assert {name for names in told.values() for name in names} == {"known_bad"}
    assert {path for path in map(str, broken) if answers[path]["ok"]} == set()
