"""Plans and samples for calibration tests."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.calibration.models import VOCABULARY
from vexport.calibration import Samples, calibrate
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.records import CalibrationRecord, FusionGroup, KvCache, LinearPlan, Plan


def samples(lengths: Sequence[int] = (12, 20, 12, 7, 20, 12), seed: int = 3) -> Samples:
    """Random token ids; the rows are numbered from 1, every second line being blank."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    rows = tuple(1 + 2 * number for number in range(len(lengths)))
    return Samples(token_ids=tuple(tuple(row) for row in ids), rows=rows)


def batches_of(chosen: Samples) -> list[torch.Tensor]:
    return [torch.tensor([ids]) for ids in chosen.token_ids]


def calibrated(planned: tuple[SourceIndex, Plan], chosen: Samples) -> CalibrationRecord:
    index, plan = planned
    return calibrate(LayerWalk(index), plan, chosen)


def plan_for(
    folder: Path,
    *,
    scheme: str = "FP8",
    observer: str = "memoryless_minmax",
    head: bool = False,
    kv_cache: KvCache | None = None,
) -> tuple[SourceIndex, Plan]:
    """A plan that quantizes every linear layer alone, whatever the architecture fuses."""
    index = read_index(folder)
    groups = []
    for tensor in index.tensors.values():
        name = tensor.name.removesuffix(".weight")
        embedding = any(part in name for part in ("embed_tokens", "embed_positions", "wte", "wpe", "embed"))
        if (
            tensor.name == name
            or len(tensor.shape) != 2
            or "norm" in name
            or (embedding and "embed_out" not in name)
        ):
            continue
        if name in ("lm_head", "embed_out") and not head:
            continue
        rows, columns = tensor.shape
        linear = LinearPlan(name=name, weight=tensor.name, out_features=rows, in_features=columns)
        groups.append(FusionGroup(name=name, scheme=scheme, observer=observer, members=(linear,)))
    plan = Plan(
        source=str(folder),
        architecture="LlamaForCausalLM",
        groups=tuple(groups),
        kept=(),
        kept_linears=(),
        source_bytes=0,
        output_bytes=0,
        parameters=0,
        kv_cache=kv_cache,
    )
    return index, plan
