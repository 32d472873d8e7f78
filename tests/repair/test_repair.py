"""Repaired checkpoints pass the check at the reported cost. Other faults are named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.architectures.families import split
from tests.command import Ran, vexport
from tests.models import Good, dequantized, problems
from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    QUANTIZATION,
    WHOLE,
    Change,
    add,
    all_of,
    config,
    drop,
    fill_with,
    inverse,
    put,
    set_first,
    spoiled,
)
from vexport.records import Json

PEER = Path(__file__).parent.parent / "peer"
Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.2.mlp.down_proj"


def repair(
    checkpoint: Path, out: Path, *options: object
) -> tuple[Ran, dict[str, list[dict[str, object]]]]:
    ran = vexport("repair", checkpoint, out, "--quiet", "--format", "json", *options)
    assert ran.stdout, ran.stderr
    return ran, json.loads(ran.stdout)


GPTQ: dict[str, Json] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
}
DENSE: Json = {"format": "dense", "targets": ["Linear"]}
WITHOUT_LOSS = [
    ("W8A8", config(QUANTIZATION, quant_method=None), "config"),
    (
        "W4A16",
        all_of(config(ARGUMENTS, no_such_key=1), config(QUANTIZATION, sparsity_config=DENSE)),
        "config",
    ),
    ("W8A8", config(QUANTIZATION, ignore=["lm_head", Q]), "targets"),
    ("W8A8", config(GROUP, targets=["re:.*mlp.*"]), "targets"),
    ("FP8", config(GROUP, targets=["no_such_layer"]), "targets"),
    ("W4A16", config(GROUP, format="no-such-format"), "arguments"),
    ("W4A16", config(ARGUMENTS, group_size=64), "arguments"),
    ("FP8_DYNAMIC", config(ARGUMENTS, strategy="tensor"), "arguments"),
    ("NVFP4", put(f"{DOWN}.weight_global_scale", inverse), "global scales"),
]


@pytest.mark.parametrize(("scheme", "change", "family"), WITHOUT_LOSS)
def test_repairs_without_loss(
    good: Good, tmp_path: Path, scheme: str, change: Change, family: str
) -> None:
    checkpoint = spoiled(good(scheme), tmp_path / "broken", change)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    ran, report = repair(checkpoint, tmp_path / "out")
    assert ran.code == 0, ran.stderr
    assert {repair["family"] for repair in report["repairs"]} == {family}
    assert problems(tmp_path / "out") == []
    for layer in (Q, DOWN):
        torch.testing.assert_close(
            dequantized(tmp_path / "out", layer),
            dequantized(good(scheme), layer),
            rtol=1e-6,
            atol=0,
        )
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("with_source", [False, True])
def test_experts_of_llm_compressor_get_shared_scales(tmp_path: Path, with_source: bool) -> None:
    """Weights are rescaled or quantized again. They change by at most half a step of e4m3."""
    checkpoint, out = PEER / "moe-NVFP4A16", tmp_path / "out"
    found = [finding.where for finding in problems(checkpoint)]
    assert found == [f"model.layers.0.mlp.experts.{i}.w13: weight_global_scale" for i in range(2)]
    ran, report = repair(checkpoint, out, *(["--source", PEER / "moe"] if with_source else []))
    assert ran.code == 0, ran.stderr
    assert problems(out) == []
    written, source = (
        load_file(out / "model.safetensors"),
        load_file(PEER / "moe" / "model.safetensors"),
    )
    old = load_file(checkpoint / "model.safetensors")
    repaired = {repair["layer"]: repair["change"] for repair in report["repairs"]}
    for expert in range(2):
        layers = [
            f"model.layers.0.mlp.experts.{expert}.{leaf}" for leaf in ("gate_proj", "up_proj")
        ]
        values = [old[f"{layer}.weight_global_scale"] for layer in layers]
        assert [written[f"{layer}.weight_global_scale"] for layer in layers] == [min(values)] * 2
        for layer in layers:
            before, after = (
                dequantized(checkpoint, layer).double(),
                dequantized(out, layer).double(),
            )
            exact = source[f"{layer}.weight"].double()
            if layer not in repaired:
                assert torch.equal(before, after)
                continue
            change = repaired[layer]
            assert isinstance(change, dict)
            assert change["relative"] == pytest.approx(
                float((after - before).norm() / before.norm()), rel=1e-6
            )
            lost = [float((weight - exact).norm() / exact.norm()) for weight in (before, after)]
            assert lost[1] < lost[0] * (1.005 if with_source else 1.06)
            if not with_source:
                assert change["relative"] < 1 / 16
    same = [name for name in old if "experts" not in name]
    assert all(torch.equal(old[name], written[name]) for name in same)
    text = vexport("repair", checkpoint, tmp_path / "again", "--quiet").stdout
    scale = "experts.0.gate_proj.weight_global_scale: 7136"
    (line,) = [line for line in text.splitlines() if scale in line]
    assert "-> 6080" in line
    assert "2 weights moved" in text


@pytest.mark.parametrize(("layer", "factor"), [(Q, 2), (Q, 1 / 3), (f"{Q[:14]}.mlp.gate_proj", 2)])
def test_input_scales_follow_majority(
    good: Good, tmp_path: Path, layer: str, factor: float
) -> None:
    """Three layers use the scale of the majority, two layers the smaller scale."""
    name = f"{layer}.input_global_scale"
    checkpoint = spoiled(good("NVFP4"), tmp_path / "broken", put(name, lambda t: t * factor))
    ran, _ = repair(checkpoint, tmp_path / "out")
    assert ran.code == 0, ran.stderr
    written, right = (
        load_file(root / "model.safetensors") for root in (tmp_path / "out", good("NVFP4"))
    )
    assert all(torch.equal(written[key], value) for key, value in right.items())


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_missing_kv_scales_become_one(good: Good, tmp_path: Path, strategy: str) -> None:
    announce = config(QUANTIZATION, kv_cache_scheme={**KV_SCHEME, "strategy": strategy})
    ran, report = repair(spoiled(good("W8A8"), tmp_path / "broken", announce), tmp_path / "out")
    assert ran.code == 0, ran.stderr
    assert [repair["where"] for repair in report["repairs"]] == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]
    assert all("saturate" in str(repair["cost"]) for repair in report["repairs"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    scales = [value for name, value in written.items() if name.endswith((".k_scale", ".v_scale"))]
    assert len(scales) == 6
    heads = json.loads((good("W8A8") / "config.json").read_text())["num_key_value_heads"]
    shape = (1,) if strategy == "tensor" else (heads, 1, 1)
    assert all(torch.equal(scale, torch.ones(shape)) for scale in scales)


KV_SCHEME: dict[str, Json] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
REFUSED = [
    ("W4A16", drop(f"{Q}.weight_packed"), f"{Q}.weight_packed"),
    (
        "W8A8",
        all_of(
            config(QUANTIZATION, kv_cache_scheme=KV_SCHEME),
            add("model.layers.0.self_attn.k_scale", torch.ones(1)),
        ),
        "model.layers.1.self_attn",
    ),
    ("NVFP4", put(f"{DOWN}.weight_scale", set_first(float("nan"))), f"{DOWN}.weight_scale"),
    ("NVFP4", put(f"{DOWN}.weight_global_scale", fill_with(1e-39)), f"{DOWN}.weight_global_scale"),
    ("FP8", drop(f"{DOWN}.input_scale"), f"{DOWN}.input_scale"),
    ("W8A8", put(f"{DOWN}.weight_scale", lambda t: t[:-1]), f"{DOWN}.weight_scale"),
    ("FP8_DYNAMIC", config(ARGUMENTS, num_bits=3, type="int"), "config_groups.group_0"),
    (
        "W8A8",
        lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"),
        "model.safetensors",
    ),
    ("W8A8", config(WHOLE, quantization_config={**GPTQ}), "quantization_config"),
]


@pytest.mark.parametrize(("scheme", "change", "where"), REFUSED)
def test_unrepairable_fault_writes_nothing(
    good: Good, tmp_path: Path, scheme: str, change: Change, where: str
) -> None:
    ran, report = repair(spoiled(good(scheme), tmp_path / "broken", change), tmp_path / "out")
    assert ran.code == 1
    assert any(where in str(refusal["where"]) for refusal in report["refusals"]), report["refusals"]
    assert len(ran.errors) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"broken"}


def test_untouched_shards_are_copies(good: Good, tmp_path: Path) -> None:
    def in_two(folder: Path) -> None:
        put(f"{DOWN}.weight_global_scale", inverse)(folder)
        split(folder, 2)

    checkpoint, out = spoiled(good("NVFP4"), tmp_path / "broken", in_two), tmp_path / "out"
    ran, report = repair(checkpoint, out)
    assert ran.code == 0, ran.stderr
    assert [repair["family"] for repair in report["repairs"]] == ["global scales"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    changed = index["weight_map"][f"{DOWN}.weight_global_scale"]
    (other,) = {*index["weight_map"].values()} - {changed}
    assert (out / changed).read_bytes() != (checkpoint / changed).read_bytes()
    assert (out / other).read_bytes() == (checkpoint / other).read_bytes()
    assert (out / other).stat().st_ino != (checkpoint / other).stat().st_ino
    names = {name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"].keys() == names


def test_sound_checkpoint_is_copied(good: Good, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = vexport("repair", good("W8A8"), out, "--quiet")
    assert ran.code == 0
    assert "nothing to repair" in ran.stdout
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in good("W8A8").iterdir()
    }
    again = vexport("repair", good("W8A8"), out, "--quiet")
    assert again.code == 2
    assert vexport("repair", good("W8A8"), out, "--quiet", "--overwrite").code == 0
