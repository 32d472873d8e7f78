"""Checkpoints of other quantization methods.

Sound checkpoints have no errors. Errors of damaged checkpoints use the names of their method.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.architectures.families import save_family
from tests.checks.quant_methods import CHECKPOINTS, write, write_experts, write_gpt_oss
from tests.checks.spoiled_methods import DOWN, LAYER, SPOILED, Spoiled, quantization
from tests.command import vexport
from tests.models import Good, errors, problems
from tests.mutations.edits import (
    Change,
    all_of,
    config,
    drop,
    put,
    set_first,
    spoiled,
    swap,
    without,
)
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks import check_checkpoint
from vexport.checks.shards import VALUES
from vexport.checks.vllm.translated import translate
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.fidelity.dequantize import dequantized
from vexport.records import Json
from vexport.version import Version

GPT_OSS = "gpt-oss"
# Methods with different ways to store a weight, also of experts.
METHODS = ("gptq", "awq", "fp8-block", "modelopt-nvfp4")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Good:
    """Return a function that quantizes the micro Llama by a method, or writes a micro gpt-oss.

    Tests only read the result.
    """
    root = tmp_path_factory.mktemp("methods")

    def make(name: str) -> Path:
        if (root / name).exists():
            return root / name
        if name != GPT_OSS:
            return write(name, llama, root / name)
        model = root / "gpt-oss-source"
        save_family(name, model, num_key_value_heads=4, intermediate_size=256, num_hidden_layers=3)
        return write_gpt_oss(model, root / name)

    return make


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_values_equal_producers(written: Good, llama: Path, name: str) -> None:
    """Compare dequantized values with the producer's formula. A sound checkpoint has no finding."""
    assert problems(written(name)) == []
    weight = load_file(llama / "model.safetensors")[f"{DOWN}.weight"]
    _, expected = CHECKPOINTS[name][1](weight, weight.float().abs().max())
    with Reader() as reader:
        found = dequantized(translate(CheckpointView(read_index(written(name)), reader)), DOWN)
    assert found is not None
    assert torch.equal(found, expected.to(found.dtype))


EXPERTS = f"{LAYER}.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.down_proj_scales"
# Changes of gpt-oss, with the check that finds each and the place of the finding.
SPOILED_EXPERTS: Mapping[str, Spoiled] = {
    "no codes": (drop(BLOCKS), "completeness", BLOCKS),
    "no bias": (drop(f"{EXPERTS}.down_proj_bias"), "completeness", f"{EXPERTS}.down_proj_bias"),
    "an expert gone": (put(BLOCKS, lambda value: value[:3]), "shapes", BLOCKS),
    "other sizes in the config": (config((), intermediate_size=128), "shapes", BLOCKS),
    "a scale that is NaN": (put(SCALES, set_first(255)), "values", SCALES),
    "another type of model": (config((), model_type="llama"), "config", "quant_method"),
    "scales of other groups": (put(SCALES, lambda value: value[..., ::2]), "shapes", SCALES),
}
ALL_SPOILED = {**SPOILED, GPT_OSS: SPOILED_EXPERTS}
CASES = [(method, name) for method, changes in ALL_SPOILED.items() for name in changes]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_damaged_checkpoint_is_found(written: Good, tmp_path: Path, method: str, name: str) -> None:
    change, family, where = ALL_SPOILED[method][name]
    findings = errors(spoiled(written(method), tmp_path / "spoiled", change))
    assert any(each.check == family and where in each.where for each in findings), findings
    translated = "weight_packed" if method != "auto-round-mxfp4" else "qweight"
    assert not any(translated in each.where or each.check == "internal" for each in findings), (
        findings
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round"])
@pytest.mark.parametrize("bits", [9, "x"])
def test_invalid_number_of_bits(written: Good, tmp_path: Path, method: str, bits: Json) -> None:
    """The invalid number is not replaced by a default."""
    findings = errors(spoiled(written(method), tmp_path / "spoiled", quantization(bits=bits)))
    assert [each.where.rpartition(".")[2] for each in findings if each.check == "config"] == [
        "bits"
    ]


def test_gpt_oss_is_checked(written: Good) -> None:
    report = check_checkpoint(str(written(GPT_OSS)), Target(tp=(1, 2), sm=(75, 80, 90)))
    found = {(each.check, each.severity) for each in report.findings}
    assert found == {("tokenizer", "warning"), ("devices", "error")}
    assert all("sm 75" in each.where for each in report.findings if each.check == "devices")


def first_expert(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: torch.cat([change(value[:1]), value[1:]])


# Changes of gpt-oss that only a comparison with the source finds, with the place of the finding.
DIFFERENT_FROM_SOURCE: Mapping[str, tuple[Change, str]] = {
    "experts in another order": (
        put(BLOCKS, lambda value: value.roll(1, 0)),
        f"{EXPERTS}.gate_up_proj",
    ),
    "one expert twice as large": (
        put(SCALES, first_expert(lambda value: value + 1)),
        f"{EXPERTS}.down_proj",
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


def compared(source: Path, *checkpoints: Path) -> list[set[str]]:
    """Return the places of each checkpoint's errors in a comparison with the source."""
    ran = vexport("check", *checkpoints, "--source", source, "--format", "json", "--quiet")
    reports = json.loads(ran.stdout)
    assert [report["checkpoint"] for report in reports] == [*map(str, checkpoints)]
    return [
        {finding["where"] for finding in each["findings"] if finding["severity"] == "error"}
        for each in reports
    ]


def test_gpt_oss_experts_are_compared_with_source(written: Good, tmp_path: Path) -> None:
    """Blocks have the shape (experts, out, in), the source (experts, in, out).

    Some experts are square.
    """
    gpt_oss = written(GPT_OSS)
    wrong = [
        spoiled(gpt_oss, tmp_path / name, change)
        for name, (change, _) in DIFFERENT_FROM_SOURCE.items()
    ]
    errors = compared(gpt_oss.with_name("gpt-oss-source"), gpt_oss, *wrong)
    assert errors == [set(), *({where} for _, where in DIFFERENT_FROM_SOURCE.values())]


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a micro Qwen3 MoE. Tests only read it."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    return save_family("qwen3-moe", folder, num_key_value_heads=4, tie_word_embeddings=False)


@pytest.mark.parametrize("name", METHODS)
def test_experts_of_other_methods(experts: Path, tmp_path: Path, name: str) -> None:
    sound = write_experts(name, experts, tmp_path / "sound")
    assert problems(sound) == []
    expert = f"{LAYER}.mlp.experts.1.gate_proj"
    scale = {"gptq": "scales", "awq": "scales", "fp8-block": "weight_scale_inv"}.get(
        name, "weight_scale_2"
    )
    (finding,) = errors(spoiled(sound, tmp_path / "spoiled", drop(f"{expert}.{scale}")))
    assert (finding.check, finding.where) == ("completeness", f"{expert}.{scale}")


def test_store_dtype_of_experts_is_error(written: Good, experts: Path, tmp_path: Path) -> None:
    """Without experts, the key store_dtype has no effect."""
    as_mxfp4 = quantization(store_dtype="mxfp4")
    routed = write_experts("fp8-block", experts, tmp_path / "fp8")
    (finding,) = errors(spoiled(routed, tmp_path / "fp4", as_mxfp4))
    assert finding.check == "config"
    assert "store_dtype" in finding.where
    assert problems(spoiled(written("fp8-block"), tmp_path / "dense", as_mxfp4)) == []


def test_weights_are_compared_with_source(written: Good, llama: Path, tmp_path: Path) -> None:
    up, gate = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.gate_proj"
    wrong = []
    for name in METHODS:
        codes = "qweight" if name in ("gptq", "awq") else "weight"
        change = swap(f"{up}.{codes}", f"{gate}.{codes}")
        wrong.append(spoiled(written(name), tmp_path / name, change))
    errors = compared(llama, *map(written, METHODS), *wrong)
    assert errors == [*[set[str]()] * 4, *[{up, gate}] * 4]


def test_harmless_deviations_are_warnings(written: Good, tmp_path: Path) -> None:
    """For AWQ, these are symmetric codes with stored zero points, and a model in float16."""
    change = all_of(quantization(zero_point=False), config((), dtype="float16"))
    findings = problems(spoiled(written("awq"), tmp_path / "written", change))
    assert {(each.check, each.severity) for each in findings} == {
        ("config", "warning"),
        ("model", "warning"),
    }
    # vLLM ignores zero points of symmetric codes and the order of columns. Other loaders read them.
    mislabelled = spoiled(
        written("gptq"), tmp_path / "v2", quantization(checkpoint_format="gptq_v2")
    )
    assert {each.rule for each in problems(mislabelled)} == {"shapes/zero-point-of-other-format"}
    less = spoiled(written("gptq"), tmp_path / "less", drop(f"{DOWN}.qzeros", f"{DOWN}.g_idx"))
    (finding,) = problems(less)
    assert (finding.severity, finding.where) == ("warning", f"{DOWN}.qzeros")


def test_modelopt_file_is_checked(written: Good, tmp_path: Path) -> None:
    older = spoiled(
        written("modelopt-nvfp4"), tmp_path / "older", without((), "quantization_config")
    )
    settings: dict[str, Json] = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
    }
    settings["exclude_modules"] = ["lm_head"]
    content = {"producer": {"name": "modelopt"}, "quantization": settings}
    file = older / "hf_quant_config.json"
    file.write_text(json.dumps(content))
    assert problems(older) == []
    del settings["group_size"]
    file.write_text(json.dumps(content))
    (finding,) = errors(older)
    assert (finding.rule, finding.facts["missing"]) == ("config/nvfp4-keys", ["group_size"])


@pytest.mark.parametrize(("vllm", "ok"), [((0, 32), False), ((0, 33), True)])
def test_modelopt_exclude_modules_key(
    written: Good, tmp_path: Path, vllm: Version, ok: bool
) -> None:
    """vLLM 0.33 reads `exclude_modules` in config.json as well (ModelOptQuantConfigBase)."""
    sound = written("modelopt-nvfp4")
    settings = json.loads((sound / "config.json").read_text())["quantization_config"]
    settings["exclude_modules"] = settings.pop("ignore")
    other = spoiled(sound, tmp_path / "other", config((), quantization_config=settings))
    assert check_checkpoint(str(other), Target(vllm=vllm)).ok is ok


def test_gpus_without_fp8_cache_are_named(written: Good, tmp_path: Path) -> None:
    """Triton's attention needs SM 89.

    With the usual heads, FlashInfer runs the FP8 KV cache from SM 80.
    """

    def refused(root: Path) -> list[str]:
        report = check_checkpoint(str(root), Target(sm=(75, 80, 89)))
        return [each.where for each in report.findings if each.where.startswith("the FP8 KV cache")]

    sound = written("modelopt-nvfp4")
    assert refused(sound) == ["the FP8 KV cache (sm 75)"]
    odd = spoiled(sound, tmp_path / "odd", config((), num_attention_heads=8, head_dim=32))
    assert refused(odd) == ["the FP8 KV cache (sm 75/80)"]
    assert refused(written("modelopt-fp8")) == refused(written("quark-fp8")) == []


def test_other_version_uses_pinned_rules(written: Good) -> None:
    report = check_checkpoint(str(written("gptq")), Target(vllm=(0, 30)))
    (warning,) = [each for each in report.findings if each.check == "versions"]
    assert (report.ok, warning.severity) == (True, "warning")
    assert (warning.rule, warning.facts["judged_by"]) == ("versions/unknown-method", "0.32")


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block", "modelopt-nvfp4"])
def test_agreeing_methods_use_newer_rules(written: Good, name: str) -> None:
    """vLLM 0.33 loads these methods by the same rules as 0.32."""
    report = check_checkpoint(str(written(name)), Target(vllm=(0, 33)))
    assert [each for each in report.findings if each.check == "versions"] == []
    assert {each.what for each in report.not_judged} == {VALUES}


# Damaged checkpoints of each method that a load without values refuses.
REFUSED = [
    (GPT_OSS, "no codes"),
    (GPT_OSS, "an expert gone"),
    (GPT_OSS, "scales of other groups"),
    ("auto-round", "blocks that are not quantized"),
    ("auto-round-mxfp4", "one byte a code"),
    ("quark-fp8", "a fused member that is excluded"),
    ("quark-int4", "packed along the inputs"),
    ("quark-int8", "a weight that is cut"),
    ("quark-mxfp4", "no scales"),
    ("gptq", "columns in order of activation"),
    ("awq", "transposed zero points"),
    ("fp8-block", "a list that keeps what is quantized"),
    ("fp8-static", "a weight in e5m2"),
    ("modelopt-fp8", "a head that is not kept"),
    ("modelopt-nvfp4", "scales as bytes"),
]


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_refuses_damaged_checkpoints(written: Good, experts: Path, tmp_path: Path) -> None:
    """vLLM's classes and loaders for SM 90 load the sound checkpoints."""
    sound = [*map(written, (*CHECKPOINTS, GPT_OSS))]
    sound += [write_experts(name, experts, tmp_path / name) for name in METHODS]
    broken = [
        spoiled(written(method), tmp_path / f"{method}, {name}", ALL_SPOILED[method][name][0])
        for method, name in REFUSED
    ]
    missing = tmp_path / "missing"  # must not change the results of the others
    ran = vexport(
        "load", "--dry", *sound, missing, *broken, "--sm", "90", "--format", "json", "--quiet"
    )
    answers = {answer["checkpoint"]: answer for answer in json.loads(ran.stdout)}
    assert [*answers] == [*map(str, (*sound, missing, *broken))]
    assert (ran.code, len(ran.errors)) == (2, 1)
    assert answers[str(missing)]["findings"][0]["got"] == "no such folder"
    checks = {
        path: [each["check"] for each in answers[path]["findings"]] for path in map(str, sound)
    }
    assert {path for path, names in checks.items() if names} == set()
    assert {path for path in map(str, broken) if answers[path]["ok"]} == set()
    cells = [cell for row in answers[str(written(GPT_OSS))]["rows"] for cell in row["cells"]]
    kernels = {cell["kernel"] for cell in cells if cell["kernel"]}  # plain layers name none
    assert kernels == {"OAITritonMxfp4ExpertsMonolithic"}
