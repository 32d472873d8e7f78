"""Versions of vLLM, and quantization methods that are not judged."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import vexport
from tests.models import Good, problems
from tests.mutations.edits import GROUP, QUANTIZATION, WHOLE, Change, config, json_config, spoiled
from vexport.architectures import architecture_table
from vexport.architectures.versions import facts_of, known_versions
from vexport.checks import NAMES, NUMBERS, check_checkpoint
from vexport.checks.vllm.quant_methods import METHODS, UNCHECKED_METHODS
from vexport.checks.vllm.view import Target
from vexport.names import Folder
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import Json
from vexport.scenario import Rule
from vexport.version import PINNED, Version, short_version


def test_versions_have_files() -> None:
    assert known_versions() == ((0, 30), (0, 31), (0, 32), (0, 33))
    for version in known_versions():
        facts = facts_of(version)
        assert facts.vllm.startswith(f"{short_version(version)}.")
        assert {4, 8} <= {*facts.asymmetric_widths}
    facts = facts_of(PINNED)
    assert facts.vllm == architecture_table().vllm
    assert (facts.absent, facts.added, facts.classes) == (frozenset(), {}, {})


@pytest.mark.vllm
def test_pinned_version_matches_installed() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    facts = facts_of(PINNED)
    assert {*facts.methods} <= {*QUANTIZATION_METHODS}
    selected = {name for classes in facts.schemes.values() for name in classes.values()}
    for name in selected - {""}:
        least = getattr(schemes, name).get_min_capability()
        assert all(facts.selected_class(usual, least - 1) != name for usual in facts.schemes)
    known = {*QUANTIZATION_METHODS, "auto-round", "auto_awq", "auto_gptq"}
    assert {name for name in (*METHODS, *UNCHECKED_METHODS) if name not in known} == {
        "bitsandbytes",
        "gguf",
    }


@pytest.mark.parametrize(
    ("name", "vllm", "known"),
    [("DoryForCausalLM", (0, 33), True), ("ExaoneMoEForCausalLM", (0, 30), False)],
)
def test_classes_by_version(
    good: Good, tmp_path: Path, name: str, vllm: Version, known: bool
) -> None:
    changed = spoiled(good("W8A8"), tmp_path / "changed", config(WHOLE, architectures=[name]))
    found = check_checkpoint(str(changed), Target(vllm=vllm)).findings
    place = f"{changed / 'config.json'}: architectures"
    faults = [each for each in found if each.severity == "error" and each.where == place]
    assert bool(faults) is not known
    for fault in faults:
        assert fault.rule == "versions/model-class"
        assert fault.facts == {
            "model": name,
            "version": short_version(vllm),
            "newer": short_version(PINNED),
        }


def test_method_without_rules_names_command(good: Good, tmp_path: Path) -> None:
    gptq: dict[str, Json] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    changed = spoiled(good("W4A16"), tmp_path / "gptq", with_quantization({**gptq}))
    found = check_checkpoint(str(changed), Target(vllm=(0, 30))).findings
    (finding,) = (each for each in found if each.check == "versions")
    assert finding.severity == "warning"
    assert finding.where == f"{changed / 'config.json'}: quantization_config"
    assert finding.rule == "versions/unknown-method"
    assert finding.facts == {
        "version": "0.30",
        "judged_by": short_version(PINNED),
        "method": "gptq",
    }


def test_zero_points_need_another_version(good: Good, tmp_path: Path) -> None:
    asymmetric = config((*GROUP, "weights"), symmetric=False)
    changed = spoiled(good("W4A8"), tmp_path / "asymmetric", asymmetric)
    found = check_checkpoint(str(changed), Target(vllm=(0, 30))).findings
    (finding,) = (each for each in found if each.check == "versions")
    place = f"{changed / 'config.json'}: quantization_config.config_groups.group_0"
    assert (finding.rule, finding.where) == ("versions/zero-points", place)
    assert finding.facts["version"] == "0.30"


@pytest.mark.parametrize(
    ("scheme", "sm", "severities"),
    [
        ("FP8_DYNAMIC", (), ["warning"]),
        ("FP8_DYNAMIC", (80,), ["error"]),
        ("FP8_DYNAMIC", (80, 90), ["error"]),
        ("FP8_DYNAMIC", (89, 90), []),
        ("W4A16", (), []),
        ("W4A16_CHANNEL", (80,), []),
        ("W3A16", (), ["error"]),
        ("NVFP4A16", (80,), []),
    ],
)
def test_quantized_heads_that_run_with_humming(
    llama: Path, tmp_path: Path, scheme: str, sm: tuple[int, ...], severities: list[str]
) -> None:
    out = tmp_path / "out"
    rules = (Rule(match="lm_head", scheme=scheme), Rule(match="Linear", scheme="keep"))
    quantize_source(QuantizeJob(source=Folder.at(llama), out=out, rules=rules))
    of_version = {
        version: [
            finding
            for finding in check_checkpoint(str(out), Target(vllm=version, sm=sm)).findings
            if finding.check == "faults"
        ]
        for version in known_versions()
    }
    assert [finding.severity for finding in of_version.pop((0, 30))] == severities
    assert [*of_version.values()] == [[]] * len(of_version)


# Configs as the producers write them, shortened.
CONFIGS: dict[str, dict[str, Json]] = {
    "FP-Quant": {"quant_method": "fp_quant", "forward_dtype": "mxfp4"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "TorchAO": {"quant_method": "torchao", "quant_type": {"default": "int4_weight_only"}},
}
HF_QUANT_CONFIG: Json = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def with_quantization(quantization: Json) -> Change:
    return config(WHOLE, quantization_config=quantization)


@pytest.mark.parametrize("producer", CONFIGS)
def test_unknown_method_is_not_judged(good: Good, tmp_path: Path, producer: str) -> None:
    """It is an error only if vLLM does not support the method."""
    other = spoiled(good("W8A8"), tmp_path / "other", with_quantization(CONFIGS[producer]))
    ran = vexport("check", other, "--static", "--strict", "--format", "json")
    (report,) = json.loads(ran.stdout)
    assert {each["what"] for each in report["not_judged"]} == {NAMES, NUMBERS}
    assert all(
        repr(CONFIGS[producer]["quant_method"]) in each["why"] for each in report["not_judged"]
    )
    refused = producer == "bitsandbytes"
    assert ran.code == (1 if refused else 3)
    assert [finding["check"] for finding in report["findings"]] == ["config"] * refused
    ran = vexport("repair", other, tmp_path / "out", "--format", "json", "--quiet")
    assert (ran.code, json.loads(ran.stdout)["repairs"], (tmp_path / "out").exists()) == (
        1,
        [],
        False,
    )


def test_hf_quant_config_is_read(good: Good, tmp_path: Path) -> None:
    """As in vLLM, the file counts only if config.json has no quantization config."""
    other = spoiled(good("W8A8"), tmp_path / "other", with_quantization(None))
    (other / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
    assert {finding.severity for finding in problems(other)} == {"error"}
    copytree(good("W8A8"), tmp_path / "both")
    (tmp_path / "both" / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
    assert problems(tmp_path / "both") == []


def test_wrong_quant_method_is_repaired(good: Good, tmp_path: Path) -> None:
    renamed = config(QUANTIZATION, quant_method="gptq")
    (finding,) = problems(spoiled(good("W8A8"), tmp_path / "renamed", renamed))
    assert (finding.rule, finding.facts["value"]) == ("config/quant-method", "gptq")
    ran = vexport("repair", tmp_path / "renamed", tmp_path / "out", "--quiet")
    assert ran.code == 0
    assert problems(tmp_path / "out") == []


def test_compression_config_is_renamed(good: Good, tmp_path: Path) -> None:
    @json_config
    def older(whole: dict[str, Json]) -> None:
        whole["compression_config"] = whole.pop("quantization_config")

    changed = spoiled(good("W8A8"), tmp_path / "older", older)
    assert problems(changed) == []
    ran = vexport("repair", changed, tmp_path / "out", "--quiet")
    assert ran.code == 0, ran.stderr
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == json.loads((good("W8A8") / "config.json").read_text())
