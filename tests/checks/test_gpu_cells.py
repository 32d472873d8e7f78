"""Static rules refuse a scheme on exactly the GPUs on which vLLM's own loaders refuse it.

`generated/gpu_cells.json` has the results of the loaders in each version's CUDA wheel, by
checkpoint, status and compute capability. scripts/gpu_cells.py records it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.checks.quant_methods import CHECKPOINTS, write, write_experts, write_gpt_oss
from tests.models import Good, quantize, save_w4a8_in_bytes
from tests.mutations.edits import GROUP, all_of, config, drop_if, spoiled
from vexport.architectures.faults import RunningLayer
from vexport.architectures.gpu_cells import recorded_schemes
from vexport.architectures.versions import facts_of, known_versions
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks import devices
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.formats.arguments import SchemeArgs
from vexport.formats.gpus import GENERATIONS
from vexport.formats.running import on_gpu
from vexport.formats.schemes import Scheme, all_schemes, get_scheme, is_scheme, parse_canonical_name
from vexport.version import PINNED, Version, short_version


def statuses(version: Version) -> dict[str, dict[str, list[int]]]:
    """Return the capabilities of each status, by checkpoint."""
    found: dict[str, dict[str, list[int]]] = {}
    for scheme in recorded_schemes(version):
        for sm, cell in scheme.cells.items():
            found.setdefault(scheme.name, {}).setdefault(cell.status, []).append(sm)
    return found


CELLS = {short_version(version): statuses(version) for version in known_versions()}
LAYER = RunningLayer(name="o_proj", group="linear", kernel="")
NAMES = tuple(dict.fromkeys(name for cells in CELLS.values() for name in cells))


@pytest.fixture(scope="module")
def checkpoints(
    good: Good, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, partial[Path]]:
    """Return functions that write a checkpoint of each name in the table."""
    folder = tmp_path_factory.mktemp("cells")
    wide = save_family("qwen3-moe", folder / "wide", moe_intermediate_size=256)
    experts = save_family("qwen3-moe", folder / "experts source")
    ids = folder / "ids.jsonl"
    ids.write_text(8 * f"{json.dumps({'input_ids': [*range(4, 68)]})}\n")
    made = {name: partial(good, name) for name in NAMES if is_scheme(name)}
    made |= {name: partial(write, name, llama, folder / name) for name in CHECKPOINTS}
    for name in NAMES:
        kind, _, of_experts = name.rpartition(" experts")
        if name == "mxfp4 experts":
            made[name] = partial(
                write_gpt_oss, save_family("gpt-oss", folder / "gpt-oss"), folder / name
            )
        elif not of_experts and kind in CHECKPOINTS:
            made[name] = partial(write_experts, kind, experts, folder / name)
        elif not of_experts and kind:
            made[name] = partial(quantize, wide, folder / name, kind)
    alone, groups = (
        config((*GROUP,), input_activations=None),
        config((*GROUP, "weights"), group_size=64),
    )
    for name, other in (("FP8_CHANNEL", "FP8_DYNAMIC"), ("FP8_BLOCK128X128", "FP8_BLOCK")):
        made[f"{name}.A16"] = partial(spoiled, good(other), folder / f"{name}.A16", alone)
    without_scales = all_of(alone, drop_if(lambda name: name.endswith(".input_scale")))
    made["FP8_TENSOR.A16"] = partial(
        spoiled, good("FP8"), folder / "FP8_TENSOR.A16", without_scales
    )
    ungated = save_family("nemotron-h", folder / "nemotron-h")
    text = ("--calibration", ids, "--samples", 8, "--seq-len", 64)
    for kind, name, source in (
        ("FP8", "FP8 experts", wide),
        ("NVFP4", "NVFP4 experts", wide),
        ("NVFP4", "NVFP4 ungated experts", ungated),
    ):
        made[name] = partial(quantize, source, folder / name, kind, *text)
    made["W4AFP8 in groups of 64"] = partial(spoiled, good("W4AFP8"), folder / "groups", groups)
    made["W4A8 in bytes"] = partial(save_w4a8_in_bytes, llama, folder / "in bytes")
    return made


@pytest.mark.parametrize("name", NAMES)
def test_refusals_match_loaders(checkpoints: Mapping[str, partial[Path]], name: str) -> None:
    checkpoint = checkpoints[name]()
    with Reader() as reader:
        for version, cells in CELLS.items():
            major, minor = map(int, version.split("."))
            recorded = cells[name]
            tried = sorted(sm for capabilities in recorded.values() for sm in capabilities)
            target = Target(sm=tuple(tried), vllm=(major, minor))
            view = CheckpointView(read_index(checkpoint), reader, target)
            claims = [each for each in devices.run(view) if each.claim == "refused"]
            errors = {sm for each in claims if each.severity == "error" for sm in each.sm}
            assert errors <= {*recorded.get("refused", ())}, version
            assert {*recorded.get("refused", ())} <= {sm for each in claims for sm in each.sm}, (
                version
            )


def test_every_scheme_and_version_is_recorded() -> None:
    assert [*CELLS] == [short_version(version) for version in known_versions()]
    capabilities = {sm for sm in GENERATIONS if 75 <= sm <= 121}
    for cells in CELLS.values():
        assert {each.name for each in all_schemes()} <= cells.keys()
        for recorded in cells.values():
            assert {sm for group in recorded.values() for sm in group} == capabilities


@pytest.mark.parametrize("version", known_versions())
def test_older_gpus_fall_back(version: Version) -> None:
    """The record has the classes that vLLM selects, which are not always the usual class."""
    facts = facts_of(version)
    assert facts.selected_class("CompressedTensorsW8A8Fp8", 89) == "CompressedTensorsW8A8Fp8"
    assert facts.selected_class("CompressedTensorsW8A8Fp8", 86) == "CompressedTensorsW8A16Fp8"
    assert facts.selected_class("CompressedTensorsW8A8Fp8", 72) == ""
    assert facts.selected_class("a class of another method", 90) is None


@pytest.mark.parametrize("scheme", all_schemes(), ids=lambda scheme: scheme.name)
def test_plan_agrees_with_record(scheme: Scheme) -> None:
    """`plan` and `list schemes` show the GPUs of the pinned version, from the storage format."""
    support = scheme.format.gpu_support(scheme.args)
    for sm in GENERATIONS:
        selected = facts_of(PINNED).selected_class(scheme.format.vllm_scheme(scheme.args), sm)
        assert support.refuses(sm) is (not selected or support.lacks_kernel(sm))


def kernel_on(args: SchemeArgs, sm: int, version: Version, layer: RunningLayer = LAYER) -> str:
    found = on_gpu(layer, version, args, sm)
    return found.kernel if found is not None else ""


@pytest.mark.parametrize("version", known_versions())
@pytest.mark.parametrize("scheme", all_schemes(), ids=lambda scheme: scheme.name)
def test_kernels_are_recorded(scheme: Scheme, version: Version) -> None:
    recorded = next(each for each in recorded_schemes(version) if each.name == scheme.name)
    if not recorded.args:
        pytest.skip("only the statuses are recorded")
    for sm, cell in recorded.cells.items():
        assert bool(cell.kernel) is (cell.status != "refused")
        assert kernel_on(scheme.args, sm, version) == cell.kernel


@pytest.mark.parametrize("version", known_versions())
def test_kernels_of_schemes_without_record(version: Version) -> None:
    """Recorded schemes of the same kind decide, if they have the same kernel."""
    for name in ("W4A16_G48", "W3A16_G64", "W3A16_CHANNEL"):
        assert kernel_on(get_scheme(name).args, 90, version) == "HummingLinearKernel"
    unlike = parse_canonical_name("FP8_CHANNEL.FP8_TENSOR")
    assert unlike is not None
    assert kernel_on(unlike, 100, version) == ""  # FP8 and FP8_DYNAMIC have other kernels
    assert kernel_on(get_scheme("W4A16").args, 70, version) == ""


@pytest.mark.parametrize("version", known_versions())
def test_kernels_of_experts(version: Version) -> None:
    args = get_scheme("NVFP4").args
    experts = RunningLayer(name="experts", group="experts", kernel="")
    ungated = replace(experts, gated=False)
    assert kernel_on(args, 100, version, experts).startswith("TrtLlmNvFp4Experts")
    assert kernel_on(args, 100, version, ungated) == "TrtLlmNvFp4ExpertsMonolithic"
