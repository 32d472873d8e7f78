"""Define the stages. Each is a generator of rows."""

import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dry_cells import layer_cells
from measure import DEMO, random_llama, resident_mb
from rows import ModelSizes, Row, Sizes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from vexport.calibration import Samples, read_samples
from vexport.checkpoint.smoothed import SMOOTHING, smoothing_of
from vexport.engine.reference import load_dequantized
from vexport.formats.packing.base import Scales
from vexport.formats.schemes import all_schemes, get_scheme
from vexport.names import Folder
from vexport.numerics.metrics import divergence_of_logits
from vexport.plan.build import PlanSettings
from vexport.plan.source import scheme_rules
from vexport.quantize.gptq import (
    GPTQ,
    Factor,
    Grid,
    factorize,
    grid_of,
    has_triton,
    round_blocks,
    round_compiled,
    round_on_device,
    stack,
)
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.quantize.moments import Moments
from vexport.records.calibration import Rounding
from vexport.scenario import Calibration, Planning

PACKAGES = ("torch", "triton", "transformers", "compressed_tensors", "vllm", "llmcompressor")
# Bounds for the comparison of the device with the CPU: the share of equal codes from the same H,
# the ratio of KL, and the relative difference of static scales.
EQUAL_CODES, KL_SHARE, SCALE_SHARE = 0.999, 1.01, 0.01
# Engines on a card at a time, and the seconds that each may take. Each has a KV cache of a fixed
# size. Otherwise vLLM would measure the card's free memory, which other engines change meanwhile.
ENGINES, ENGINE_SECONDS = 10, 240
BESIDE = (
    "--engine-arg",
    "gpu_memory_utilization=0.1",
    "--engine-arg",
    f"kv_cache_memory_bytes={2**30}",
)
# Schemes that are also evaluated, and loaded in compiled mode.
EVALUATED = ("NVFP4", "W4A16")


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call until the device has finished it.

    A first call for warm-up does not count.
    """
    for _ in range(2):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def device(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Yield the card, the driver and the versions."""
    card = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else "the CPU (a rehearsal)"
    )
    yield Row("card", note=card)
    installed = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        names = installed.get(package, ())
        yield Row(package, note=importlib.metadata.version(names[0]) if names else "not there")
    if device.startswith("cuda"):
        asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        yield Row("driver, memory", note=subprocess.check_output(asked, text=True).strip())
        major, minor = torch.cuda.get_device_capability(device)
        yield Row("compute capability", 10 * major + minor)


def kernels(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Compare sums of inputs (H) and codes of a weight between the device and the CPU.

    Sums are of the same inputs, and codes are computed with the same H.
    """
    side, generator = sizes.matrix, torch.Generator().manual_seed(0)
    spread = torch.randn(side, side, generator=generator) / math.sqrt(side)
    inputs = (torch.randn(4 * side, side, generator=generator) @ spread).to(torch.bfloat16)
    sums = [Moments.zeros(side, drift=True, device=where) for where in ("cpu", device)]
    for where, moments in zip(("cpu", device), sums, strict=True):
        own = inputs.to(where)
        taken = seconds_of(partial(moments.add, own, own * 1.01), where)
        yield Row(f"H and drift on {where}", 1e3 * taken, "ms")
    for name, most in (("hessian", 1e-5), ("drift", 5e-3)):
        exact, found = (getattr(moments.complete(), name).cpu() for moments in sums)
        yield Row(
            f"{name}, relative difference", float((found - exact).norm() / exact.norm()), most=most
        )
    weight = torch.randn(side, side, generator=generator) * 0.02
    kernels = (("cpu", "cpu", round_compiled), (device, device, round_blocks))
    for name in LARGEST:
        yield from _rounded(name, weight, sums[0].hessian, kernels)


# The largest code of a scheme, which scales are computed with.
LARGEST = {"W4A16": 7.5, "W8A8": 127.5, "NVFP4A16": 6.0, "FP8_BLOCK": 448.0}
# Rounds ordered columns in place.
Kernel = Callable[[torch.Tensor, Factor, Grid], None]


def _rounded(
    name: str,
    weight: torch.Tensor,
    hessian: torch.Tensor,
    kernels: Sequence[tuple[str, str, Kernel]],
) -> Iterator[Row]:
    """Yield the time of two kernels, and the share of equal codes.

    `kernels` has their names, devices and functions.
    """
    args, columns = get_scheme(name).args.weights, weight.shape[1]
    high, width = args.block or (1, args.group or columns)
    blocks = weight.reshape(-1, high, columns // width, width)
    scale = blocks.abs().amax((1, 3)) / LARGEST[name]
    scales = Scales(scale=scale.numpy(), zero_point=0 * scale.numpy(), global_scale=None)
    shape = (len(weight), columns)
    own, codes = grid_of(args, scales, shape, torch.float32), list[torch.Tensor]()
    for title, where, kernel in kernels:
        grid, factor = stack([own], torch.device(where)), factorize(hessian.to(where), GPTQ.ridge)
        assert factor is not None
        values = weight.to(where)[:, factor.order].contiguous()
        kernel(values, factor, grid)
        codes.append(values[:, factor.order.argsort()].cpu())
        taken = seconds_of(partial(kernel, values, factor, grid), where)
        yield Row(f"{name}: {columns} columns on {title}", 1e3 * taken, "ms")
    steps = own.scale.repeat_interleave(width, 1)
    equal = float(((codes[0] - codes[1]).abs() < steps / 4).float().mean())
    yield Row(f"{name}: codes of {kernels[1][0]} and {kernels[0][0]}", equal, least=EQUAL_CODES)


def tiles(device: str, sizes: Sizes) -> Iterator[Row]:
    """Yield times and codes of the Triton kernel and of `round_blocks`, on a device.

    On the CPU, the kernel runs in Triton's interpreter.
    """
    if not has_triton():
        yield Row("skipped", note="triton or a C compiler is not there")
        return
    side, generator = sizes.matrix, torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * side, side, generator=generator).to(device)
    weight = torch.randn(sizes.tile_rows, side, generator=generator) * 0.02
    kernels = (("round_blocks", device, round_blocks), ("Triton", device, round_on_device))
    for name in sizes.tile_schemes:
        yield from _rounded(name, weight, inputs.T @ inputs, kernels)


def settings(sizes: Sizes, device: str) -> Calibration:
    """Return calibration settings with the demo's text."""
    data = str(DEMO / "calibration.jsonl")
    return Calibration(data=data, samples=sizes.samples, seq_len=sizes.tokens, device=device)


def quantized(
    source: Path, out: Path, scheme: str, how: Rounding, text: Calibration | None
) -> float:
    """Quantize a checkpoint and return the seconds."""
    start = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    rules = scheme_rules(Planning(scheme=scheme, rounding=how))
    planning = PlanSettings(has_text=text is not None)
    quantize_source(
        QuantizeJob(
            source=Folder.at(source), out=out, rules=rules, planning=planning, calibration=text
        )
    )
    return time.perf_counter() - start


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with a single file."""
    tensors: dict[str, torch.Tensor] = load_file(next(out.glob("*.safetensors")))
    return tensors


def equal_bytes(ours: Path, cpus: Path) -> Iterator[Row]:
    """Yield the shares of equal packed bytes and of equal smoothing exponents.

    Also yields the difference of static input scales.
    """
    left, right = tensors_of(ours), tensors_of(cpus)
    same = [(left[key] == right[key]).flatten() for key in left if key.endswith("weight_packed")]
    if same:
        yield Row("bytes equal to the CPU's", float(torch.cat(same).float().mean()))
    scales = [key for key in left if key.endswith("input_scale")]
    if scales:
        most = max(float(((left[key] - right[key]) / right[key]).abs().max()) for key in scales)
        yield Row("static input scales, relative difference", most, most=SCALE_SHARE)
    if (cpus / SMOOTHING).is_file():
        found, expected = smoothing_of(ours), smoothing_of(cpus)
        equal = sum(found.get(name) == value for name, value in expected.items()) / len(expected)
        yield Row("smoothing: tensors with the CPU's exponents", equal)


def rows_of(sizes: Sizes, behind: int = 0) -> Samples:
    """Return rows of the demo's text, after skipping `behind` rows."""
    data = settings(sizes, "cpu").sources(behind + sizes.samples)
    samples = read_samples(data, DEMO / "model", vocab_size=384)
    return samples.select(range(behind, len(samples.rows)))


def kl(model: Path, out: Path, sizes: Sizes) -> float:
    """Return KL(model || checkpoint) in nats per token, on text without calibration rows."""
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    candidate, total, rows = load_dequantized(out), 0.0, rows_of(sizes, sizes.samples).token_ids
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for row in rows:
            logits = (model(input_ids=torch.tensor([row])).logits for model in (source, candidate))
            total += divergence_of_logits(*logits)
    return total / sum(map(len, rows))


def pipeline(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Calibrate and round the demo, and compare with the CPU."""
    for scheme, how in sizes.ways:
        yield from compared("demo", DEMO / "model", (scheme, how), device, sizes, folder)


def compared(
    name: str,
    model: Path,
    way: tuple[str, Rounding],
    device: str,
    sizes: Sizes,
    folder: Path,
) -> Iterator[Row]:
    """Round a model on the CPU and on a device, and compare KL and bytes."""
    scheme, how = way
    outs = [folder / f"{name}-{scheme}-{how}-{number}" for number in (0, 1)]
    losses = list[float]()
    for where, out in zip(("cpu", device), outs, strict=True):
        taken = quantized(model, out, scheme, how, settings(sizes, where))
        losses.append(kl(model, out, sizes))
        yield Row(f"{name} {scheme} {how} on {where}: KL", losses[-1], note=f"{taken:.1f} s")
    yield Row(f"{name} {scheme} {how}: KL by the CPU's", losses[1] / losses[0], most=KL_SHARE)
    for row in equal_bytes(outs[1], outs[0]):
        yield replace(row, name=f"{name} {scheme} {how}: {row.name}")


def random_model(folder: Path, sizes: ModelSizes) -> Path:
    """Return a Llama of random weights, which is written here from a seed."""
    model: Path = random_llama(
        folder,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=max(1, sizes.hidden // 512),
        vocab_size=sizes.vocabulary,
    )
    return model


def rounding(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Compare the Triton kernel with `round_blocks`. Round random models with gptq and refit.

    The small model is compared with the CPU. The large model is rounded on the device only.
    """
    yield from tiles(device, sizes)
    ways: tuple[Rounding, ...] = ("gptq", "refit")
    small = random_model(folder / "small", sizes.small)
    few = replace(sizes, samples=max(1, sizes.samples // 2), tokens=sizes.tokens // 2)
    for how in ways:
        yield from compared("0.1 B", small, ("W4A16", how), device, few, folder)
    model = random_model(folder / "random", sizes.large)
    for how in ways:
        text = settings(sizes, device)
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = resident_mb("VmRSS")
        taken = quantized(model, folder / f"random-{how}", "W4A16", how, text)
        yield Row(f"1.1 B {how}: time", taken, "s")
        yield Row(f"1.1 B {how}: memory of the host", (resident_mb("VmHWM") - before) / 1e3, "GB")
        if device.startswith("cuda"):
            yield Row(
                f"1.1 B {how}: memory of the card",
                torch.cuda.max_memory_allocated(device) / 1e9,
                "GB",
            )


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine that shares the card.

    It has a single thread, and vLLM's sampler if FlashInfer is not installed. vLLM imports
    FlashInfer for its sampler without checking whether it is installed.
    """
    given = {**os.environ, "OMP_NUM_THREADS": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        given["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return given


def run_vexport(*words: object) -> tuple[int, str]:
    """Run a vexport command. Return its exit code and the last lines of its output."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "vexport", *map(str, words), "--quiet"],
            capture_output=True,
            text=True,
            timeout=ENGINE_SECONDS,
            env=engine_environment(),
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done in {ENGINE_SECONDS} s"
    lines = (ran.stderr if ran.returncode else ran.stdout).strip().splitlines()
    return ran.returncode, " | ".join(lines[-3:])


def read_report(file: Path) -> dict[str, Any]:
    """Return the first report in a JSON file of a command, or an empty report without a file."""
    if not file.is_file():
        return {}
    reports: list[dict[str, Any]] = json.loads(file.read_text())
    return reports[0]


def real_kernels(report: dict[str, Any]) -> dict[str, str]:
    """Return the kernel that the engine chose for each kind of layer (`mlp.down_proj`).

    Kernels are names of vLLM's classes.
    """
    lines = (report.get("engine") or {}).get("kernels", ())
    return {
        kind: chosen.partition(" (")[0]
        for kind, _, chosen in (line.partition(": ") for line in lines)
    }


def expected_kernels(report: dict[str, Any]) -> dict[str, str]:
    """Return the kernel that the dry load expects for each kind of layer."""
    cells = layer_cells(report) if report else ()
    return {cell.kind.rpartition("*.")[2]: cell.kernel for cell in cells if cell.kind}


def load_rows(name: str, out: Path, folder: Path, *words: str) -> list[Row]:
    """Load a checkpoint dry and for real, and compare the kernels.

    The dry load is for the capability of the first card.
    """
    start = time.perf_counter()
    files = {kind: folder / f"{name.replace(' ', '-')}.{kind}.json" for kind in ("dry", "load")}
    capability: tuple[object, ...] = ()
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        capability = ("--sm", 10 * major + minor)
    dry_code, dry_message = run_vexport("load", out, "--dry", *capability, "-o", files["dry"])
    rows = [
        Row(f"{name}: exit code of the dry load", dry_code, note=dry_message if dry_code else "")
    ]
    if not capability:
        return rows
    code, message = run_vexport("load", out, *BESIDE, *words, "-o", files["load"])
    report, expected = read_report(files["load"]), expected_kernels(read_report(files["dry"]))
    chosen = real_kernels(report)
    agreement = report.get("logprobs") or {}
    kernels = ", ".join(dict.fromkeys(chosen.values()))
    taken = f"{time.perf_counter() - start:.0f} s"
    rows.append(
        Row(
            f"{name}: exit code of the load",
            code,
            most=0,
            note=message if code else f"{kernels}; {taken}",
        )
    )
    if agreement:
        kl, limit = agreement["mean_kl"], agreement["limit"]
        rows.append(Row(f"{name}: KL(reference || engine)", kl, "nats", most=limit))
    if chosen and expected:
        wrong = {
            kind: kernel for kind, kernel in chosen.items() if expected.get(kind, kernel) != kernel
        }
        differences = ", ".join(
            f"{kind} is {kernel}, not {expected[kind]}" for kind, kernel in wrong.items()
        )
        share = 1 - len(wrong) / len(chosen)
        rows.append(Row(f"{name}: kernels as in the dry load", share, least=1, note=differences))
    return rows


def eval_rows(name: str, out: Path, folder: Path) -> list[Row]:
    """Evaluate a checkpoint against the demo's model with a task of the demo, both on the card."""
    start, task = time.perf_counter(), DEMO / "tasks" / "facts_choice.yaml"
    words = ("--baseline", DEMO / "model", "--task", task, *BESIDE)
    code, message = run_vexport("eval", out, *words)
    return [
        Row(
            f"{name}: exit code of eval",
            code,
            note=f"{message}; {time.perf_counter() - start:.0f} s",
        )
    ]


def vllm(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Load all schemes that the card supports and other checkpoints. Evaluate two schemes.

    Several engines share a card. A rehearsal without a card only loads dry.
    """
    if importlib.util.find_spec("vllm") is None:
        yield Row("skipped", note="vLLM is not there")
        return
    cards = torch.cuda.device_count()
    schemes = (
        [scheme.name for scheme in all_schemes() if _runs(scheme.name)]
        if cards
        else list(sizes.schemes[:1])
    )
    text = settings(sizes, "cpu")
    with ThreadPoolExecutor(ENGINES) as pool:
        found = list[Future[list[Row]]]()
        for out in sizes.checkpoints:
            found.append(pool.submit(load_rows, out.name, out, folder))
        for scheme in sorted(schemes, key=lambda name: name not in EVALUATED):
            out = folder / f"demo-{scheme}"
            if not out.is_dir():
                quantized(DEMO / "model", out, scheme, "nearest", text)
            found.append(pool.submit(load_rows, scheme, out, folder))
            if cards and scheme in EVALUATED:
                found.append(pool.submit(eval_rows, scheme, out, folder))
                found.append(
                    pool.submit(load_rows, f"{scheme} compiled", out, folder, "--mode", "default")
                )
        if cards > 1:
            found += [
                pool.submit(
                    load_rows, f"{scheme} tp 2", folder / f"demo-{scheme}", folder, "--tp", "2"
                )
                for scheme in schemes
            ]
        for future in as_completed(found):
            yield from future.result()
    if not cards:
        yield Row("real loads, eval", note="skipped without a card")


def _runs(scheme: str) -> bool:
    """Return True if the first card runs a scheme."""
    major, minor = torch.cuda.get_device_capability()
    found = get_scheme(scheme)
    support = found.format.gpu_support(found.args)
    return support.loads_from <= 10 * major + minor < (support.loads_below or 1000)
