"""What each scheme loses of the weights, against llm-compressor on the same weights.

    .venv/bin/python scripts/bench/weight_error.py [--schemes W4A16 ...] [--observers memoryless_minmax ...]

Quantizes the demo model and a model of random heavy-tailed weights by both, dequantizes what each wrote with
compressed-tensors' own code and prints the sum of squares of what came back minus the source, relative to
the source's. The peer runs in .venv-peer (scripts/bench/setup-peer) by its `model_free_ptq`; where a scheme
has static input scales, which that cannot calibrate, the peer quantizes the weights alone. The exit code is
1 where vexport's error is above the peer's by more than chance.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.formats import nearest_format
from vexport.formats.dequantize import arguments_of
from vexport.formats.schemes import scheme_names
from vexport.plan.source import plan_source, rules_for
from vexport.quantize.stream import quantize
from vexport.quantize.weight_scales import search_scales
from vexport.types import Calibration, InputRange, Json, Plan

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
DEMO = ROOT / "scenarios" / "demo" / "model"
OBSERVERS = ("memoryless_minmax", "memoryless_mse")
# The peer rounds ranges and scales to bf16 on the way: which of two neighbouring scales a group gets differs
# then, to the better or worse of either. All groups of a model together come out this even.
CHANCE = 3e-3
HIDDEN, INTERMEDIATE, LAYERS = 256, 512, 2
PEER_CODE = """
import json, sys
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from llmcompressor import model_free_ptq

IGNORE = ["lm_head", "re:.*embed.*", "re:.*norm.*"]
for job in json.loads(sys.argv[1]):
    scheme = preset_name_to_scheme(job["scheme"], ["Linear"])
    scheme.weights.observer = job["observer"]
    if scheme.input_activations and scheme.input_activations.dynamic is not True:
        scheme.input_activations = None
    model_free_ptq(job["source"], job["out"], scheme=scheme, ignore=IGNORE)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One scheme with one observer on one source."""

    source: Path
    scheme: str
    observer: str
    out: Path

    @property
    def peer_out(self) -> Path:
        return self.out.with_name(f"{self.out.name}-peer")


def heavy_tailed_model(folder: Path) -> Path:
    """A Llama checkpoint of random weights with one outlier in a hundred, bf16."""
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * 0.02
        outlier = torch.rand(rows, columns, generator=generator) > 0.99
        return torch.where(outlier, values * 8, values).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(64, HIDDEN), "lm_head.weight": weight(64, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = weight(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = weight(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = weight(HIDDEN, INTERMEDIATE)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_ours(job: Job) -> Plan:
    """Quantize by vexport; static input scales get a range that does not matter here."""
    index, plan = plan_source(str(job.source), rules_for(job.scheme, observer=job.observer, ignore=()))
    names = [member.name for group in plan.groups for member in group.members]
    ranges = {name: InputRange(low=-1.0, high=1.0, tokens=1) for name in names}
    job.out.mkdir()
    seen = Calibration(rows=(), digest="", tokens=1, ranges=ranges)
    quantize(index, plan, seen, job.out, search=search_scales)
    return plan


def run_peer(jobs: Sequence[Job]) -> None:
    """Quantize all by llm-compressor in one process."""
    described = [
        {
            "source": str(job.source),
            "scheme": job.scheme,
            "observer": job.observer,
            "out": str(job.peer_out),
        }
        for job in jobs
    ]
    command = [str(PEER), "-c", PEER_CODE, json.dumps(described)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{PEER}: got exit code {done.returncode}, need 0\n{done.stderr[-2000:]}")


def relative_error(source: SourceIndex, folder: Path, plan: Plan) -> float:
    """Sum of squares of dequantized minus source over all layers, relative to the source's."""
    written = read_index(folder)
    scheme, format_ = config_group(written.config)
    args = arguments_of(scheme)
    storage = nearest_format(args, format_)
    noise = signal = 0.0
    with Reader() as old, Reader() as new:
        for group in plan.groups:
            for member in group.members:
                exact = read_tensor(old, source.tensors[member.weight]).to(torch.float64)
                back = storage.dequantize(args, stored_tensors(written, member.name, new))
                noise += float((back.to(torch.float64) - exact).square().sum())
                signal += float(exact.square().sum())
    return noise / signal


def stored_tensors(index: SourceIndex, module: str, reader: Reader) -> dict[str, torch.Tensor]:
    """The tensors of a module by their name within it."""
    prefix = f"{module}."
    return {
        name.removeprefix(prefix): read_tensor(reader, tensor)
        for name, tensor in index.tensors.items()
        if name.startswith(prefix) and name != f"{prefix}bias"
    }


def config_group(config: Mapping[str, Json]) -> tuple[QuantizationScheme, str]:
    """The only config group of a checkpoint as compressed-tensors reads it, and its format."""
    quantization = config["quantization_config"]
    assert isinstance(quantization, dict)
    groups = quantization["config_groups"]
    assert isinstance(groups, dict)
    (group,) = groups.values()
    assert isinstance(group, dict)
    scheme = QuantizationScheme.model_validate(group)
    return scheme, str(group["format"] or quantization["format"])


def measure(jobs: Sequence[Job]) -> Iterator[tuple[Job, float, float]]:
    """(job, vexport's error, the peer's error)."""
    plans = [run_ours(job) for job in jobs]
    run_peer(jobs)
    for job, plan in zip(jobs, plans, strict=True):
        source = read_index(job.source)
        yield job, relative_error(source, job.out, plan), relative_error(source, job.peer_out, plan)


def main() -> int:
    """Print the table; 1 where vexport loses more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=scheme_names(), choices=scheme_names())
    parser.add_argument("--observers", nargs="+", default=list(OBSERVERS))
    chosen = parser.parse_args()
    worse = 0
    with tempfile.TemporaryDirectory() as scratch:
        sources = (DEMO, heavy_tailed_model(Path(scratch) / "heavy-tailed"))
        jobs = [
            Job(
                source=source,
                scheme=scheme,
                observer=observer,
                out=Path(scratch) / f"{number}-{scheme}-{observer}",
            )
            for number, source in enumerate(sources)
            for scheme in chosen.schemes
            for observer in chosen.observers
        ]
        print(f"{'source':14}{'scheme':13}{'observer':20}{'vexport':>13}{'llm-compressor':>16}{'ratio':>10}")
        for job, ours, peer in measure(jobs):
            above = ours > peer * (1 + CHANCE)
            worse += above
            name = f"{job.source.name:14}{job.scheme:13}{job.observer:20}"
            print(f"{name}{ours:13.4e}{peer:16.4e}{ours / peer:10.6f}{'  above' * above}", flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
