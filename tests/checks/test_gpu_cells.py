"""Static rules refuse a scheme on exactly the GPUs on which vLLM's own loaders refuse it.

gpu_cells.json has the results of the loaders in each version's CUDA wheel, by checkpoint, status
and compute capability. scripts/gpu_cells.py records it.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.checks.quant_methods import CHECKPOINTS, write, write_experts, write_gpt_oss
from tests.models import Good, quantize, save_w4a8_in_bytes
from tests.mutations.edits import GROUP, config, spoiled
from vexport.architectures.versions import facts_of, known_versions
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks import devices
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.formats.gpus import GENERATIONS
from vexport.formats.schemes import Scheme, all_schemes
from vexport.version import PINNED, Version, short_version

CELLS: Mapping[str, Mapping[str, Mapping[str, list[int]]]] = json.loads(
    (Path(__file__).parent / "gpu_cells.json").read_text()
)
NAMES = tuple(dict.fromkeys(name for cells in CELLS.values() for name in cells))


@pytest.fixture(scope="module")
def checkpoints(
    good: Good, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, partial[Path]]:
    """Return functions that write a checkpoint of each name in the table."""
    folder = tmp_path_factory.mktemp("cells")
    wide = save_family("qwen3-moe", folder / "wide", moe_intermediate_size=256)
    experts = save_family("qwen3-moe", folder / "experts source")
    made = {each.name: partial(good, each.name) for each in all_schemes()}
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
    made["FP8A16"] = partial(spoiled, good("FP8_DYNAMIC"), folder / "FP8A16", alone)
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
