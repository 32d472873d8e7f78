"""Streams a checkpoint from safetensors to safetensors, one fusion group in memory at a time."""

import base64
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor, tensor_bytes
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES, split_shards, write_shards
from vexport.compress import COMPRESSORS
from vexport.errors import InputError
from vexport.files import write_text
from vexport.observers import IMatrixMSEObserver, Importance, Observer, load_observer
from vexport.observers.importance import IMPORTANCE_OBSERVER
from vexport.observers.qparams import global_scale_of, scale_and_zero_point
from vexport.plan import blocks, output_blocks
from vexport.schemes import get_scheme
from vexport.schemes.base import Scheme
from vexport.schemes.config import quantization_config
from vexport.types import Calibration, FusionGroup, InputRange, Json, LinearPlan, Plan

Progress = Callable[[int, int], None]


def quantize(
    index: SourceIndex,
    plan: Plan,
    calibration: Calibration | None,
    folder: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_bytes: Progress = lambda done, total: None,
) -> None:
    """Write the quantized checkpoint into the empty `folder`: weights, side files, config.json last.

    `on_bytes(done, total)` counts the bytes written. Raises InputError where a scheme needs a
    calibration and there is none, or where a weight is not finite.
    """
    if calibration is None and needs_calibration(plan):
        raise missing_calibration(plan)
    shards = split_shards(output_blocks(index, plan.groups), shard_bytes=shard_bytes)
    seen = calibration or Calibration(rows=(), digest="", tokens=0, ranges={})
    with Reader() as reader, each_warning_once():
        tensors = _counted(compressed_tensors(index, plan, seen, reader), plan.output_bytes, on_bytes)
        write_shards(folder, shards, tensors)
    for file in index.side_files:
        shutil.copyfile(file, folder / file.name)
    write_config(index, plan, folder)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Within the block a warning's text is shown once, not once a weight."""
    with warnings.catch_warnings():
        show, shown = warnings.showwarning, set[str]()

        def show_new(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if str(message) not in shown:
                shown.add(str(message))
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_new
        yield


def needs_calibration(plan: Plan) -> bool:
    """Whether a scheme of the plan has static input scales."""
    return any(get_scheme(name).args.calibrated for name in plan.schemes)


def uses_calibration(plan: Plan) -> bool:
    """Whether samples change the plan's output: static input scales, or weights searched by importance."""
    return needs_calibration(plan) or any(group.observer == IMPORTANCE_OBSERVER for group in plan.groups)


def missing_calibration(plan: Plan) -> InputError:
    """The error for a plan that needs a calibration and has none."""
    name = next(name for name in plan.schemes if get_scheme(name).args.calibrated)
    return InputError(
        f"scheme {name}",
        got="no calibration data",
        need="samples for its static input scales",
        fix="add --calibration FILE.jsonl (or `calibration:` to the scenario)",
    )


def compressed_tensors(
    index: SourceIndex, plan: Plan, calibration: Calibration, reader: Reader
) -> Iterator[tuple[str, memoryview]]:
    """The bytes of every tensor of the output, in the order of `output_blocks`."""
    for block in blocks(index, plan.groups):
        if isinstance(block, FusionGroup):
            for name, value in compress_group(block, index, calibration, reader):
                yield name, tensor_bytes(value)
            reader.release(index.tensors[member.weight] for member in block.members)
        else:
            yield block.name, reader.raw(block)
            reader.release([block])


def compress_group(
    group: FusionGroup, index: SourceIndex, calibration: Calibration, reader: Reader
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that replace a group's weights, in the order of its layout, sharing what must be shared."""
    scheme = get_scheme(group.scheme)
    weights = [read_tensor(reader, index.tensors[member.weight]) for member in group.members]
    observers = [
        observe_weight(member, weight, group.observer, scheme, calibration.importance.get(member.name))
        for member, weight in zip(group.members, weights, strict=True)
    ]
    Observer.fuse(observers)
    inputs = input_tensors(group, scheme, calibration.ranges)
    compress = COMPRESSORS[scheme.family.format]
    for member, weight, observer in zip(group.members, weights, observers, strict=True):
        stored = {**compress(weight, observer.get_qparams(), scheme.args), **inputs}
        for spec in scheme.layout(member, index.tensors[member.weight].dtype):
            yield spec.name, stored[spec.name.removeprefix(f"{member.name}.")]


def observe_weight(
    member: LinearPlan,
    weight: torch.Tensor,
    observer_name: str,
    scheme: Scheme,
    importance: str | None = None,
) -> Observer:
    """An observer that has seen a layer's weight; InputError where the weight is not finite.

    `importance` is what calibration gathered for this layer, where the observer asks for it.
    """
    observer = load_observer(observer_name, "weight", scheme.args.weights)
    if importance is not None and isinstance(observer, IMatrixMSEObserver):
        means = torch.frombuffer(bytearray(base64.b64decode(importance)), dtype=torch.float32)
        observer.gathered = Importance(means, tokens=1)
    observer.forward(weight)
    low, high = observer.range()
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise InputError(
            member.weight,
            got="NaN or infinite values",
            need="finite weights",
            fix="restore the source checkpoint",
        )
    return observer


def input_tensors(
    group: FusionGroup, scheme: Scheme, ranges: Mapping[str, InputRange]
) -> dict[str, torch.Tensor]:
    """The static input scales of a group by their name within a layer: one value for all members."""
    inputs = scheme.args.input_activations
    if inputs is None or inputs.dynamic is True:
        return {}
    low = torch.tensor([min(ranges[member.name].low for member in group.members)])
    high = torch.tensor([max(ranges[member.name].high for member in group.members)])
    if inputs.strategy == "tensor_group":
        return {"input_global_scale": global_scale_of(low, high)}
    return {"input_scale": scale_and_zero_point(low, high, inputs, None)[0]}


def write_config(index: SourceIndex, plan: Plan, folder: Path) -> None:
    """Write config.json: the source's, with the quantization that vLLM has to know."""
    config: dict[str, Json] = dict(index.config)
    if plan.groups:
        config["quantization_config"] = quantization_config(plan)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _counted(
    tensors: Iterator[tuple[str, memoryview]], total: int, on_bytes: Progress
) -> Iterator[tuple[str, memoryview]]:
    done = 0
    for name, data in tensors:
        yield name, data
        done += len(data)
        on_bytes(done, total)
