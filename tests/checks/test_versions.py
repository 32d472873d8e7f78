"""What the files of vLLM's versions say, and the public reports that go with versions and GPUs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.command import vexport
from tests.engine.sketches import LLAMA, sketch
from tests.mutations.edits import QUANTIZATION, WHOLE, Change, all_of, config, rename, spoiled
from vexport.architectures import architecture_table
from vexport.architectures.known_bad import KnownBad, known_bad
from vexport.architectures.versions import facts_of, known_versions
from vexport.checks import check_checkpoint
from vexport.checks.vllm.target import Target
from vexport.checks.vllm.versions import DIFFERENCES, KNOWN
from vexport.formats import FORMATS
from vexport.plan import known_bad as plan_notes
from vexport.types import Finding, Json
from vexport.version import PINNED, Version, short_version


def found(folder: Path, vllm: Version, *sm: int, tp: int = 1) -> list[Finding]:
    """All findings for a version and GPUs."""
    return [*check_checkpoint(str(folder), Target(vllm=vllm, sm=sm, tp=(tp,))).findings]


def test_every_version_has_a_file() -> None:
    assert known_versions() == tuple((0, minor) for minor in range(20, 34))
    for version in known_versions():
        facts = facts_of(version)
        assert facts.vllm.startswith(f"{short_version(version)}.")
        assert {4, 8} <= {*facts.widths}
        assert facts.schemes["CompressedTensorsW8A8Fp8"] == 89
        assert {"INT8", "FP8", "NVFP4"} <= {name.split("_")[1] for name in facts.kernels}


def test_the_pinned_version_is_what_the_rules_are_of() -> None:
    facts = facts_of(PINNED)
    assert facts.vllm == architecture_table().vllm
    assert (facts.absent, facts.added, facts.classes) == (frozenset(), {}, {})
    assert {each.name for each in FORMATS} <= {*facts.formats}
    assert known_versions() == KNOWN
    assert all(each.source and each.what for each in DIFFERENCES)


@pytest.mark.vllm
def test_the_pinned_versions_file_is_what_is_installed() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes
    from vllm.platforms import PlatformEnum

    facts = facts_of(PINNED)
    assert {*facts.methods} <= {*QUANTIZATION_METHODS}
    for name, least in facts.schemes.items():
        assert getattr(schemes, name).get_min_capability() == least
    for name, platforms in facts.kernels.items():
        table: Mapping[object, list[type]] = getattr(linear, f"_{name}")
        for platform, kernels in platforms.items():
            classes = table.get(getattr(PlatformEnum, platform), [])
            assert tuple(each.__name__ for each in classes) == kernels


@pytest.mark.parametrize(
    ("name", "vllm", "known"),
    [
        ("DoryForCausalLM", (0, 33), True),
        ("DoryForCausalLM", (0, 32), False),
        ("HYV4ForCausalLM", (0, 32), True),
        ("HYV4ForCausalLM", (0, 24), False),
    ],
)
def test_classes_come_and_go(
    good: Callable[[str], Path], tmp_path: Path, name: str, vllm: Version, known: bool
) -> None:
    changed = spoiled(good("W8A8"), tmp_path / "changed", config(WHOLE, architectures=[name]))
    where = [one.where for one in found(changed, vllm) if one.severity == "error"]
    assert any("architectures" in each for each in where) is not known


@pytest.mark.parametrize(
    ("preset", "vllm", "sm", "tp", "words"),
    [
        ("NVFP4", (0, 25), 120, 2, "no multiple of 32"),
        ("NVFP4", (0, 25), 120, 1, ""),
        ("NVFP4", (0, 26), 120, 2, ""),
        ("NVFP4", (0, 25), 100, 2, ""),
        ("NVFP4A16", (0, 25), 120, 2, ""),
        ("NVFP4", (0, 29), 121, 1, "weights only"),
        ("FP8_BLOCK", (0, 27), 120, 1, "cannot lay out"),
        ("FP8_BLOCK", (0, 26), 120, 1, ""),
    ],
)
def test_public_reports_are_warnings(
    tmp_path: Path, preset: str, vllm: Version, sm: int, tp: int, words: str
) -> None:
    """A rank of two has 16 * 9 inputs of down_proj."""
    model = sketch(tmp_path / "sketch", {**LLAMA, "intermediate_size": 288}, preset, {})
    warned = [one for one in found(model, vllm, sm, tp=tp) if one.check == "known_bad"]
    assert bool(warned) is bool(words)
    assert all(words in one.got and one.severity == "warning" for one in warned)


def test_every_report_names_its_source() -> None:
    versions = {short_version(each) for each in known_versions()}
    assert all(each.source.startswith("https://github.com/") for each in known_bad())
    assert all({*each.vllm} <= versions and each.fix for each in known_bad())


def test_a_plan_tells_what_is_known_of_its_vllm(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownBad(
        what="stops at the start",
        vllm=("0.32",),
        sm=(120,),
        schemes=("CompressedTensorsW8A8Fp8",),
        strategy="block",
        fix="wait",
        source="here",
    )
    monkeypatch.setattr(plan_notes, "known_bad", lambda: (known,))
    plans = {
        scheme: json.loads(vexport("plan", llama, "--scheme", scheme, "--format", "json").stdout)
        for scheme in ("FP8_BLOCK", "FP8_DYNAMIC")
    }
    notes = {scheme: [note["where"] for note in plan["notes"]] for scheme, plan in plans.items()}
    assert notes == {"FP8_BLOCK": ["vLLM 0.32, SM 120"], "FP8_DYNAMIC": []}


SPARSE: Json = {"format": "sparse-24-bitmask", "targets": ["Linear"], "sparsity_structure": "2:4"}
QKV = "model.layers.0.self_attn.qkv_proj"


@pytest.mark.parametrize(
    ("change", "where", "before", "since", "severities"),
    [
        (config(WHOLE, tie_word_embeddings=True), "lm_head.weight", (0, 28), (0, 29), ("error", "warning")),
        (
            all_of(
                config(WHOLE, tie_word_embeddings=True), rename("lm_head.weight", "lm_head.weight_packed")
            ),
            "lm_head.weight_packed",
            (0, 28),
            (0, 29),
            ("error", "warning"),
        ),
        (
            config(QUANTIZATION, sparsity_config=SPARSE),
            "sparsity_config",
            (0, 21),
            (0, 22),
            ("warning", "error"),
        ),
        (
            config(QUANTIZATION, ignore=["lm_head", "re:.*qkv_proj"]),
            "q_proj",
            (0, 29),
            (0, 30),
            ("", "error"),
        ),
        (config(QUANTIZATION, ignore=["lm_head", QKV]), "q_proj", (0, 29), (0, 30), ("error", "error")),
    ],
)
def test_what_the_oldest_version_was_seen_to_do_otherwise(
    good: Callable[[str], Path],
    tmp_path: Path,
    change: Change,
    where: str,
    before: Version,
    since: Version,
    severities: tuple[str, str],
) -> None:
    """Each was first recorded of spoiled checkpoints in vLLM 0.20; the version is that of the source."""
    folder = spoiled(good("W8A8"), tmp_path / "changed", change)
    for version, severity in zip((before, since), severities, strict=True):
        named = {one.severity for one in found(folder, version) if one.where.endswith(where)}
        assert named == ({severity} if severity else set()), version
