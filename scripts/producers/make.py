"""Makes the checkpoints in tests/producers: micro models as other producers quantize and write them.

    .venv/bin/python scripts/producers/make.py [PRODUCER...]

Needs llm-compressor in .venv-peer (scripts/bench/setup-peer) and the others in .venv-PRODUCER
(scripts/producers/setup). Their sources are those in tests/peer. Checkpoints in compressed-tensors go to
`checkpoints`, those in producers' own formats to `methods`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
SOURCES = ROOT / "tests" / "peer"
OUT = ROOT / "tests" / "producers" / "checkpoints"
OF_METHODS = OUT.with_name("methods")
TOKENIZER = ROOT / "scenarios" / "demo" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
KEPT = ("config.json", "*.safetensors")
# Producer's interpreter, its script, and (source, what to do with it) for each checkpoint.
JOBS: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    (
        ".venv-autoround",
        "with_autoround.py",
        (
            ("llama", "W4A16"),
            ("llama", "INT8_W8A8"),
            ("llama", "FP8_STATIC-KV"),
            ("llama", "NVFP4"),
            ("moe", "W4A16"),
            ("llama", "W4A16-auto_round"),
            ("llama", "W4A16-auto_round:auto_awq"),
            ("llama", "W4A16-auto_gptq"),
            ("llama", "W4A16-auto_awq"),
            ("llama", "MXFP4-auto_round"),
            ("moe", "W4A16-auto_round"),
        ),
    ),
    (
        ".venv-modelopt",
        "with_modelopt.py",
        (("llama", "FP8-KV"), ("llama", "NVFP4-KV"), ("llama", "MXFP8"), ("llama", "MIXED")),
    ),
    (".venv-gptqmodel", "with_gptqmodel.py", (("llama", "W4"), ("llama", "W3"))),
    (".venv-autoawq", "with_autoawq.py", (("llama", "GEMM"),)),
    (
        ".venv-quark",
        "with_quark.py",
        (
            ("llama", "fp8-KV"),
            ("llama", "ptpc_fp8"),
            ("llama", "int8"),
            ("llama", "int4_wo_32"),
            ("llama", "uint4_wo_32"),
            ("llama", "mxfp4"),
        ),
    ),
    (
        ".venv-peer",
        "with_llmcompressor.py",
        (("llama", "GPTQ-ASYM"), ("llama", "QUIP"), ("llama", "ATTENTION"), ("llama", "KV")),
    ),
)


def main() -> None:
    """Let each producer, or those that are named, quantize its sources; keep what checkpoints are made of."""
    for environment, script, jobs in JOBS:
        producer = script.removeprefix("with_").removesuffix(".py")
        if sys.argv[1:] and producer not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for source in {source for source, _ in jobs}:
                with_tokenizer(source, Path(folder))
            names = [[source, recipe, f"{producer}-{source}-{recipe}"] for source, recipe in jobs]
            python = ROOT / environment / "bin" / "python"
            subprocess.run([python, HERE / script, json.dumps(names)], check=True, cwd=folder)
            for _, _, name in names:
                keep(Path(folder) / name, name.replace(":", "-"))


def with_tokenizer(source: str, folder: Path) -> None:
    """A copy of a source with a tokenizer, which producers ask for even where they get token ids."""
    shutil.copytree(SOURCES / source, folder / source)
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / source / name)


def keep(made: Path, name: str) -> None:
    """The config and weights of a checkpoint, which AutoRound puts into a folder of its own naming."""
    made = next(file.parent for file in sorted(made.rglob("config.json")))
    method = json.loads((made / "config.json").read_text())["quantization_config"]["quant_method"]
    out = (OUT if method == "compressed-tensors" else OF_METHODS) / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in (file for pattern in KEPT for file in made.glob(pattern)):
        if file.name != "quantization_config.json":
            shutil.copy(file, out / file.name)


if __name__ == "__main__":
    main()
