"""What the files of vLLM's versions say, and the public reports that go with versions and GPUs."""

from pathlib import Path

import pytest

from tests.models import Good
from tests.mutations.edits import WHOLE, config, spoiled
from vexport.architectures import architecture_table
from vexport.architectures.versions import facts_of, known_versions
from vexport.checks import check_checkpoint
from vexport.checks.vllm.view import Target
from vexport.records import Finding
from vexport.version import PINNED, Version, short_version


def found(folder: Path, vllm: Version, *sm: int, tp: int = 1) -> list[Finding]:
    return [*check_checkpoint(str(folder), Target(vllm=vllm, sm=sm, tp=(tp,))).findings]


def test_every_version_has_a_file() -> None:
    assert known_versions() == ((0, 30), (0, 31), (0, 32), (0, 33))
    for version in known_versions():
        facts = facts_of(version)
        assert facts.vllm.startswith(f"{short_version(version)}.")
        assert {4, 8} <= {*facts.asymmetric_widths}
        assert facts.schemes["CompressedTensorsW8A8Fp8"] == 89


def test_the_pinned_version_is_what_the_rules_are_of() -> None:
    facts = facts_of(PINNED)
    assert facts.vllm == architecture_table().vllm
    assert (facts.absent, facts.added, facts.classes) == (frozenset(), {}, {})


@pytest.mark.vllm
def test_the_pinned_versions_file_is_what_is_installed() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    facts = facts_of(PINNED)
    assert {*facts.methods} <= {*QUANTIZATION_METHODS}
    for name, least in facts.schemes.items():
        assert getattr(schemes, name).get_min_capability() == least


@pytest.mark.parametrize(
    ("name", "vllm", "known"),
    [
        ("DoryForCausalLM", (0, 33), True),
        ("DoryForCausalLM", (0, 32), False),
        ("ExaoneMoEForCausalLM", (0, 32), True),
        ("ExaoneMoEForCausalLM", (0, 30), False),
    ],
)
def test_classes_come_and_go(good: Good, tmp_path: Path, name: str, vllm: Version, known: bool) -> None:
    changed = spoiled(good("W8A8"), tmp_path / "changed", config(WHOLE, architectures=[name]))
    where = [one.where for one in found(changed, vllm) if one.severity == "error"]
    assert any("architectures" in each for each in where) is not known
