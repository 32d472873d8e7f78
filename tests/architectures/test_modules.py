"""Modules outside the decoder layers, and their names in vLLM."""

import json
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.command import findings, vexport
from tests.mutations.edits import QUANTIZATION, config
from vexport.architectures import module_table, resolve
from vexport.checkpoint.index import read_index
from vexport.records import Json
from vexport.rules.architecture import UNKNOWN_MODULES

# A kept layer that vLLM quantizes unless `ignore` lists it, and its name in vLLM.
KEPT_LAYERS = {
    "gemma4-vision": (
        "model.embed_vision.embedding_projection",
        "embed_vision.embedding_projection",
    ),
    "glm4.5v": ("model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv_proj"),
}


def saved(family: str, folder: Path) -> Path:
    """Save a micro model. Gemma 4 gets separate keys and values in each layer."""
    if family == "gemma4-vision":
        return save_family(family, folder, attention_k_eq_v=False)
    return save_family(family, folder)


def read_ignore(folder: Path) -> list[str]:
    ignore: list[str] = json.loads((folder / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    return ignore


@pytest.mark.vllm
@pytest.mark.slow
def test_kept_modules_outside_decoder(tmp_path: Path) -> None:
    """vLLM does not quantize them, also after a repair of an incomplete `ignore`."""
    written = []
    for family, (module, vllm_name) in KEPT_LAYERS.items():
        source = saved(family, tmp_path / family)
        for scheme in ("FP8_DYNAMIC", "NVFP4A16"):
            out = tmp_path / f"{family}-{scheme}"
            made = vexport(
                "quantize", source, out, "--scheme", scheme, "--ignore", module, "--quiet"
            )
            assert made.code == 0, made.stderr
            written.append(out)
        out, repaired = tmp_path / f"{family}-bad", tmp_path / f"{family}-good"
        holder = vllm_name.rpartition(".")[0]
        assert vexport("quantize", source, out, "--scheme", "FP8_DYNAMIC", "--quiet").code == 0
        ignore: list[Json] = [
            name for name in read_ignore(out) if f"{holder}.q" not in name and vllm_name not in name
        ]
        config(QUANTIZATION, ignore=ignore)(out)
        assert module in [finding["where"] for finding in findings(out)]
        vexport("repair", out, repaired, "--quiet")
        written.append(repaired)
    checked = vexport("check", *written)
    assert checked.code == 0, checked.stdout
    loaded = vexport("load", "--dry", *written, "--tp", "1", "--sm", "90")
    assert loaded.code == 0, loaded.stdout


def test_position_embeddings_are_no_linear_layers(tmp_path: Path) -> None:
    """llm-compressor's `ignore` does not list them either."""
    out = tmp_path / "out"
    source = save_family("gemma3-vision", tmp_path / "model")
    assert vexport("quantize", source, out, "--scheme", "FP8_DYNAMIC", "--quiet").code == 0
    assert not any("position_embedding" in entry for entry in read_ignore(out))
    assert vexport("check", out).code == 0


def test_unknown_class_is_classified_by_names() -> None:
    architecture, _ = resolve("InternLM2ForCausalLM", {})
    for table in (
        "model.embed_tokens",
        "transformer.wte",
        "vision_tower.embeddings.position_embedding",
    ):
        assert architecture.is_embedding(table)
    for layer in (
        "embed_vision.embedding_projection",
        "embed_audio.embedding_post_projection",
        "embed_out",
    ):
        assert not architecture.is_embedding(layer)


def test_unbuildable_class_is_noted(tmp_path: Path) -> None:
    source = save_family("mistral3", tmp_path / "model")
    unknown = next(name for name in sorted(module_table().unknown) if resolve_towers(name))
    config((), architectures=[unknown])(source)
    _, notes = resolve(unknown, read_index(source).config)
    assert UNKNOWN_MODULES.id in {note.rule for note in notes}


def resolve_towers(name: str) -> bool:
    return bool(resolve(name, {})[0].language_model)
