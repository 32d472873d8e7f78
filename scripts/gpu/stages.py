"""The stages, each a generator of rows, and the memory that the documents promise."""

import gc
import importlib.metadata
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from measure import DEMO, PEER, random_llama, resident_mb
from rows import Peaks, Row, Sizes, look_back_cost, rounding_cost
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from vexport.calibration import Samples, read_samples
from vexport.calibration.weights import STAGED_BYTES
from vexport.checkpoint.smoothed import SMOOTHING, smoothing_of
from vexport.engine.reference import load_dequantized
from vexport.formats.packing.base import Scales
from vexport.formats.schemes import all_schemes, get_scheme
from vexport.numerics.metrics import divergence_of_logits
from vexport.plan.build import PlanSettings
from vexport.plan.rules import WEIGHING_ROWS
from vexport.plan.source import rules_for
from vexport.quantize.gptq import GPTQ, Moments, factorize, grid_of, round_blocks, round_compiled, stack
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.quantize.round_sites import waiting_bytes
from vexport.records import Plan, PlanRequest
from vexport.records.calibration import Rounding
from vexport.scenario import Calibration

PACKAGES = ("torch", "triton", "transformers", "compressed_tensors", "vllm", "llmcompressor")
# What the device's codes may differ by from the CPU's of one H, and its KL from the CPU's.
EQUAL_CODES, KL_SHARE, SCALE_SHARE = 0.999, 1.01, 0.01
# The time in which vLLM may begin to load another scheme.
LOAD_SECONDS = 300


def seconds_of(call: Callable[[], object], device: str, repeats: int = 3) -> float:
    """The fastest of some calls, after one that warms up, when the device has done them."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def peaks_of(device: str, sizes: Sizes) -> Peaks:
    """What products and copies on the device reach."""
    side = 2 * sizes.matrix
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32  # which many a CPU lacks
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    buffer = torch.empty(sizes.bandwidth_bytes, dtype=torch.uint8, device=device)
    products = 2 * side**3 / seconds_of(lambda: matrix @ matrix, device)
    return Peaks(products, 2 * sizes.bandwidth_bytes / seconds_of(buffer.clone, device))


def promised_bytes(
    plan: Plan, tokens: int, sizes: Sizes, *, on_card: bool
) -> Mapping[str, tuple[float, str]]:
    """The memory that quantizing takes by the documents, on the host and on the card, and of what it is."""
    weights = [sum(one.out_features * one.in_features for one in group.members) for group in plan.groups]
    if all(group.rounding == "nearest" for group in plan.groups):
        return {"host": (2.5 * max(weights), "the largest group and its bytes")}
    around, states = 4 * sizes.vocabulary * sizes.hidden, 4 * tokens * sizes.hidden
    widest = max(group.members[0].in_features for group in plan.groups)
    layer = 2 * sum(weights) / sizes.layers
    rounding = waiting_bytes(plan.groups, tokens) + 20 * widest**2 + 8 * max(weights)
    if not on_card:
        return {
            "host": (layer + around + states + rounding, "a layer, states, waiting rows, H, what is around")
        }
    return {
        "host": (states + STAGED_BYTES, "states, and a buffer"),
        "card": (3 * layer + around + rounding, "three layers, waiting rows, H, what is around"),
    }


def device(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Card, driver, versions, and its peaks of products and of copies."""
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else "the CPU (a rehearsal)"
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
    peaks = peaks_of(device, sizes)
    yield Row("products", peaks.products / 1e12, "TFLOPS")
    yield Row("copy", peaks.copies / 1e9, "GB/s")
    host = torch.empty(sizes.bandwidth_bytes, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    sent = seconds_of(lambda: host.to(device, copy=True), device)
    yield Row("from the host", sizes.bandwidth_bytes / sent / 1e9, "GB/s")


def kernels(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """H of the same inputs, and the codes of the same weight by the same H, on the device and on the CPU."""
    side, generator = sizes.matrix, torch.Generator().manual_seed(0)
    spread = torch.randn(side, side, generator=generator) / math.sqrt(side)
    inputs = (torch.randn(4 * side, side, generator=generator) @ spread).to(torch.bfloat16)
    sums = [Moments.zeros(side, drift=True, device=where) for where in ("cpu", device)]
    peaks = {where: peaks_of(where, sizes) for where in ("cpu", device)}
    for where, moments in zip(("cpu", device), sums, strict=True):
        own = inputs.to(where)
        taken = seconds_of(partial(moments.add, own, own * 1.01), where, repeats=1)
        # Half of H and the drift; both inputs are read, both sums read and written.
        work, moved = 3 * len(own) * side**2, 2 * own.nbytes + 16 * side**2
        yield peaks[where].row(f"H and drift on {where}", taken, work=work, moved=moved)
    for name, most in (("hessian", 1e-5), ("drift", 5e-3)):
        exact, found = (getattr(one.complete(), name).cpu() for one in sums)
        yield Row(f"{name}, relative difference", float((found - exact).norm() / exact.norm()), most=most)
    weight = torch.randn(side, side, generator=generator) * 0.02
    for name, largest in (("W4A16", 7.5), ("W8A8", 127.5), ("NVFP4A16", 6.0), ("FP8_BLOCK", 448.0)):
        yield from _rounded(name, largest, weight, sums[0].hessian, peaks)


def _rounded(
    name: str, largest: float, weight: torch.Tensor, hessian: torch.Tensor, peaks: Mapping[str, Peaks]
) -> Iterator[Row]:
    args, columns = get_scheme(name).args.weights, weight.shape[1]
    high, width = args.block or (1, args.group or columns)
    scale = weight.reshape(-1, high, columns // width, width).abs().amax((1, 3)) / largest
    scales = Scales(scale=scale.numpy(), zero_point=0 * scale.numpy(), global_scale=None)
    own, codes = grid_of(args, scales, (columns, columns), torch.float32), list[torch.Tensor]()
    for where, kernel in zip(("cpu", list(peaks)[-1]), (round_compiled, round_blocks), strict=True):
        grid, factor = stack([own], torch.device(where)), factorize(hessian.to(where), GPTQ.ridge)
        assert factor is not None
        values = weight.to(where)[:, factor.order].contiguous()
        kernel(values, factor, grid)
        codes.append(values[:, factor.order.argsort()].cpu())
        taken = seconds_of(partial(kernel, values, factor, grid), where, repeats=1)
        # Every column is passed on to half of them; the weight is read and written, of the factor half read.
        work, moved = weight.numel() * columns, 2 * weight.nbytes + 2 * columns**2
        yield peaks[where].row(f"{name}: {columns} columns on {where}", taken, work=work, moved=moved)
    steps = own.scale.repeat_interleave(width, 1)
    equal = float(((codes[0] - codes[1]).abs() < steps / 4).float().mean())
    yield Row(f"{name}: codes equal to the CPU's", equal, least=EQUAL_CODES)


def settings(sizes: Sizes, device: str) -> Calibration:
    """The demo's text."""
    data = str(DEMO / "calibration.jsonl")
    return Calibration(data=data, samples=sizes.samples, seq_len=sizes.tokens, device=device)


def quantized(
    source: Path, out: Path, scheme: str, how: Rounding, text: Calibration | None
) -> tuple[Plan, Mapping[str, float]]:
    """Quantize; the plan, and the seconds by step."""
    marks, start = dict[str, list[float]](), time.perf_counter()

    def mark(step: str, done: int, total: int) -> None:
        marks.setdefault(step, [start]).append(time.perf_counter())

    shutil.rmtree(out, ignore_errors=True)
    rules = rules_for(PlanRequest(scheme=scheme, rounding=how))
    planning = PlanSettings(has_text=text is not None)
    job = QuantizeJob(
        source=str(source), out=out, rules=rules, planning=planning, calibration=text, on_progress=mark
    )
    plan, _, _ = quantize_source(job)
    steps = {
        step: (times[-1] - times[1]) * (len(times) - 1) / (len(times) - 2)  # the first layer warms up
        for step, times in marks.items()
        if "(layers)" in step
    }
    return plan, {**steps, "all": time.perf_counter() - start}


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of one file."""
    tensors: dict[str, torch.Tensor] = load_file(next(out.glob("*.safetensors")))
    return tensors


def equal_bytes(ours: Path, cpus: Path) -> Iterator[Row]:
    """The shares of equal bytes of packed weights and of equal exponents of smoothing; the input scales."""
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
    """Rows of the demo's text, `behind` so many."""
    data = settings(sizes, "cpu").source(behind + sizes.samples)
    samples = read_samples(data, DEMO / "model", vocab_size=384)
    return samples.taken(range(behind, len(samples.rows)))


def kl(out: Path, sizes: Sizes) -> float:
    """KL(demo's model || checkpoint) in nats a token, of text that did not calibrate it."""
    source = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.bfloat16).eval()
    candidate, total, rows = load_dequantized(out), 0.0, rows_of(sizes, sizes.samples).token_ids
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for row in rows:
            logits = (model(input_ids=torch.tensor([row])).logits for model in (source, candidate))
            total += divergence_of_logits(*logits)
    return total / sum(map(len, rows))


def pipeline(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """The demo calibrated and rounded, against the CPU's; time and memory of the random model."""
    for scheme, how in sizes.ways:
        outs, losses = [folder / f"demo-{scheme}-{how}-{number}" for number in (0, 1)], list[float]()
        for where, out in zip(("cpu", device), outs, strict=True):
            _, taken = quantized(DEMO / "model", out, scheme, how, settings(sizes, where))
            losses.append(kl(out, sizes))
            yield Row(f"demo {scheme} {how} on {where}: KL", losses[-1], note=f"{taken['all']:.1f} s")
        yield Row(f"demo {scheme} {how}: KL by the CPU's", losses[1] / losses[0], most=KL_SHARE)
        for row in equal_bytes(outs[1], outs[0]):
            yield replace(row, name=f"demo {scheme} {how}: {row.name}")
    peaks, model = (
        peaks_of(device, sizes),
        random_llama(
            folder / "random",
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.hidden // 64,
            num_key_value_heads=max(1, sizes.hidden // 512),
            vocab_size=sizes.vocabulary,
        ),
    )
    ways: tuple[Rounding, ...] = ("nearest", "gptq", "refit")
    for how in ways:
        yield from _of_random_model(model, how, device, sizes, folder, peaks)


def _of_random_model(
    model: Path, how: Rounding, device: str, sizes: Sizes, folder: Path, peaks: Peaks
) -> Iterator[Row]:
    on_card, text = device.startswith("cuda"), None if how == "nearest" else settings(sizes, device)
    if on_card:
        torch.cuda.reset_peak_memory_stats(device)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is taken from here on
    before = resident_mb("VmRSS")
    plan, steps = quantized(model, folder / f"random-{how}", "W4A16", how, text)
    most_of_host = (resident_mb("VmHWM") - before) / 1e3
    rows = [len(row) for row in rows_of(sizes).token_ids]
    for step, taken in steps.items():
        if step.startswith("round"):
            work, moved = rounding_cost(plan, rows, drift=how == "refit")
        elif step.startswith("look back"):
            work, moved = look_back_cost(plan, rows[:WEIGHING_ROWS])
        else:
            yield Row(f"random {how}: {step}", taken, "s")
            continue
        yield peaks.row(f"random {how}: {step}", taken, work=work, moved=moved)
    promised = promised_bytes(plan, sum(rows), sizes, on_card=on_card)
    for place, (most, what) in promised.items():
        taken = torch.cuda.max_memory_allocated(device) / 1e9 if place == "card" else most_of_host
        note = f"promised: {most / 1e9:.2g} GB ({what})"
        yield Row(f"random {how}: memory of the {place}", taken, "GB", note)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(stored: Mapping[str, torch.Tensor], scheme: str, device: str) -> torch.Tensor:
    """A layer's weight by plain torch on the device, from the layout of its bytes."""
    own = {name: value.to(device) for name, value in stored.items()}
    packed, scale = own.get("weight_packed", own.get("weight")), own["weight_scale"]
    assert packed is not None
    if scheme == "W4A16":  # eight codes in 32 bits, the lowest first, 8 more than the number
        codes = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4, device=device)) & 15
        codes = codes.flatten(1)[:, : int(own["weight_shape"][1])].float() - 8
    elif packed.dtype == torch.uint8:  # two e2m1 in 8 bits, the lower first
        nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        codes = torch.tensor([*E2M1, *(-one for one in E2M1)], device=device)[nibbles]
    else:
        codes = packed.float()
    if scale.dtype == torch.uint8:  # exponents of MX
        scale = torch.exp2(scale.float() - 127)
    scale = scale.float() / own.get("weight_global_scale", torch.ones((), device=device)).float()
    high, width = (-(-codes.shape[side] // scale.shape[side]) for side in (0, 1))
    steps = scale.repeat_interleave(high, 0).repeat_interleave(width, 1)
    return codes * steps[: codes.shape[0], : codes.shape[1]]


def decode(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Packed weights of the demo decoded on the device, against compressed-tensors on the CPU."""
    for scheme in sizes.schemes:
        out = folder / f"demo-{scheme}"
        quantized(DEMO / "model", out, scheme, "nearest", settings(sizes, "cpu"))
        tensors = tensors_of(out)
        prefix = "model.layers.0.mlp.down_proj."
        stored = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        found = get_scheme(scheme)
        expected = found.format.dequantize(found.args, stored).float()
        worst = float((decoded(stored, scheme, device).cpu() - expected).abs().max() / expected.abs().max())
        yield Row(f"{scheme}: largest difference by the largest weight", worst, most=2**-8)


def told_by(*words: object) -> tuple[int, str]:
    """Exit code of a command of vexport, and its last line."""
    ran = subprocess.run(
        [sys.executable, "-m", "vexport", *map(str, words), "--quiet"], capture_output=True, text=True
    )
    lines = (ran.stderr if ran.returncode else ran.stdout).strip().splitlines()
    return ran.returncode, lines[-1] if lines else ""


def vllm(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Every scheme that the card runs, loaded with real kernels; one evaluated; two cards where there are."""
    if importlib.util.find_spec("vllm") is None:
        yield Row("skipped", note="vLLM is not there")
        return
    cards, start = torch.cuda.device_count(), time.perf_counter()
    schemes = [one.name for one in all_schemes() if _runs(one.name)] if cards else list(sizes.schemes[:1])
    rehearsed = () if cards else ("--dry",)  # not every CPU runs every scheme
    for number, scheme in enumerate(schemes):
        if time.perf_counter() - start > LOAD_SECONDS:
            yield Row("load of others", note=f"skipped, no time: {', '.join(schemes[number:])}")
            break
        out = folder / f"demo-{scheme}"
        if not out.is_dir():
            quantized(DEMO / "model", out, scheme, "nearest", settings(sizes, "cpu"))
        for tp in (1, 2) if cards > 1 else (1,):
            code, told = told_by("load", out, "--tp", tp, *rehearsed)
            yield Row(f"load {scheme}, tp {tp}: exit code", code, most=0, note=told)
    if not cards:
        yield Row("eval, bench, tp 2", note="skipped without a card")
        return
    out, task = folder / f"demo-{schemes[0]}", DEMO / "tasks" / "facts_choice.yaml"
    code, told = told_by("eval", out, "--baseline", DEMO / "model", "--task", task)
    yield Row(f"eval {schemes[0]}: exit code", code, note=told)
    words = ["vllm", "bench", "latency", "--model", str(out), "--input-len", "64", "--output-len", "64"]
    printed = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    yield Row(f"vllm bench latency {schemes[0]}", note=printed.rpartition("\n")[2] or "nothing")


def _runs(scheme: str) -> bool:
    """True where the first card runs a scheme."""
    major, minor = torch.cuda.get_device_capability()
    found = get_scheme(scheme)
    support = found.format.gpu_support(found.args)
    return support.loads_from <= 10 * major + minor < (support.below or 1000)


def peer(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """llm-compressor's GPTQ on the same rows of the demo."""
    is_here = importlib.util.find_spec("llmcompressor") is not None
    if not is_here and not PEER.is_file():
        yield Row("skipped", note="llm-compressor is not there (scripts/bench/setup-peer)")
        return
    data, out = folder / "rows.jsonl", folder / "demo-peer"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows_of(sizes).token_ids))
    script, words = (
        PEER.parents[2] / "scripts" / "bench" / "rounding.py",
        ("W4A16", "gptq", data, sizes.samples),
    )
    command = [sys.executable if is_here else PEER, script, "--peer", DEMO / "model", out, *words]
    ran = subprocess.check_output([str(word) for word in command], text=True)
    spent = json.loads(ran.splitlines()[-1])["seconds"]
    yield Row("demo W4A16 GPTQ: KL", kl(out, sizes), note=f"{spent:.1f} s")
