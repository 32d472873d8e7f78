"""Measure the processor time of a quantization by kind of work.

    scripts/real-model
    .venv/bin/python scripts/bench/work.py [--case refit]... [--rows 16]
        [--model real/SmolLM2-135M-Instruct] [--text real/text] [--folder DIR] [--show]

The measured code is the package as it is: functions in `KINDS` are wrapped from outside, and each
second counts for the innermost of them. A name that is gone from the package is an error. The
forward pass of gradients and of trials counts as theirs. Everything runs on one core, and vLLM does
not verify the checkpoint. As in rounding.py, most modules are imported before. `imports` are the
modules that torch and others import late.

`share` is the matrix rate of a kind as a share of the machine's: operations of matrix products,
attention, solves and GPTQ's kernel, divided by their seconds and by the rate of products with the
sizes of the model's linear layers. These products run in the same process, in bf16, before and
after the quantization.

The result of a case is written to DIR/MODEL/CASE-ROWS.json, and is measured only once. --show only
prints. Kernels that numba's cache lacks are compiled. For an empty cache, set NUMBA_CACHE_DIR.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce, wraps
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from measure import ROOT, timed

OTHER, COMPILATION, IMPORTS = "other", "compilation", "imports"
SOURCE, ROUNDED = "forward, source", "forward, rounded"
GRADIENTS, TRIALS = "gradients", "trials"
# Functions and methods by kind, in the order of the table.
KINDS = {
    SOURCE: (
        "vexport.calibration.capture.capture_layer_calls",
        "vexport.calibration.walk.LayerWalk.forward",
        "vexport.calibration.walk.LayerWalk.run_head",
    ),
    ROUNDED: ("vexport.quantize.rounding_walk.RoundingWatcher._run",),
    "rounding of inputs": (
        "vexport.quantize.quantized_model.QuantizedModel.rounded_input",
        "vexport.quantize.quantized_model.QuantizedModel._round_input",
    ),
    "statistics": ("vexport.calibration.statistics.Statistics.add",),
    "moments": (
        "vexport.quantize.input_moments.InputMoments.add",
        "vexport.quantize.moments.Moments.add",
        "vexport.quantize.moments.Moments.complete",
    ),
    "drift": ("vexport.quantize.moments.Moments._add_source",),
    "solves": ("vexport.quantize.gptq.factorize", "vexport.quantize.gptq.refit"),
    "scales": (
        "vexport.quantize.scale_search.observe_weight",
        "vexport.quantize.scale_search.fused_scales",
    ),
    "rounding": (
        "vexport.quantize.gptq.round_columns",
        "vexport.quantize.gptq.round_nearest",
    ),
    "errors": (
        "vexport.quantize.group_rounding._errors",
        "vexport.quantize.rounding_walk.RoundingWatcher._state_error",
    ),
    "packing": (
        "vexport.quantize.stream.quantized_group",
        "vexport.quantize.quantized_model.QuantizedModel.weights_of",
    ),
    GRADIENTS: ("vexport.calibration.gradients.Gradients.run",),
    TRIALS: (
        "vexport.calibration.smoothing.Smoother.leave",
        "vexport.quantize.sensitivity.TrialWatcher.enter",
        "vexport.quantize.sensitivity.TrialWatcher.row",
        "vexport.quantize.sensitivity.TrialWatcher.leave",
    ),
    "reading": (
        "vexport.calibration.walk.LayerWalk.__init__",
        "vexport.calibration.weights.Weights.load",
        "vexport.checkpoint.tensors.read_weight",
        "vexport.quantize.samples.calibration_samples",
    ),
    "writing": (
        "vexport.quantize.job.finish",
        "vexport.quantize.rounded_layers.RoundedLayers.store_layer",
        "vexport.quantize.stream.write_shards",
    ),
    COMPILATION: ("vexport.numerics.jit.KernelCache._load_overload",),
    IMPORTS: (),
    # What a watcher does beside the kinds above is not part of the forward pass that calls it.
    OTHER: (
        "vexport.quantize.rounding_walk.RoundingWatcher.leave",
        "vexport.calibration.statistics.StatisticsWatcher.row",
    ),
}
# Forward passes inside these kinds are part of them.
WITH_FORWARD = (GRADIENTS, TRIALS)
CASES = {
    "refit": ("--scheme", "W4A16_G64", "--rounding", "refit"),
    "gptq": ("--scheme", "W4A16_G64", "--rounding", "gptq"),
    "w8a8": ("--scheme", "W8A8"),
    "nvfp4": ("--scheme", "NVFP4"),
}
# Quantized with the text that vexport brings.
WITHOUT_TEXT = ("nvfp4",)
SEQ_LEN = 512
# Processor seconds to measure the machine's matrix rate.
RATE_SECONDS = 1.0


class Meter:
    """Processor seconds and operations by kind.

    Rows of text run in greenlets, so each greenlet has its own stack of kinds. `elsewhere` are
    seconds of other threads that were counted there, and do not count for the main thread's kind.
    """

    def __init__(self) -> None:
        from greenlet import getcurrent, settrace

        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.operations: defaultdict[str, float] = defaultdict(float)
        self._stacks: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
        self._current = getcurrent
        self._stack = self._stacks.setdefault(getcurrent(), [OTHER])
        self._elsewhere = 0.0
        self._thread = get_ident()
        self._since = time.process_time()
        settrace(self._switch)

    def _switch(self, event: str, greenlets: tuple[Any, Any]) -> None:
        self.charge()
        self._stack = self._stacks.setdefault(greenlets[1], [OTHER])

    def charge(self) -> None:
        """Count the seconds since the last call for the kind that runs."""
        now = time.process_time() - self._elsewhere
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def restart(self) -> None:
        """Count from now."""
        self.charge()
        self.seconds.clear()

    @property
    def kind(self) -> str:
        """Return the kind that runs."""
        return self._stack[-1]

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count the block for a kind, in the main thread or in another."""
        if get_ident() != self._thread:
            start = time.thread_time()
            yield
            spent = time.thread_time() - start
            self.seconds[kind] += spent
            self._elsewhere += spent
            return
        stack = self._stack
        is_part = kind in (SOURCE, ROUNDED) and stack[-1] in WITH_FORWARD
        self.charge()
        stack.append(stack[-1] if is_part else kind)
        try:
            yield
        finally:
            self.charge()
            stack.pop()


def wrap(name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function or method by its wrapper, wherever the package has imported it."""
    owner, attribute = owner_of(name)
    function = vars(owner)[attribute]
    wrapped = wrapper(function)
    setattr(owner, attribute, wrapped)
    for module in [module for key, module in sys.modules.items() if key.startswith("vexport.")]:
        for key, value in list(vars(module).items()):
            if value is function:
                setattr(module, key, wrapped)


def owner_of(name: str) -> tuple[Any, str]:
    """Return the module or class that defines a name, and the last part of the name."""
    *path, attribute = name.split(".")
    module = ".".join(part for part in path if part[0].islower())
    owner = reduce(getattr, (part for part in path if part[0].isupper()), import_module(module))
    if attribute not in vars(owner):
        raise SystemExit(f"work.py: {name} is gone from the package; correct KINDS")
    return owner, attribute


def counted(meter: Meter, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        with meter.counting(kind):
            return function(*args, **kwargs)

    return call


def watch_compilation(meter: Meter) -> None:
    """Count what numba compiles."""
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        """Holds the open blocks of nested compilations."""

        def __init__(self) -> None:
            self.blocks: list[Any] = []

        def on_start(self, event: event.Event) -> None:
            block = meter.counting(COMPILATION)
            block.__enter__()
            self.blocks.append(block)

        def on_end(self, event: event.Event) -> None:
            self.blocks.pop().__exit__(None, None, None)

    event.register("numba:compile", Listener())


def operations_of(name: str, args: Sequence[Any]) -> float:
    """Return the multiplications and additions of a torch operation, or 0 if it has no product."""
    shapes: list[Any] = [getattr(arg, "shape", None) for arg in args]
    operations = 0.0
    if name in ("mm", "bmm"):
        operations = 2 * shapes[0].numel() * shapes[1][-1]
    elif name in ("addmm", "addmm_", "baddbmm", "baddbmm_"):
        operations = 2 * shapes[1].numel() * shapes[2][-1]
    elif name == "mkldnn_linear":
        operations = 2 * shapes[0].numel() * shapes[1][0]
    elif name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("backward")
        query, key = shapes[1:3] if is_backward else shapes[:2]
        operations = (10 if is_backward else 4) * query.numel() * key[-2]
    elif name in ("linalg_cholesky_ex", "linalg_cholesky"):
        operations = shapes[0][-1] ** 3 / 3
    elif name == "linalg_solve_triangular":
        operations = shapes[1].numel() * shapes[0][-1]
    elif name == "cholesky_solve":
        operations = 2 * shapes[0].numel() * shapes[1][-1]
    return operations


def count_operations(meter: Meter) -> Any:
    """Return a block in which torch's operations count for the kind that runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts each operation, also in a backward pass."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return False: torch's guard against its compiler would take most of the time."""
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            meter.operations[meter.kind] += operations_of(func._schema.name[6:], args)
            return func(*args, **(kwargs or {}))

    def with_columns(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(weight: Any, *args: object) -> object:
            meter.operations[meter.kind] += weight.numel() * weight.shape[1]
            return function(weight, *args)

        return call

    def with_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(sums: Any, first: Any, *args: Any, lower: bool, **kwargs: Any) -> None:
            whole = 2 * first.numel() * sums.shape[1]
            meter.operations[meter.kind] += whole / 2 if lower else whole
            function(sums, first, *args, lower=lower, **kwargs)

        return call

    wrap("vexport.quantize.gptq.round_compiled", with_columns)
    wrap("vexport.numerics.products.add_bf16_product", with_tokens)
    return Mode()  # type: ignore[no-untyped-call]


def matrix_rate(model: Path) -> float:
    """Return the operations in a processor second of products with the sizes of a decoder layer."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    hidden, between = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    sizes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    sizes += [(hidden, between), (hidden, between), (between, hidden)]
    layers = [
        (torch.ones(SEQ_LEN, wide, dtype=torch.bfloat16), torch.ones(out, wide).bfloat16())
        for wide, out in sizes
    ]
    done, start = 0, time.process_time()
    while (spent := time.process_time() - start) < RATE_SECONDS or not done:
        for inputs, weight in layers:
            torch.nn.functional.linear(inputs, weight)
        done += 1
    operations: int = done * sum(2 * SEQ_LEN * wide * out for wide, out in sizes)
    return operations / spent


def run_case(model: str, out: str, case: str, *text: str) -> None:
    """Quantize with wrapped functions, and print the seconds and operations of each kind."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import vexport.quantize.job  # noqa: F401
    from vexport.cli.entry import cli

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for names in KINDS.values():
        for name in names:
            import_module(".".join(part for part in name.split(".")[:-1] if part[0].islower()))
    rates = [matrix_rate(Path(model))]
    meter = Meter()
    for kind, names in KINDS.items():
        for name in names:
            wrap(name, partial(counted, meter, kind))
    watch_compilation(meter)
    SourceFileLoader.exec_module = counted(  # type: ignore[method-assign]
        meter, IMPORTS, SourceFileLoader.exec_module
    )
    words = ["quantize", model, out, *CASES[case], *text, "--quiet", "--no-verify"]
    meter.restart()
    with count_operations(meter):
        cli.main(words, standalone_mode=False)
    meter.charge()
    rates.append(matrix_rate(Path(model)))
    print(
        json.dumps(
            {
                "cpu": sum(meter.seconds.values()),
                "rate": sum(rates) / len(rates),
                "seconds": meter.seconds,
                "operations": meter.operations,
            }
        )
    )


def fill(options: argparse.Namespace, case: str) -> None:
    """Measure a case, unless this is done."""
    file = file_of(options, case)
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    text = ("--calibration", options.text.resolve() / "calibration.jsonl")
    rows = ("--samples", options.rows, "--seq-len", SEQ_LEN)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        words = () if case in WITHOUT_TEXT else (*text, *rows)
        command = (options.model.resolve(), Path(folder, "out"), case, *words)
        answer = timed(sys.executable, __file__, "--case-of", *command).answer
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps(answer), encoding="utf-8")
    partial_file.replace(file)


def file_of(options: argparse.Namespace, case: str) -> Path:
    rows = "default" if case in WITHOUT_TEXT else options.rows
    file: Path = options.folder / options.model.name / f"{case}-{rows}.json"
    return file


def markdown(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a row for each kind, and seconds and share for each case."""
    lines = [f"| CPU s, share | {' | '.join(measured)} |", "|---" * (len(measured) + 1) + "|"]
    for kind in KINDS:
        words = [cell(case, kind) for case in measured.values()]
        if any(word != "-" for word in words):
            lines.append(f"| {kind} | {' | '.join(words)} |")
    whole = [f"{case['cpu']:.0f}" for case in measured.values()]
    rates = [f"{case['rate'] / 1e9:.0f}" for case in measured.values()]
    lines.append(f"| all | {' | '.join(whole)} |")
    lines.append(f"| matrix rate in 10^9 operations/s | {' | '.join(rates)} |")
    return "\n".join(lines)


def cell(case: Mapping[str, Any], kind: str) -> str:
    """Return the seconds of a kind, and its share of the matrix rate if it has operations."""
    seconds = case["seconds"].get(kind, 0.0)
    if seconds < 0.05:
        return "-"
    share = case["operations"].get(kind, 0) / seconds / case["rate"]
    return f"{seconds:.1f}, {share:.2f}" if share >= 0.005 else f"{seconds:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time by kind of work.")
    parser.add_argument("--case", action="append", choices=CASES, help="A case; repeatable.")
    parser.add_argument("--rows", type=int, default=16, help="Rows for calibration.")
    parser.add_argument("--model", type=Path, default=ROOT / "real" / "SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, help="Default: the folder `text` next to the model.")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench-work"
    )
    parser.add_argument("--show", action="store_true", help="Print what is there, run nothing.")
    options = parser.parse_args()
    options.text = options.text or options.model.parent / "text"
    for case in options.case or CASES:
        if not options.show:
            fill(options, case)
    files = sorted((options.folder / options.model.name).glob("*.json"))
    print(markdown({file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case-of"]:
        run_case(*sys.argv[2:])
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        main()
