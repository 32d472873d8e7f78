"""Writes golden values of the peer, llm-compressor, for the tests of observers.

Run in the peer's environment: `.venv-peer/bin/python scripts/bench/golden.py` (scripts/bench/setup-peer).
Writes cases.json and values.safetensors to tests/observers/golden: for every observer, kind of tensor,
strategy and dtype what was observed, in order, and what came out.
"""

import json
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.observers import Observer
from llmcompressor.observers.fusion import FusionHandler
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[2] / "tests" / "observers" / "golden"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
OBSERVERS = (
    "memoryless_minmax",
    "static_minmax",
    "minmax",
    "memoryless_mse",
    "mse",
    "imatrix_mse",
    "nvfp4_expanded_mse",
)
INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_STORED = {**NVFP4, "scale_dtype": "torch.float8_e4m3fn"}
WEIGHTS = (
    {**FP8, "strategy": "tensor"},
    {**INT8, "strategy": "channel"},
    {**INT4, "strategy": "group", "group_size": 32},
    {**INT4, "strategy": "group", "group_size": 32, "symmetric": False},
    {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    NVFP4_STORED,
    {**FP8, "strategy": "block", "block_structure": [16, 32]},
)
ACTIVATIONS = (
    {**FP8, "strategy": "tensor"},
    {**INT8, "strategy": "tensor", "symmetric": False},
    {**INT8, "strategy": "group", "group_size": 32, "dynamic": True},
    {**NVFP4_STORED, "dynamic": "local"},
    {**INT8, "strategy": "token", "dynamic": True},
)
STATES = ({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "attn_head"})
# (base name, arguments, shape of each observation)
KINDS = (
    *(("weight", args, (24, 128)) for args in WEIGHTS),
    *(("input", args, (2, 5, 64)) for args in ACTIVATIONS),
    *(("output", args, (2, 5, 64)) for args in ACTIVATIONS[:2]),
    *((name, args, (2, 4, 5, 16)) for name in ("q", "k", "v") for args in STATES),
)


def main() -> None:
    """Write every case."""
    generator = torch.Generator().manual_seed(20)
    tensors: dict[str, torch.Tensor] = {}
    cases: list[dict[str, object]] = []
    inputs = {
        (dtype, shape): [heavy_tailed(shape, generator).to(kind) for _ in range(3)]
        for dtype, kind in DTYPES.items()
        for shape in {shape for _, _, shape in KINDS}
    }
    for (dtype, shape), values in inputs.items():
        for number, value in enumerate(values):
            tensors[observed_name(dtype, shape, number)] = value
    activations = heavy_tailed((40, 128), generator)
    tensors["activations"] = activations
    for observer, (base_name, args, shape), dtype in product(OBSERVERS, KINDS, DTYPES):
        values = inputs[dtype, shape][: 1 if base_name == "weight" else 3]
        for results, case in run(observer, base_name, args, values, activations):
            case |= {"observed": [observed_name(dtype, shape, number) for number in range(len(values))]}
            name = str(len(cases))
            cases.append({"dtype": dtype, **case})
            tensors |= {f"{name}.{key}": value.clone() for key, value in results.items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FOLDER / "values.safetensors")
    lines = ",\n".join(json.dumps(case) for case in cases)
    (FOLDER / "cases.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def run(
    observer: str,
    base_name: str,
    args: dict[str, object],
    values: list[torch.Tensor],
    activations: torch.Tensor,
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, object]]]:
    """(results, case) of one observer: as it is and, for NVFP4 weights, fused with a larger layer."""
    case: dict[str, object] = {"observer": observer, "base_name": base_name, "args": args}
    if observer == "nvfp4_expanded_mse" and args["strategy"] != "tensor_group":
        return
    yield results_of(make(observer, base_name, args, activations), values), case
    if base_name == "weight" and args["strategy"] == "tensor_group":
        seen, other = (make(observer, base_name, args, activations) for _ in range(2))
        # The handlers refer weakly to the modules, so the modules stay in variables.
        modules = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        FusionHandler.fuse([(seen, modules[0]), (other, modules[1])])
        torch.nn.Module.__setattr__(
            modules[1], "weight", torch.nn.Parameter(values[0] * 3, requires_grad=False)
        )
        other.fusion_handler._group, group = [], other.fusion_handler._group
        other(values[0] * 3)
        other.fusion_handler._group = group
        yield results_of(seen, values), {**case, "fused_with_factor": 3}


def make(observer: str, base_name: str, args: dict[str, object], activations: torch.Tensor) -> Observer:
    """An observer of the peer; imatrix gathers from the activations first."""
    loaded = Observer.load_from_registry(observer, base_name=base_name, args=QuantizationArgs(**args))
    if observer == "imatrix_mse" and base_name == "weight":
        layer = torch.nn.Linear(activations.shape[-1], 1)
        loaded.attach(layer)
        layer(activations)
        loaded.detach(layer)
    return loaded


def results_of(observer: Observer, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ranges and parameters after observing the values."""
    for value in values:
        observer(value)
    ranges = {"low": observer.min_vals.clone(), "high": observer.max_vals.clone()}
    qparams = observer.get_qparams()
    return {**ranges, **{key: value for key, value in qparams.items() if value is not None}}


def heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal values with channels of different size and a few outliers."""
    values = torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator)
    return values * (1 + 6 * (torch.rand(shape, generator=generator) > 0.99))


def observed_name(dtype: str, shape: tuple[int, ...], number: int) -> str:
    """The name of an observed tensor in the file of values."""
    return f"observed.{dtype}.{'x'.join(map(str, shape))}.{number}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with torch.no_grad():
        main()
