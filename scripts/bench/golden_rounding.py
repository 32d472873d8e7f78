"""Writes golden values of llm-compressor's GPTQ for the tests of rounding.

Run in the peer's environment: `.venv-peer/bin/python scripts/bench/golden_rounding.py`
(scripts/bench/setup-peer). Writes tests/rounding/golden/values.safetensors: a weight, the Hessian of
correlated inputs of which one column is dead, and by scheme the qparams that were given and the rounded
weight. With a large [0, 1] the Hessian is `indefinite`, and the peer falls back to nearest.
"""

from pathlib import Path

import torch
from compressed_tensors.quantization import ActivationOrdering, preset_name_to_scheme
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.observers import Observer
from safetensors.torch import save_file

FILE = Path(__file__).parents[2] / "tests" / "rounding" / "golden" / "values.safetensors"
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A8", "NVFP4A16", "MXFP4A16", "FP8_BLOCK")
ROWS, COLUMNS, TOKENS, DEAD, INDEFINITE = 144, 256, 2048, 17, 1e3


def weight(generator: torch.Generator) -> torch.Tensor:
    """Heavy-tailed values that bf16 holds, float32."""
    values = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    values = torch.where(torch.rand(ROWS, COLUMNS, generator=generator) > 0.98, values * 6, values)
    return values.to(torch.bfloat16).to(torch.float32)


def hessian(generator: torch.Generator) -> torch.Tensor:
    """2 / tokens * X^T X of inputs that hang on a few directions."""
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator) / 8
    inputs = torch.randn(TOKENS, 32, generator=generator) @ mixing[:32]
    inputs += torch.randn(TOKENS, COLUMNS, generator=generator) * 0.3
    inputs[:, DEAD] = 0
    return 2 / TOKENS * inputs.T @ inputs


def golden(name: str, values: torch.Tensor, moments: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the peer makes of the weight in one scheme."""
    args = preset_name_to_scheme(name, ["Linear"]).weights.model_copy(
        update={"actorder": ActivationOrdering.WEIGHT}
    )
    module = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    module.weight.data = values.clone()
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args, module=module)
    observer(module.weight)
    qparams = observer.get_qparams()
    given = {key: value for key, value in qparams.items() if value is not None}
    rounded, _, fallback = quantize_weight(
        values.clone()[None],
        moments.clone()[None],
        given["scale"].to(torch.float32)[None],
        given["zero_point"].to(torch.float32)[None],
        given["global_scale"][None] if "global_scale" in given else None,
        args,
    )
    told = {"rounded": rounded[0], "fallback": fallback, **given}
    return {f"{name}/{key}": value.to(torch.float32).contiguous() for key, value in told.items()}


def main() -> None:
    """Write the file."""
    generator = torch.Generator().manual_seed(0)
    values, moments = weight(generator), hessian(generator)
    indefinite = moments.clone()
    indefinite[0, 1] = indefinite[1, 0] = INDEFINITE
    found = {"weight": values, "hessian": moments}
    for name in SCHEMES:
        found |= golden(name, values, moments)
    fallen = golden("W4A16", values, indefinite)
    found |= {key.replace("W4A16", "indefinite"): value for key, value in fallen.items()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, FILE)


if __name__ == "__main__":
    main()
