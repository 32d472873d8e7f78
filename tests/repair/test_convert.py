"""Checkpoints of other methods in compressed-tensors: the same values, whole or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.architectures.families import save_family
from tests.checks.quant_methods import CHECKPOINTS, GROUP, packed_along_rows, write
from tests.command import vexport
from tests.models import dequantized, errors, save_llama
from tests.mutations.edits import QUANTIZATION, Tensors, all_of, config, drop, put, spoiled, tensors
from vexport.types import Json

DOWN = "model.layers.1.mlp.down_proj"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller micro Llama."""
    return save_llama(tmp_path_factory.mktemp("small") / "model", num_hidden_layers=2)


def codes(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """The eight codes of each word of a row."""
    values = [(words.long() >> (4 * place)) & 15 for place in order]
    return torch.stack(values, dim=-1).flatten(-2)


def by_formula(name: str, stored: Tensors) -> torch.Tensor:
    """A layer's weight as the producer's own code computes it."""
    if name.startswith("gptq") or name == "auto-round":
        q = codes(stored["qweight"].T).T
        return ((q - 8) * stored["scales"].repeat_interleave(GROUP, dim=0)).T
    if name in ("awq", "auto-round-awq"):
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        q, zeros = codes(stored["qweight"], order), codes(stored["qzeros"], order)
        zeros, scales = (each.repeat_interleave(GROUP, dim=0) for each in (zeros, stored["scales"]))
        return ((q - zeros) * scales).T
    if name == "modelopt-nvfp4":
        table = torch.tensor([*FP4, *(-each for each in FP4)])
        q = torch.stack([stored["weight"] & 15, stored["weight"] >> 4], dim=-1).flatten(-2)
        scale = stored["weight_scale"].float() * stored["weight_scale_2"]
        return table[q.long()] * scale.repeat_interleave(16, dim=1)
    if name.endswith("mxfp4"):
        table = torch.tensor([*FP4, *(-each for each in FP4)])
        packed = stored["weight_packed" if "weight_packed" in stored else "weight"].view(torch.uint8)
        q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        scale = torch.exp2(stored["weight_scale"].view(torch.uint8).float() - 127)
        return table[q.long()] * scale.repeat_interleave(32, dim=1)
    scale = stored["weight_scale_inv" if "weight_scale_inv" in stored else "weight_scale"]
    if name == "quark-int8":
        return stored["weight"].float() * scale.reshape(-1, 1)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scale.ndim == 2 else scale
    return stored["weight"].float() * wide


# Of which the producer's own files are converted in tests/producers.
WITHOUT_FORMULA = ("gptq-8bit", "quark-int4", "quark-uint4")


def same_values(source: Path, out: Path, layer: str, name: str) -> bool:
    """Whether a layer of the result has the weight that the producer's formula has of the stored one."""
    start = f"{layer}."
    stored = {
        key.removeprefix(start): value
        for key, value in load_file(source / "model.safetensors").items()
        if key.startswith(start)
    }
    weight = dequantized(out, layer)
    return torch.equal(weight, by_formula(name, stored).to(weight.dtype))


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name not in WITHOUT_FORMULA])
def test_the_values_stay(model: Path, tmp_path: Path, name: str) -> None:
    source, out = write(name, model, tmp_path / "source"), tmp_path / "out"
    ran = vexport("convert", source, out, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["ok"], report["layers"], report["exact"]) == (True, 14, 14)
    assert errors(out) == []
    assert same_values(source, out, DOWN, name)


ROUTERS: Json = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))]
MODELOPT_ROUTERS: Json = ["lm_head", "*.mlp.gate"]
# What of a method's config keeps the routers.
KEEPS: dict[str, dict[str, Json]] = {
    "gptq": {},
    "awq": {},
    "fp8-block": {"ignored_layers": ROUTERS},
    "fp8-static": {"ignored_layers": ROUTERS},
    "modelopt-fp8": {"ignore": MODELOPT_ROUTERS},
    "modelopt-nvfp4": {"ignore": MODELOPT_ROUTERS},
}


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro mixture of experts: all layers alike, or one plain layer, latent attention, shared experts."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    return save_family(str(request.param), folder, moe_intermediate_size=256)


@pytest.mark.parametrize("name", KEEPS)
def test_the_values_of_experts_stay(experts: Path, tmp_path: Path, name: str) -> None:
    source, out = write(name, experts, tmp_path / "source", **KEEPS[name]), tmp_path / "out"
    assert errors(source) == []
    ran = vexport("convert", source, out, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["layers"] == report["exact"] > 24
    assert errors(out) == []
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert same_values(source, out, f"model.layers.1.mlp.experts.3.{projection}", name)


def test_experts_that_compressed_tensors_cannot_hold_are_refused(tmp_path: Path) -> None:
    """vLLM runs experts of one scale with inputs by token for `fp8`, not for compressed-tensors."""
    model = save_family("qwen3-moe", tmp_path / "model")
    source = write("fp8-dynamic", model, tmp_path / "source", ignored_layers=ROUTERS)
    ran = vexport("convert", source, tmp_path / "out", "--quiet")
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert "routed experts" in ran.stdout + ran.stderr


def test_zero_points_that_vllm_refuses_are_kept(model: Path, tmp_path: Path) -> None:
    """GPTQ with zero points of its own: refused by vLLM as it is, sound in compressed-tensors."""
    zeros = torch.arange(256).reshape(-1, 1).repeat(1, 512 // GROUP) % 15
    stored = packed_along_rows(zeros, 4).T.contiguous()

    def change(values: Tensors) -> None:
        for key in [key for key in values if key.endswith(f"{DOWN}.qzeros")]:
            values[key] = stored

    source = write("gptq", model, tmp_path / "source", sym=False)
    tensors(change)(source)
    assert [each.check for each in errors(source)] == ["config"]
    out = tmp_path / "out"
    assert vexport("convert", source, out, "--quiet").code == 0
    assert errors(out) == []
    values = load_file(source / "model.safetensors")
    q = codes(values[f"{DOWN}.qweight"].T).T
    offset = (zeros.T + 1).repeat_interleave(GROUP, dim=0)
    expected = ((q - offset) * values[f"{DOWN}.scales"].repeat_interleave(GROUP, dim=0)).T
    assert torch.equal(dequantized(out, DOWN), expected.to(torch.float16))


def test_a_scale_without_an_exact_reciprocal_moves_the_last_bit(model: Path, tmp_path: Path) -> None:
    """Of some float32 numbers none is the reciprocal: the next one is stored."""
    source = write("modelopt-nvfp4", model, tmp_path / "source")
    second = load_file(source / "model.safetensors")[f"{DOWN}.weight_scale_2"].numpy()
    one, scale = np.float32(1), np.float32(second)
    ends = np.array([0, 1e9], np.float32)
    while any(one / other == scale for other in (one / scale, *np.nextafter(one / scale, ends))):
        scale = np.nextafter(scale, one)
    put(f"{DOWN}.weight_scale_2", lambda value: torch.tensor(float(scale)))(source)
    out = tmp_path / "out"
    assert vexport("convert", source, out, "--quiet").code == 0
    stored = load_file(out / "model.safetensors")[f"{DOWN}.weight_global_scale"].numpy()
    assert abs(float(stored[0]) * float(scale) - 1) < 2**-23


REFUSED = {
    "other columns": ("gptq", put(f"{DOWN}.g_idx", lambda value: value.flip(0)), f"{DOWN}.g_idx"),
    "other zero points": ("gptq", put(f"{DOWN}.qzeros", lambda value: value ^ 3), f"{DOWN}.qzeros"),
    "a missing scale": ("awq", drop(f"{DOWN}.scales"), DOWN),
    "a key that is missing": ("fp8-block", config(QUANTIZATION, activation_scheme=None), "activation_scheme"),
    "a zero point that is no number of 4 bits": (
        "gptq",
        all_of(config(QUANTIZATION, sym=False), put(f"{DOWN}.qzeros", lambda value: value | 15)),
        f"{DOWN}.qzeros",
    ),
    "a scale that is zero": (
        "fp8-static",
        put(f"{DOWN}.weight_scale", torch.zeros_like),
        f"{DOWN}.weight_scale",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_lose_something_is_refused(model: Path, tmp_path: Path, case: str) -> None:
    name, change, where = REFUSED[case]
    source = spoiled(write(name, model, tmp_path / "sound"), tmp_path / "source", change)
    ran = vexport("convert", source, tmp_path / "out", "--format", "json", "--quiet")
    assert ran.code == 1
    assert any(where in each["where"] for each in json.loads(ran.stdout)["findings"])
    assert not (tmp_path / "out").exists()


def test_only_other_methods_are_converted(model: Path, tmp_path: Path) -> None:
    ran = vexport("convert", model, tmp_path / "out")
    assert ran.code == 2
    assert "no quantization_config" in ran.stderr
    source = write("awq", model, tmp_path / "source")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    assert vexport("convert", source, tmp_path / "there", "--overwrite").code == 2
    assert (tmp_path / "there" / "mine").read_text() == "mine"
