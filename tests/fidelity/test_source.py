"""`vexport check --source`: quantized weights resemble the source, all other tensors equal it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file

from tests.command import findings, vexport
from tests.models import Good, dequantized, save_llama, write_tokenizer
from tests.mutations.edits import (
    GROUP,
    Change,
    Tensors,
    add,
    all_of,
    config,
    drop,
    file_bytes,
    json_file,
    multiply_by,
    put,
    set_first,
    spoiled,
    swap,
    tensors,
    without_files,
)
from tests.texts import assert_contains

SCHEMES = ("NVFP4A16", "MXFP4", "FP8_BLOCK", "FP8", "W8A8", "W4A16_ASYM", "W3A16")
DOWN = "model.layers.2.mlp.down_proj"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
PEER = Path(__file__).parent.parent / "peer"


def compared(checkpoint: Path, source: Path, *, notes: bool = False) -> list[dict[str, str]]:
    """Return the findings of a comparison with the source.

    Micro models have no tokenizer. This finding is left out.
    """
    found = findings(checkpoint, "--source", source)
    chosen = [each for each in found if (each["severity"] == "info") is notes]
    return [each for each in chosen if each["rule"] != "tokenizer/no-tokenizer"]


def every_place(finding: Mapping[str, str]) -> Sequence[str]:
    """Return all places of a finding: `where` alone, or `places` if there are several."""
    return finding["places"] or (finding["where"],)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sound_checkpoint_passes(good: Good, llama: Path, scheme: str) -> None:
    assert compared(good(scheme), llama) == []
    notes = compared(good(scheme), llama, notes=True)
    kinds = [place for note in notes for place in every_place(note)]
    assert len(kinds) == len(set(kinds)) == 7
    assert all(f" (3 in {scheme})" in kind for kind in kinds)


def test_ratio_equals_compressed_tensors(good: Good, llama: Path) -> None:
    exact, ratios = load_file(llama / "model.safetensors"), []
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.down_proj"
        weight = exact[f"{name}.weight"].double()
        error = dequantized(good("W4A16"), name) - weight
        ratios.append(float(10 * torch.log10(weight.square().sum() / error.square().sum())))
    (note,) = [
        note for note in compared(good("W4A16"), llama, notes=True) if "down_proj" in note["where"]
    ]
    least, median, most = sorted(ratios)
    assert_contains(note["got"], f"{least:.1f} to {most:.1f} dB", f"median {median:.1f}")


def first_rows(factor: float, rows: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.to(torch.float32).clone()
        changed[:rows, :1] *= factor
        return changed.to(tensor.dtype)

    return apply


ZEROS = f"{DOWN}.weight_zero_point"
WRONG: list[tuple[str, str, Change, str]] = [
    (
        "W4A16",
        "scales a tenth too large",
        put(f"{DOWN}.weight_scale", multiply_by(1.1)),
        "times as large",
    ),
    ("W8A8", "rows turned around", put(f"{DOWN}.weight", lambda t: t.flip(0)), "dB"),
    ("W4A16", "words in another order", put(f"{DOWN}.weight_packed", lambda t: t.flip(1)), "dB"),
    (
        "W4A16",
        "one scale doubled",
        put(f"{DOWN}.weight_scale", first_rows(2.0)),
        "1 of 1,024 parts",
    ),
    (
        "W4A16_ASYM",
        "other zero points",
        put(ZEROS, lambda t: t.flip(0)),
        "wrong zero points",
    ),
]


@pytest.mark.parametrize(
    ("scheme", "change", "words"),
    [(case[0], *case[2:]) for case in WRONG],
    ids=[case[1] for case in WRONG],
)
def test_wrong_weight_is_found(
    good: Good, llama: Path, tmp_path: Path, scheme: str, change: Change, words: str
) -> None:
    (finding,) = compared(spoiled(good(scheme), tmp_path / "wrong", change), llama)
    assert (finding["check"], finding["where"], finding["severity"]) == ("source", DOWN, "error")
    assert words in finding["got"]


def test_kept_tensors_equal_source(good: Good, llama: Path, tmp_path: Path) -> None:
    def change(values: Tensors) -> None:
        values["model.norm.weight"][3] += 0.5
        values["model.embed_tokens.weight"] = values["model.embed_tokens.weight"].to(torch.float32)

    found = compared(spoiled(good("W8A8"), tmp_path / "wrong", tensors(change)), llama)
    severities = {finding["where"]: finding["severity"] for finding in found}
    assert severities == {"model.norm.weight": "error", "model.embed_tokens.weight": "warning"}


def test_exchanged_layers_and_nan_are_found(good: Good, llama: Path, tmp_path: Path) -> None:
    first, second = (f"model.layers.{number}.mlp.down_proj.weight" for number in (0, 1))
    found = compared(spoiled(good("W8A8"), tmp_path / "wrong", swap(first, second)), llama)
    assert {f"{finding['where']}.weight" for finding in found} == {first, second}
    checkpoint = spoiled(
        good("W8A8"), tmp_path / "nan", put(f"{DOWN}.weight_scale", set_first(float("nan")))
    )
    assert ("source", DOWN) in {
        (finding["check"], finding["where"]) for finding in compared(checkpoint, llama)
    }


def test_missing_source_tensor_is_named(good: Good, llama: Path, tmp_path: Path) -> None:
    source = spoiled(llama, tmp_path / "source", add("model.extra.weight", torch.ones(3)))
    assert [finding["where"] for finding in compared(good("W8A8"), source)] == [
        "model.extra.weight"
    ]
    broken = spoiled(good("W8A8"), tmp_path / "broken", drop("model.norm.weight"))
    places = {(finding["check"], finding["where"]) for finding in compared(broken, llama)}
    assert ("source", "model.norm.weight") in places


def test_source_with_fused_layers(good: Good, llama: Path, tmp_path: Path) -> None:
    """The source stores q/k/v and gate/up fused, like Phi-3. The checkpoint splits them."""

    def fuse(values: Tensors) -> None:
        for layer in range(3):
            for fused, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                place = f"model.layers.{layer}.{fused}"
                names = [f"{place.rpartition('.')[0]}.{part}_proj.weight" for part in parts]
                values[f"{place}_proj.weight"] = torch.cat([values.pop(name) for name in names])

    source = spoiled(llama, tmp_path / "source", tensors(fuse))
    assert compared(good("NVFP4A16"), source) == []


def test_norms_rounded_as_one_plus_weight(good: Good, llama: Path, tmp_path: Path) -> None:
    """llm-compressor rounds norms that multiply by 1 + weight (Gemma's) in this way."""
    name = "model.norm.weight"
    source = spoiled(llama, tmp_path / "source", put(name, lambda norm: norm * 0.1318))
    rounded = spoiled(
        good("W8A8"), tmp_path / "rounded", put(name, lambda norm: (norm * 0.1318 + 1) - 1)
    )
    other = spoiled(good("W8A8"), tmp_path / "other", put(name, lambda norm: norm * 0.14))
    assert compared(rounded, source) == []
    assert [finding["where"] for finding in compared(other, source)] == [name]


@pytest.mark.parametrize(
    "change",
    [
        config(GROUP, format="naive-quantized"),
        put(f"{DOWN}.weight_scale", lambda scale: scale.double()),
        put(f"{DOWN}.weight", lambda weight: torch.cat([weight, weight], dim=1)),
    ],
)
def test_equivalent_storage_passes(good: Good, llama: Path, tmp_path: Path, change: Change) -> None:
    """Another format, a lossless cast, and a weight whose end vLLM drops are equal weights."""
    found = compared(spoiled(good("FP8_DYNAMIC"), tmp_path / "changed", change), llama)
    assert [finding for finding in found if finding["check"] == "source"] == []


def test_unequal_experts_are_compared() -> None:
    """The global scales of llm-compressor's experts differ, which is an error.

    Their weights equal the source.
    """
    found = compared(PEER / "moe-NVFP4A16", PEER / "moe")
    assert {(finding["check"], finding["severity"]) for finding in found} == {("fusion", "error")}


@pytest.fixture
def pair(good: Good, llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Write a checkpoint and its source, each with a tokenizer, template and generation config."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    copytree(llama, source)
    copytree(good("W8A8"), checkpoint)
    for folder in (source, checkpoint):
        write_tokenizer(folder)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": 2, "temperature": 0.6})
        )
    return checkpoint, source


def test_equivalent_files_pass(pair: tuple[Path, Path]) -> None:
    checkpoint, source = pair
    all_of(
        without_files("chat_template.jinja"),
        json_file(SETTINGS, lambda settings: settings.update(chat_template="{{ messages }}")),
        json_file("tokenizer.json", lambda tokenizer: tokenizer.update(truncation=None)),
        json_file(
            GENERATION, lambda values: values.update(eos_token_id=[2], transformers_version="5")
        ),
    )(checkpoint)
    assert compared(checkpoint, source) == []


FILES: list[tuple[Change, str]] = [
    (without_files("tokenizer.json"), "tokenizer.json"),
    (
        json_file("tokenizer.json", lambda t: t.update(pre_tokenizer=None)),
        "tokenizer.json: pre_tokenizer",
    ),
    (json_file(SETTINGS, lambda t: t.update(eos_token="<s>")), f"{SETTINGS}: eos_token"),
    (without_files("chat_template.jinja"), "chat_template.jinja"),
    (file_bytes("chat_template.jinja", lambda old: b"x" + old), "chat_template.jinja"),
    (json_file(GENERATION, lambda t: t.pop("eos_token_id")), f"{GENERATION}: eos_token_id"),
    (without_files(GENERATION), f"{GENERATION}: temperature"),
    (config((), rms_norm_eps=0.1), "config.json: rms_norm_eps"),
]


@pytest.mark.parametrize(
    ("change", "where"), FILES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_different_files_are_errors(pair: tuple[Path, Path], change: Change, where: str) -> None:
    checkpoint, source = pair
    change(checkpoint)
    places = [
        finding["where"]
        for finding in findings(checkpoint, "--source", source)
        if finding["severity"] == "error"
    ]
    assert any(place.endswith(where) for place in places), places


def test_quantized_source_and_other_shape(good: Good, tmp_path: Path) -> None:
    ran = vexport("check", good("W8A8"), "--source", good("W8A8"))
    assert ran.code == 2
    assert ran.errors[0].endswith("[source/quantized-source]")
    found = compared(good("W8A8"), save_llama(tmp_path / "small", intermediate_size=256))
    (misfit,) = [finding for finding in found if DOWN in every_place(finding)]
    assert misfit["rule"] == "source/other-size"
