"""A scheme refuses a group exactly where vLLM does."""

import random
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from vexport.formats.base import Split
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
def test_blocks_are_refused_as_vllm_does(ranks: int, split: Split) -> None:
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
                    output_partition_sizes=[size // (ranks if split == "out" else 1) for size in rows],
                    block_size=[128, 128],
                )
            refused = False
        except ValueError:
            refused = True
        members = layers(*rows, columns=columns)
        reason = get_scheme("FP8_BLOCK").unsupported_shape(members, ranks=ranks, split=split)
        assert (reason is not None) == refused, (rows, columns, reason)


@pytest.mark.parametrize(
    ("scheme", "rows", "columns", "reason"),
    [
        ("NVFP4", (64,), 40, "in_features 40 is not a multiple of group size 16"),
        ("MXFP4", (64,), 48, "in_features 48 is not a multiple of group size 32"),
        ("MXFP8", (64,), 48, "in_features 48 is not a multiple of group size 32"),
        ("W3A16", (64,), 192, "in_features 192 is not a multiple of group size 128"),
        ("W4A16_ASYM", (64, 12), 128, "out_features 12: zero points of 4 bits do not fill whole words"),
        ("W4AFP8", (64, 32), 128, "out_features 96 is not a multiple of 128"),
        ("FP8_BLOCK", (100, 128), 128, "out_features 100 is not a multiple of the block's 128"),
    ],
)
def test_unsupported_shapes_name_sizes(scheme: str, rows: tuple[int, ...], columns: int, reason: str) -> None:
    assert get_scheme(scheme).unsupported_shape(layers(*rows, columns=columns)) == reason


def test_what_fits_whole_need_not_fit_ranks() -> None:
    scheme, members = get_scheme("NVFP4"), layers(64, columns=48)
    assert scheme.unsupported_shape(members) is None
    assert scheme.unsupported_shape(members, ranks=3, split="in") is None
    assert scheme.unsupported_shape(members, ranks=2, split="in") == (
        "in_features 24 is not a multiple of group size 16 on each of 2 ranks"
    )
    assert scheme.unsupported_shape(members, ranks=5, split="out") == (
        "out_features 64 is not a multiple of 5 ranks"
    )


def test_merged_layers_heads_and_experts_have_rules_of_their_own() -> None:
    scheme = get_scheme("FP8_BLOCK")
    assert scheme.unsupported_shape(layers(128, 100, columns=100)) is None
    experts = layers(128, 100, columns=128, names="model.layers.0.mlp.experts.3.{}")
    assert scheme.unsupported_shape(experts) == "out_features 100 is not a multiple of the block's 128"
    head = layers(1000, columns=128, names="lm_head")
    assert get_scheme("FP8_BLOCK").unsupported_shape(head) == (
        "an output head, whose scales vLLM does not load in blocks"
    )
    assert get_scheme("W4A16_ASYM").unsupported_shape(head) is None
    odd = layers(1001, columns=128, names="lm_head")
    assert get_scheme("W4A16_ASYM").unsupported_shape(odd) == (
        "out_features 1001: zero points of 4 bits do not fill whole words"
    )
    assert get_scheme("W4A16").unsupported_shape(odd) is None
    experts = layers(384, 384, columns=512, names="model.layers.0.mlp.experts.3.{}")
    assert get_scheme("W4AFP8").unsupported_shape(layers(384, 384, columns=512)) is None
    assert get_scheme("W4AFP8").unsupported_shape(experts) == "out_features 384 is not a multiple of 256"
    assert get_scheme("W4A8").unsupported_shape(experts) == (
        "routed experts, which vLLM runs in this scheme on no GPU"
    )
    assert get_scheme("W4A16").unsupported_shape(experts) is None
