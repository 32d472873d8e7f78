"""Reports of a check, of a repair, of a load in the real engine, and of a dry load for other
devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from vexport.errors import VexportError

Severity = Literal["error", "warning", "info"]
# Separates the cause of vLLM's refusal from vLLM's own words, which only JSON and --all show.
IN_FULL = "; vLLM's own words: "


def without_details(text: str) -> str:
    """Return the cause alone of a text that may have vLLM's own words behind it."""
    return text.partition(IN_FULL)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing a check saw: the place, what was expected, what was found, what to do.

    As of an error `expected` and `fix` may be empty: nothing else was expected, there is nothing to
    do.
    """

    check: str
    severity: Severity
    where: str
    expected: str
    got: str
    fix: str

    @classmethod
    def of(cls, error: VexportError, *, check: str, severity: Severity) -> Self:
        """The finding that an error describes."""
        where, expected, got, fix = error.where, error.need, error.got, error.fix
        return cls(check=check, severity=severity, where=where, expected=expected, got=got, fix=fix)

    @property
    def brief(self) -> Self:
        """The same finding without vLLM's own words behind the cause."""
        return replace(self, got=without_details(self.got)) if IN_FULL in self.got else self

    def __str__(self) -> str:
        return (
            f"{VexportError(self.where, got=self.got, need=self.expected, fix=self.fix)} "
            f"[{self.check}]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotJudged:
    """A part that a check did not judge, and the reason."""

    what: str
    why: str

    @property
    def brief(self) -> Self:
        """The same entry without vLLM's own words behind the cause."""
        return replace(self, why=without_details(self.why)) if IN_FULL in self.why else self

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The findings on one checkpoint; `ok` means that none of them is an error in what was judged.

    `vllm`, `tp` and `sm` say what it was judged for: a version, tensor parallel sizes and compute
    capabilities, of which none means any. A report from before they were written has no version.
    """

    schema: Literal["vexport.check/1"] = "vexport.check/1"
    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...] = ()
    # Families of checks that had nothing to compare with, for JUnit. Pydantic reads `exclude` from
    # the metadata and leaves the field out of JSON. `pydantic.Field` would make `--help` import
    # pydantic.
    idle: tuple[NotJudged, ...] = field(default=(), metadata={"exclude": True})
    vllm: str = ""
    tp: tuple[int, ...] = ()
    sm: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The engine that ran the model: versions, platform, kernels by kind of layer, limits of the
    platform.

    `compilation` is vLLM's name of the mode (NONE in eager mode); `settings` are arguments of the
    engine by name, its defaults too, in words. `input_bits` are the fewest bits in which a kernel
    multiplies the inputs of its layer, None if no kernel tells.
    """

    vllm: str
    torch: str
    transformers: str
    platform: str
    processor: str
    dtype: str
    multiprocess: bool
    compilation: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    emulated: bool
    kernels: tuple[str, ...]
    input_bits: int | None = None
    blind_spots: tuple[str, ...]
    start_seconds: float

    @property
    def device(self) -> str:
        """The device in words, as `device_words`, to be read after "on"."""
        compiled = self.compilation
        return device_words(
            self.platform, self.processor, emulated=self.emulated, compilation=compiled
        )


def device_words(platform: str, processor: str, *, emulated: bool, compilation: str = "") -> str:
    """`CPU, emulated`, or `NVIDIA H100, compiled`; a GPU in eager mode says so, a CPU mostly runs
    in it.
    """
    on_cpu = platform == "cpu"
    eager = compilation in ("", "NONE", "0")
    mode = "" if on_cpu or not compilation else "eager"
    parts = (
        "CPU" if on_cpu else processor,
        "emulated" if emulated else "",
        mode if eager else "compiled",
    )
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A greedy continuation of a fixed prompt.

    The engine goes on to the asked number of `tokens` also where the model ends the sequence after
    `ended_after` of them; `text` is what came before that. `non_finite` of the tokens had a
    log-probability that is NaN or infinite.
    """

    prompt: str
    text: str
    tokens: int
    finish_reason: str
    ended_after: int | None = None
    non_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobAgreement:
    """Full-vocabulary log-probabilities of vLLM against a reference on the same tokens.

    `mean_kl` and `max_kl` are KL(reference || vLLM) in nats per token position; `limit` bounds
    `mean_kl`.
    """

    reference: str
    prompts: int
    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    limit: float


ENGINE_CHECK = "engine"
"""The check of a finding that is no fault of the checkpoint: the engine died, or could not
start.
"""
# How vLLM runs a model: compiled where its platform does so, as it is served, or operator by
# operator.
EngineMode = Literal["default", "eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The load of a checkpoint in the real engine.

    `tp` is the tensor parallel size, `vllm` the version where that is known, `vllm_python` the
    interpreter, empty for vexport's own; `log_tail` the end of the log of an engine that died.
    """

    schema: Literal["vexport.load/1"] = "vexport.load/1"
    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    mode: EngineMode = "eager"
    tp: int = 1
    vllm: str = ""
    vllm_python: str = ""
    log_tail: str = ""
    engine: EngineInfo | None = None
    canaries: tuple[Canary, ...] = ()
    logprobs: LogprobAgreement | None = None

    @property
    def was_tried(self) -> bool:
        """Return False for a load that was left out because an earlier stage failed."""
        return self.ok or bool(self.findings) or self.engine is not None


CellStatus = Literal["loads", "other precision", "faulty", "refused", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """The load of a checkpoint, or of one kind of its layers, on `tp` devices of capability `sm`.

    `sm` is 90 for SM 9.0. "faulty" loads, but wrongly; "other precision" loads, and multiplies in
    another precision than stored; "not shown" needs a real device. The answer rests on the cells
    that are `needed`. `precision` is bits of weight and activation (W8A16), `kernel` vLLM's class,
    `reason` vLLM's own words where it refuses.
    """

    tp: int
    sm: int
    status: CellStatus
    precision: str = ""
    kernel: str = ""
    reason: str = ""
    needed: bool = True

    @property
    def loads(self) -> bool:
        """Return whether the checkpoint loads correctly, in whatever precision it runs."""
        return self.status in ("loads", "other precision")

    @property
    def fails(self) -> bool:
        """Return whether the checkpoint loads wrongly, or has to load and does not."""
        return self.status == "faulty" or (self.needed and not self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One kind of layer (`model.layers.*.mlp.down_proj`), how many there are, how they are
    stored.
    """

    name: str
    count: int
    scheme: str
    stored: str
    cells: tuple[MatrixCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMemory:
    """Bytes of KV cache that one rank reserves for a sequence of `tokens`."""

    tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that each of `tp` ranks needs: its weights, and its KV cache for sequences of rising
    lengths.

    The last length is the longest that the model allows.
    """

    tp: int
    weight_bytes: int
    sequences: tuple[SequenceMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRoom:
    """The room next to the weights on each of `tp` GPUs of a name, in sequences of `tokens`.

    `kv_bytes` is what vLLM's share of the memory leaves for the KV cache, negative where the
    weights do not fit; `sequences` is how many of that length it holds at once, rounded down.
    """

    gpu: str
    tp: int
    kv_bytes: int
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLoadReport:
    """The load of a checkpoint's headers by vLLM's model class and loaders, for every tp and sm
    asked for.

    `cells` are the columns for the whole checkpoint, `rows` those for each kind of layer, in the
    same order; there are no rows where no cell was loaded. `memory` has one entry for each tp that
    was loaded, `rooms` one for each length of a sequence on each GPU asked for. `vllm_python` is
    the interpreter, empty for vexport's own. `not_judged` are the faults that vLLM has with the
    unquantized model as well.
    """

    schema: Literal["vexport.dry-load/1"] = "vexport.dry-load/1"
    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    vllm: str
    vllm_python: str = ""
    cells: tuple[MatrixCell, ...]
    rows: tuple[MatrixRow, ...]
    memory: tuple[RankMemory, ...] = ()
    rooms: tuple[GpuRoom, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    blind_spots: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """The distance that a layer's weight moved, dequantized by compressed-tensors before and after.

    `relative` is |after - before| / |before| in Frobenius norms, `snr_db` the same as
    signal-to-noise. Both are None if the layer could not be dequantized before. They compare the
    weight with what was stored, which may have been wrong. `source_snr_db` is the weight's
    signal-to-noise against the source before and after the repair, None without a source.
    """

    relative: float | None
    snr_db: float | None
    source_snr_db: tuple[float | None, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One thing that was repaired: where, what was there, what is there now, what it costs.

    `assumption` is what the repair takes for granted because nothing shows it; None if nothing is
    assumed or if the values were compared with a source. `layer` is the linear layer whose weight
    the repair may move, None for all else; `change` is the distance that the weight moved.
    """

    family: str
    where: str
    got: str
    now: str
    cost: str
    layer: str | None = None
    change: WeightChange | None = None
    assumption: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """The repairs of a checkpoint, and the findings that keep it from being sound.

    `ok` means that `out` was written and that `vexport check` finds no error in it. Otherwise
    `refusals` has the errors that cannot be repaired, and nothing was written. `source` is the
    unquantized checkpoint with which the repaired values were compared, None if they were not
    compared. `warnings` remain in `out`.
    """

    schema: Literal["vexport.repair/1"] = "vexport.repair/1"
    checkpoint: str
    out: str
    ok: bool
    repairs: tuple[Repair, ...]
    refusals: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()
    source: str | None = None
