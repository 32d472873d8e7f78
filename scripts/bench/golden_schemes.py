"""Writes golden values of compressed-tensors' own packing for the tests of schemes.

Run in the peer's environment, whose compressed-tensors packs all widths as vLLM reads them:
`.venv-peer/bin/python scripts/bench/golden_schemes.py` (scripts/bench/setup-peer). Writes
tests/formats/golden/values.safetensors: a float32 weight, and by scheme the qparams that were given
(`SCHEME/qparams/...`) and what was stored (`SCHEME/stored/...`). Writes errors.json beside it: what
llm-compressor loses of the same weights in bf16, squared and relative, by scheme and observer.
"""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[2] / "tests" / "schemes" / "golden"
OBSERVERS = ("memoryless_minmax", "memoryless_mse")
# vLLM reads these packed, whatever compressed-tensors infers.
PACKED = ("W4A8", "W4AFP8")
# No multiple of a block in either direction, whole groups of 128.
ROWS, COLUMNS = 40, 256
RAGGED = (150, 200)


def weight(rows: int, columns: int) -> torch.Tensor:
    """Random values with one outlier in fifty and a row of zeros, in bf16 but stored as float32."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator) * 0.02
    values = torch.where(torch.rand(rows, columns, generator=generator) > 0.98, values * 8, values)
    values[3] = 0
    return values.to(torch.bfloat16).to(torch.float32)


def groups_of(values: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """The elements that share a scale in the last dimension."""
    args = scheme.weights
    if args.strategy == "tensor":
        return values.reshape(1, -1)
    if args.strategy == "channel":
        return values.unsqueeze(1)
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % wide, 0, -values.shape[0] % high))
        rows, columns = padded.shape[0] // high, padded.shape[1] // wide
        return padded.reshape(rows, high, columns, wide).transpose(1, 2).flatten(2)
    return values.reshape(values.shape[0], -1, args.group_size)


def golden(name: str) -> dict[str, torch.Tensor]:
    """Given qparams and stored tensors of one scheme."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    values = weight(*RAGGED) if scheme.weights.strategy == "block" else weight(ROWS, COLUMNS)
    grouped = groups_of(values, scheme)
    given: dict[str, torch.Tensor] = {}
    if scheme.weights.strategy == "tensor_group":
        given["global_scale"] = generate_gparam(values.amin(), values.amax())
    scale, zero_point = calculate_qparams(
        grouped.amin(-1), grouped.amax(-1), scheme.weights, global_scale=given.get("global_scale")
    )
    # Stored in the model's dtype where groups of integers are: both sides must round with the same number.
    given["scale"] = scale.to(torch.bfloat16).to(torch.float32)
    if not scheme.weights.symmetric:
        given["zero_point"] = zero_point.to(torch.int8)
    format_ = "pack-quantized" if name in PACKED else infer_module_format(torch.nn.Linear, scheme).value
    state = {f"weight_{key}": value for key, value in given.items()}
    stored = BaseCompressor.get_value_from_registry(format_).compress({"weight": values, **state}, scheme)
    return {
        **{f"{name}/qparams/{key}": value.contiguous() for key, value in given.items()},
        **{f"{name}/stored/{key}": value.clone().contiguous() for key, value in stored.items()},
    }


def peer_error(name: str, observer: str) -> float:
    """Sum of squares of what comes back minus the weight, relative to the weight's."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.weights.observer = observer
    values = (weight(*RAGGED) if scheme.weights.strategy == "block" else weight(ROWS, COLUMNS)).bfloat16()
    converter = ModelFreePtqConverter(QuantizationConfig(config_groups={"group": scheme}))
    stored = converter.process({"layer.weight": values.clone()})
    state = {key.removeprefix("layer."): value for key, value in stored.items()}
    format_ = infer_module_format(torch.nn.Linear, scheme)
    if scheme.weights.strategy == "block":
        back = dequantize(state["weight"], state["weight_scale"], args=scheme.weights)
    else:
        back = BaseCompressor.get_value_from_registry(format_.value).decompress(state, scheme)["weight"]
    exact = values.double()
    return float((back.double() - exact).square().sum() / exact.square().sum())


def main() -> None:
    """Write the values of every preset that vexport knows."""
    names = [name for name in PRESET_SCHEMES if name.endswith("A16") or not name.startswith("W")]
    names = [*(name for name in names if name != "UNQUANTIZED"), "W8A8", "W4A16_ASYM", *PACKED]
    tensors = {"weight": weight(ROWS, COLUMNS), "ragged": weight(*RAGGED)}
    for name in names:
        tensors |= golden(name)
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FOLDER / "values.safetensors")
    errors = {name: {observer: peer_error(name, observer) for observer in OBSERVERS} for name in names}
    (FOLDER / "errors.json").write_text(json.dumps(errors, indent=1) + "\n")
    print(f"{FOLDER}: {len(tensors)} tensors, errors of {len(errors)} schemes")


if __name__ == "__main__":
    main()
