"""Numbers and settings that cannot be meant: each rule where it speaks and where it does not."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.mutations.edits import (
    GROUP,
    INDEX,
    QUANTIZATION,
    WEIGHTS,
    WHOLE,
    Change,
    Tensors,
    all_of,
    config,
    element,
    every,
    file_bytes,
    header,
    index,
    put,
    spoiled,
    tensors,
)
from tests.mutations.kinds.edited import NESTED
from vexport.checks import check_checkpoint
from vexport.checks.vllm.settings import wrong_settings
from vexport.formats.parsing import parse_args
from vexport.types import Json

LAYER = "model.layers.1"
PLACE = "config.json: quantization_config"
TRANSFORM = f"{PLACE}.transform_config.config_groups"
DEEP = len(NESTED).to_bytes(8, "little") + NESTED
Q = f"{LAYER}.self_attn.q_proj"


def found(good: Path, folder: Path, change: Change) -> list[str]:
    """The places of the errors, relative to the checkpoint."""
    findings = check_checkpoint(str(spoiled(good, folder, change))).findings
    return [one.where.replace(f"{folder}/", "") for one in findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rms_norm_eps": 1e-6}, None),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "no-such"}}, "rope_scaling"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {}}, "rope_scaling"),
        ({"text_config": {}}, "text_config"),
    ],
)
def test_settings(settings: Mapping[str, Json], key: str | None) -> None:
    assert [fault.key for fault in wrong_settings(settings)] == ([key] if key else [])


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"dynamic": "local", "strategy": "tensor_group", "group_size": 16, "num_bits": 4}, False),
        ({"dynamic": "false"}, True),
        ({"group_size": "128"}, True),
        ({"num_bits": "8"}, False),
        ({"num_bits": 0}, True),
        ({"actorder": "static"}, False),
        ({"actorder": False}, False),
        ({"actorder": "by-hand"}, True),
    ],
)
def test_arguments_are_refused_as_compressed_tensors_does(arguments: Json, refused: bool) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    assert isinstance(parse_args(arguments), str) is refused
    try:
        QuantizationArgs.model_validate(arguments)
        accepted = arguments != {"num_bits": 0}
    except (ValueError, TypeError):
        accepted = False
    assert accepted is not refused


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_what_is_not_quantized_is_not_all_zero(
    good: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    assert found(good("W8A8"), tmp_path / "zero", put(name, every(0.0))) == [name]


@pytest.mark.parametrize(("scheme", "leaf"), [("W8A8", "weight"), ("FP8_DYNAMIC", "weight")])
def test_a_transposed_weight_leaves_ranges_unfilled(
    good: Callable[[str], Path], tmp_path: Path, scheme: str, leaf: str
) -> None:
    assert found(good(scheme), tmp_path / "turned", put(f"{Q}.{leaf}", lambda value: value.T)) == [Q]


def test_rows_that_are_all_zero_fill_no_range(good: Callable[[str], Path], tmp_path: Path) -> None:
    def pruned(values: Tensors) -> None:
        values[f"{Q}.weight"][::2] = 0
        values[f"{Q}.weight_scale"][::2] = torch.finfo(torch.float32).eps

    def lost(values: Tensors) -> None:
        values[f"{Q}.weight"][::2] = 0

    assert found(good("W8A8"), tmp_path / "lost", tensors(lost)) == [Q]
    assert found(good("W8A8"), tmp_path / "pruned", tensors(pruned)) == []


def test_an_input_is_no_larger_than_its_norm_lets_through(
    good: Callable[[str], Path], tmp_path: Path
) -> None:
    def upside_down(values: Tensors) -> None:
        for leaf in "qkv":
            name = f"{LAYER}.self_attn.{leaf}_proj.input_scale"
            values[name] = 1 / values[name]

    names = [f"{LAYER}.self_attn.{leaf}_proj.input_scale" for leaf in "qkv"]
    assert found(good("FP8"), tmp_path / "inverse", tensors(upside_down)) == names


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (config(WHOLE, dtype="float16"), "config.json: dtype"),
        (config(WHOLE, architectures="LlamaForCausalLM"), "config.json: architectures"),
        (config(WHOLE, architectures=["LlamaForSequenceClassification"]), "config.json: architectures"),
        (config(WHOLE, architectures=["NoSuchForCausalLM", "LlamaForCausalLM"]), None),
        (config(WHOLE, dtype="torch.bfloat16"), "config.json: dtype"),
        (config(WHOLE, tie_word_embeddings="true"), "config.json: tie_word_embeddings"),
        (config(WHOLE, max_position_embeddings=None), "config.json: max_position_embeddings"),
        (config(WHOLE, attention_bias=None), "config.json: attention_bias"),
        (config(WHOLE, layer_types=["full_attention"]), "config.json: layer_types"),
        (
            config(WHOLE, layer_types=["full_attention", "full_attention", "magic"]),
            "config.json: layer_types",
        ),
        (config(WHOLE, is_encoder_decoder=True), "config.json: is_encoder_decoder"),
        (config(QUANTIZATION, transform_config={"R1": {}}), f"{PLACE}.transform_config"),
        (config(QUANTIZATION, transform_config={}), None),
        (config(QUANTIZATION, transform_config={"config_groups": {"v": 5}}), f"{TRANSFORM}.v"),
        (config(QUANTIZATION, transform_config={"config_groups": {"v": {}}}), f"{TRANSFORM}.v.type"),
        (config(QUANTIZATION, transform_config={"config_groups": [1]}), f"{TRANSFORM}."),
        (
            config(QUANTIZATION, transform_config={"config_groups": {"v": {"type": "hadamard", "size": 4}}}),
            f"{TRANSFORM}.v.size",
        ),
        (config(WHOLE, text_config=[1]), "config.json: text_config"),
        (config(GROUP, targets=["Linear", 3]), f"{PLACE}.config_groups.group_0"),
        (
            config((*QUANTIZATION, "config_groups"), cache={"targets": ["LlamaAttention"], "weights": None}),
            None,
        ),
        (header(lambda entries: entries.update({"__metadata__": []})), WEIGHTS),
        (file_bytes(WEIGHTS, lambda data: DEEP), WEIGHTS),
        (index(lambda values: dict.fromkeys(values, f"./{WEIGHTS}")), INDEX),
        (file_bytes("config.json", lambda data: b"\xef\xbb\xbf" + data), "config.json:1"),
        (put("model.norm.weight", element(float("inf"))), "model.norm.weight"),
    ],
)
def test_files_and_names(
    good: Callable[[str], Path], tmp_path: Path, change: Change, where: str | None
) -> None:
    assert found(good("W8A8"), tmp_path / "spoiled", change) == ([where] if where else [])


def test_a_link_to_nothing_and_a_folder_are_no_weights(good: Callable[[str], Path], tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to("nothing")

    def a_folder(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).mkdir()

    assert found(good("W8A8"), tmp_path / "link", broken) == [WEIGHTS]
    assert found(good("W8A8"), tmp_path / "folder", a_folder) == [WEIGHTS]


def test_layers_may_be_stored_as_vllm_fuses_them(good: Callable[[str], Path], tmp_path: Path) -> None:
    def fused(values: Tensors) -> None:
        place = f"{LAYER}.self_attn"
        for leaf in ("weight", "weight_scale"):
            parts = [values.pop(f"{place}.{part}_proj.{leaf}") for part in "qkv"]
            values[f"{place}.qkv_proj.{leaf}"] = torch.cat(parts)

    def cut(values: Tensors) -> None:
        fused(values)
        name = f"{LAYER}.self_attn.qkv_proj.weight_scale"
        values[name] = values[name][:-1].clone()

    assert found(good("W8A8"), tmp_path / "fused", tensors(fused)) == []
    assert found(good("W8A8"), tmp_path / "cut", tensors(cut)) == [f"{LAYER}.self_attn.qkv_proj.weight_scale"]


def test_a_sign_that_cancels_hides_nothing(good: Callable[[str], Path], tmp_path: Path) -> None:
    """The layer's other numbers are looked at beside the warning."""
    change = all_of(
        put(f"{Q}.input_scale", lambda scale: -scale), put(f"{Q}.weight_scale", lambda scale: scale * 1e6)
    )
    report = check_checkpoint(str(spoiled(good("FP8"), tmp_path / "bad", change)))
    severities = {finding.where: finding.severity for finding in report.findings if finding.check == "values"}
    assert severities == {f"{Q}.input_scale": "warning", f"{Q}.weight_scale": "error"}
