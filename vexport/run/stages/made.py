"""Describe the checkpoint that a scenario made, for the report."""

import re
from collections import Counter
from pathlib import Path

from vexport.checkpoint.hub import pinned_name
from vexport.checkpoint.index import SourceIndex
from vexport.files import from_json
from vexport.names import HubName, SourceRef
from vexport.records import KindSize, LayerErrors
from vexport.records.calibration import expert_coverage
from vexport.reports.run_record import CalibrationSummary, MadeCheckpoint, Source
from vexport.run.directory import LAYERS, portable, rounding_of
from vexport.run.source_card import inherited_card
from vexport.run.stages import making
from vexport.run.stages.making import Maker

# The hub's cache: models--ORG--NAME/snapshots/REVISION (huggingface_hub.constants,
# REPO_ID_SEPARATOR).
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
# Folder names that only state a role. For these the parent folder's name is used instead.
_ROLES = {"model", "checkpoint", "source", "snapshot", "hf", "weights", "final", "main", "output"}


def made_checkpoint(maker: Maker) -> MadeCheckpoint:
    return MadeCheckpoint(
        source=_source(maker),
        plan=maker.result(making.make_plan),
        sizes=size_by_kind(maker.index, maker.result(making.quantize)),
        layers=from_json(LayerErrors, maker.folder / LAYERS).layers,
        check=making.checked(maker),
        dry_load=maker.get(making.dry_load),
        calibration=_calibration_of(maker),
        rounding=rounding_of(maker.folder),
        sensitivity=maker.get(making.measure_sensitivity),
        mixed=maker.get(making.choose_auto_schemes),
    )


def _source(maker: Maker) -> Source:
    root, name = maker.index.root, maker.scenario.source
    _, _, revision = (pinned_name(root) or "").partition("@")
    return Source(
        name=portable(str(name)),
        id=source_name(name, root),
        revision=revision,
        card=inherited_card(root),
    )


def _calibration_of(maker: Maker) -> CalibrationSummary | None:
    calibration, rounding = maker.get(making.calibrate), rounding_of(maker.folder)
    if calibration is None:
        return None
    if rounding is not None:
        calibration = rounding.completed(calibration)
    return CalibrationSummary(
        rows=len(calibration.rows),
        data=portable(calibration.data),
        digest=calibration.digest,
        experts=expert_coverage(calibration),
    )


def source_name(source: SourceRef, root: Path) -> str:
    """Return a model's id on the hub if it is known, otherwise the name of its folder.

    `source` is the scenario's name for the model. `root` is the model's folder on this machine.
    """
    for path in (str(source), root.as_posix()):
        if cached := _CACHED.search(path):
            return f"{cached[1]}/{cached[2]}"
    if isinstance(source, HubName):
        return source.id
    parts = [part for part in root.resolve().parts if part != root.anchor]
    named = [part for part in parts if part.lower() not in _ROLES]
    return (named or parts or [str(source)])[-1]


def size_by_kind(source: SourceIndex, written: SourceIndex) -> tuple[KindSize, ...]:
    """Return the bytes of each kind of tensor in the source and in the output.

    The kinds that are largest in the source come first. Every tensor belongs to a kind, so no bytes
    of the source or the output are missing.
    """
    before, after = Counter[str](), Counter[str]()
    for index, sizes_by_kind in ((source, before), (written, after)):
        for name, tensor in index.tensors.items():
            sizes_by_kind[tensor_kind(name)] += tensor.num_bytes
    kinds = sorted(before | after, key=lambda kind: (-before[kind], kind))
    return tuple(
        KindSize(kind=kind, source_bytes=before[kind], output_bytes=after[kind]) for kind in kinds
    )


def tensor_kind(name: str) -> str:
    """Return the part of a block to which a tensor belongs (`self_attn`, `mlp`), or `norm`.

    Outside the blocks it is the name of the tensor's module.
    `model.layers.3.mlp.down_proj.weight_scale` is `mlp`, `model.embed_tokens.weight` is
    `embed_tokens`.
    """
    *modules, last = name.split(".")
    numbers = [index for index, part in enumerate(modules) if part.isdecimal()]
    inner = modules[numbers[0] + 1 :] if numbers else modules[-1:]
    kind = inner[0] if inner else last
    return "norm" if "norm" in kind else kind
