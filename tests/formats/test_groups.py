"""Schemes with other group sizes than their presets."""

import pytest

from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.formats import INT8, PACKED, vllm_format, written_format
from vexport.formats.schemes import get_scheme, regrouped, scheme_name
from vexport.records import LinearPlan

LAYER = LinearPlan(name="layer", weight="layer.weight", out_features=64, in_features=256)


@pytest.mark.parametrize(
    ("text", "name", "groups"),
    [
        ("w4a16-g64", "W4A16_G64", 4),
        ("W4A16_G32", "W4A16_G32", 8),
        ("W4A16 channel", "W4A16_CHANNEL", 1),
        ("w4a16_asym_g64", "W4A16_ASYM_G64", 4),
        ("W3A16_G256", "W3A16_G256", 1),
    ],
)
def test_names_and_shapes_of_group_sizes(text: str, name: str, groups: int) -> None:
    assert scheme_name(text) == name
    scheme = get_scheme(name)
    shapes = {spec.name.removeprefix("layer."): spec.shape for spec in scheme.layout(LAYER, "BF16")}
    assert shapes["weight_scale"] == (64, groups)
    assert scheme.format is PACKED
    assert vllm_format(scheme.args, PACKED.name) is PACKED
    size = scheme.args.weights.group
    narrow = LinearPlan(name="layer", weight="layer.weight", out_features=64, in_features=136)
    reason = scheme.unsupported_shape((narrow,))
    if size is None:
        assert reason is None
    else:
        assert reason is not None
        assert_contains(reason, "in_features 136", f"group size {size}")


def test_format_of_channel_scales() -> None:
    """With one scale per row and quantized inputs, weights are stored as int-quantized."""
    assert regrouped(get_scheme("W8A8"), None).format is INT8
    assert regrouped(get_scheme("W8A8"), 64).format is PACKED
    assert written_format(get_scheme("W8A8").args) is INT8


@pytest.mark.parametrize(
    "name",
    ["NVFP4_G32", "FP8_DYNAMIC_G64", "MXFP4_CHANNEL", "W4A16_G0", "W4A16_G64_G32", "W4AFP8_G64"],
)
def test_float_formats_have_fixed_groups(name: str) -> None:
    with pytest.raises(InputError, match="scheme"):
        get_scheme(name)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("W4A16_G64", 75),
        ("W4A16_G256", 75),
        ("W4A16_G16", 75),
        ("W8A16_CHANNEL", 75),
        ("W8A16_G256", 75),
        ("W4AFP8", 90),
    ],
)
def test_least_capability_by_group_size(name: str, capability: int) -> None:
    """Marlin and Triton support some group sizes, Humming all.

    CUTLASS runs W4AFP8 only on SM 90.
    """
    scheme = get_scheme(name)
    support = scheme.format.gpu_support(scheme.args)
    assert [sm for sm in (75, 80, 89, 90, 100) if not support.refuses(sm)][:1] == [capability]
