"""Which classes are planned, and why the others are not."""

import pytest

from vexport.architectures import architecture_table, get_architecture
from vexport.errors import InputError


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
def test_a_class_that_is_not_planned_is_refused_for_its_own_reason(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        get_architecture(name)


@pytest.mark.vllm
def test_every_class_that_vllm_generates_text_with_is_planned_or_has_a_reason() -> None:
    from vllm.model_executor.models import registry

    table = architecture_table()
    generating = {
        *registry._TEXT_GENERATION_MODELS,
        *registry._MULTIMODAL_MODELS,
        *registry._TRANSFORMERS_SUPPORTED_MODELS,
    }
    assert generating <= table.architectures.keys() | table.left_out.keys()
    assert not table.architectures.keys() & table.left_out.keys()
