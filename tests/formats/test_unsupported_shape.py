"""A scheme refuses the same groups of layers as vLLM."""

import random
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.texts import assert_contains
from vexport.architectures.ranks import Split
from vexport.formats.schemes import get_scheme
from vexport.records import LinearPlan


def layers(*rows: int, columns: int, names: str = "layer.{}") -> tuple[LinearPlan, ...]:
    return tuple(
        LinearPlan(name=names.format(number), weight="w", out_features=out, in_features=columns)
        for number, out in enumerate(rows)
    )


SIZES = (64, 128, 192, 200, 256, 384, 512, 1024)
SPLITS: tuple[Split, ...] = ("out", "in")


@pytest.mark.vllm
@pytest.mark.parametrize(("ranks", "split"), [*product((1, 2, 4), SPLITS)])
def test_blocks_are_refused_like_in_vllm(ranks: int, split: Split) -> None:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape

    drawn = random.Random(0)
    for _ in range(40):
        rows, columns = drawn.choices(SIZES, k=drawn.randint(1, 3)), drawn.choice(SIZES)
        try:
            with patch("vllm.distributed.get_tensor_model_parallel_world_size", return_value=ranks):
                validate_fp8_block_shape(
                    SimpleNamespace(),
                    input_size=columns,
                    output_size=sum(rows),
                    input_size_per_partition=columns // (ranks if split == "in" else 1),
                    output_partition_sizes=[
                        size // (ranks if split == "out" else 1) for size in rows
                    ],
                    block_size=[128, 128],
                )
            refused = False
        except ValueError:
            refused = True
        members = layers(*rows, columns=columns)
        reason = get_scheme("FP8_BLOCK").unsupported_shape(members, ranks=ranks, split=split)
        assert (reason is not None) == refused, (rows, columns, reason)


def expert(*rows: int, columns: int) -> tuple[LinearPlan, ...]:
    return layers(*rows, columns=columns, names="model.layers.0.mlp.experts.3.{}")


def head(rows: int) -> tuple[LinearPlan, ...]:
    return layers(rows, columns=128, names="lm_head")


@pytest.mark.parametrize(
    ("scheme", "members", "parts"),
    [
        ("NVFP4", layers(64, columns=40), ["in_features 40", "group size 16"]),
        ("MXFP4", layers(64, columns=48), ["in_features 48", "group size 32"]),
        ("MXFP8", layers(64, columns=48), ["in_features 48", "group size 32"]),
        ("W3A16", layers(64, columns=192), ["in_features 192", "group size 128"]),
        ("W4A16_ASYM", layers(64, 12, columns=128), ["out_features 12", "zero points of 4 bits"]),
        ("W4AFP8", layers(64, 32, columns=128), ["out_features 96", "multiple of 128"]),
        ("FP8_BLOCK", layers(100, 128, columns=128), ["out_features 100", "block size 128"]),
        ("FP8_BLOCK", expert(128, 100, columns=128), ["out_features 100", "block size 128"]),
        ("FP8_BLOCK", head(1000), ["output head", "block scales"]),
        ("W4A16_ASYM", head(1001), ["out_features 1001", "zero points of 4 bits"]),
        ("W4AFP8", expert(384, 384, columns=512), ["out_features 384", "multiple of 256"]),
        ("W4A8", expert(384, 384, columns=512), ["no GPU kernel", "routed experts"]),
    ],
)
def test_unsupported_shapes_name_sizes(
    scheme: str, members: tuple[LinearPlan, ...], parts: list[str]
) -> None:
    found = get_scheme(scheme).unsupported_shape(members)
    assert found is not None
    assert_contains(found, *parts)


@pytest.mark.parametrize(
    ("scheme", "members"),
    [
        ("FP8_BLOCK", layers(128, 100, columns=100)),
        ("W4A16_ASYM", head(1000)),
        ("W4A16", head(1001)),
        ("W4AFP8", layers(384, 384, columns=512)),
        ("W4A16", expert(384, 384, columns=512)),
    ],
)
def test_supported_shapes(scheme: str, members: tuple[LinearPlan, ...]) -> None:
    """Fused layers, experts and heads have separate rules."""
    assert get_scheme(scheme).unsupported_shape(members) is None


def test_shapes_on_several_ranks() -> None:
    """A layer that fits one rank may not fit several ranks."""
    scheme, members = get_scheme("NVFP4"), layers(64, columns=48)
    assert scheme.unsupported_shape(members) is None
    assert scheme.unsupported_shape(members, ranks=3, split="in") is None
    columns = scheme.unsupported_shape(members, ranks=2, split="in")
    assert columns is not None
    assert_contains(columns, "in_features 24", "group size 16", "2 ranks")
    rows = scheme.unsupported_shape(members, ranks=5, split="out")
    assert rows is not None
    assert_contains(rows, "out_features 64", "5 ranks")


@pytest.mark.parametrize(
    ("scheme", "members"),
    [
        ("W4A8", expert(384, 384, columns=512)),
        ("FP8_BLOCK", head(1000)),
        ("NVFP4", layers(64, columns=40)),
    ],
)
def test_reasons_of_every_rank_name_no_ranks(scheme: str, members: tuple[LinearPlan, ...]) -> None:
    """A layer that does not run on one rank has the same reason on several ranks."""
    on_one = get_scheme(scheme).unsupported_shape(members)
    assert on_one is not None
    assert get_scheme(scheme).unsupported_shape(members, ranks=2, split="out") == on_one
