"""Findings, and the reports of a check, a repair, a load in the real engine, and a dry load."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeVar

from vexport.errors import VexportError, problem_text
from vexport.records.served import ServerComparison
from vexport.rules.book import Claim as Claim
from vexport.rules.book import LoaderFault as LoaderFault
from vexport.rules.book import Rule
from vexport.rules.book import Severity as Severity
from vexport.words import first_and_more

E = TypeVar("E", bound=VexportError)
# Separates the cause of vLLM's refusal from vLLM's message, which only JSON and --all show.
MESSAGE_SEPARATOR = "; vLLM's message: "
# Entry of `CheckReport.not_judged` if vLLM's loaders could not judge the checkpoint.
LOADERS = "vLLM's loaders"
# The part of a check that decides whether vLLM loads the checkpoint.
JudgedBy = Literal["static", "loaders"]


def without_details(text: str) -> str:
    """Return the cause alone, without vLLM's message if it follows."""
    return text.partition(MESSAGE_SEPARATOR)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that a check found: the place, what is expected, what was found, and the remedy.

    `claim` is what the rule claims about vLLM, or None for another problem, such as a file that
    cannot be read. `expected` and `fix` may be empty if the finding was made from an error without
    them.

    `places` are all places with the fault, such as the layers, if there are several. `where` then
    is the first place, or the cause of all of them.

    `loader_faults` are the ways in which a dry load can show the fault. It is empty if vLLM's
    loaders cannot find the fault. `tp` and `sm` are the numbers of ranks and the compute
    capabilities that the finding is about, or empty if they do not matter. These three are not part
    of the JSON.

    `rule` is the id of the rule that is broken (see `vexport.rules`), and `facts` are what its
    sentences were made from. The JSON has only the sentences.
    """

    rule: str = ""
    check: str
    claim: Claim | None = None
    severity: Severity
    where: str
    expected: str
    got: str
    fix: str
    places: tuple[str, ...] = ()
    loader_faults: tuple[LoaderFault, ...] = field(default=(), metadata={"exclude": True})
    tp: tuple[int, ...] = field(default=(), metadata={"exclude": True})
    sm: tuple[int, ...] = field(default=(), metadata={"exclude": True})
    facts: Mapping[str, object] = field(
        default_factory=dict, compare=False, metadata={"exclude": True}
    )

    @classmethod
    def at(
        cls,
        rule: Rule,
        where: str,
        /,
        *,
        places: Sequence[str] = (),
        tp: Sequence[int] = (),
        sm: Sequence[int] = (),
        **facts: object,
    ) -> Self:
        """Return the finding that `where` breaks the rule, with the facts of its templates.

        The check is the rule's family.
        """
        texts = rule.sentences(facts)
        return cls(
            rule=rule.id,
            check=rule.family,
            claim=rule.claim,
            severity=rule.severity,
            where=where,
            expected=texts.need,
            got=texts.got,
            fix=texts.do,
            places=tuple(places),
            loader_faults=rule.shown_by_loaders,
            tp=tuple(tp),
            sm=tuple(sm),
            facts=facts,
        )

    @classmethod
    def of(
        cls, error: VexportError, *, check: str, claim: Claim | None, severity: Severity
    ) -> Self:
        """Return a finding that describes the error."""
        where, expected, got, fix = error.where, error.need, error.got, error.fix
        return cls(
            rule=error.rule,
            check=check,
            claim=claim,
            severity=severity,
            where=where,
            expected=expected,
            got=got,
            fix=fix,
            facts=error.facts,
        )

    @property
    def label(self) -> str:
        """The severity as texts for people show it: `note` for info."""
        return "note" if self.severity == "info" else self.severity

    @property
    def every_place(self) -> tuple[str, ...]:
        """Places with the fault: `places`, or `where` alone."""
        return self.places or (self.where,)

    @property
    def brief(self) -> Self:
        """This finding without vLLM's message after the cause."""
        return (
            replace(self, got=without_details(self.got)) if MESSAGE_SEPARATOR in self.got else self
        )

    def error(self, kind: type[E], where: str, *, others: int = 0) -> E:
        """Return an error with this finding. Its remedy counts the `others`."""
        fix = f"{self.fix} ({others:,} more)" if others else self.fix
        return kind(
            where, got=self.got, need=self.expected, fix=fix, rule=self.rule, facts=self.facts
        )

    def __str__(self) -> str:
        problem = problem_text(self.where, got=self.got, need=self.expected, fix=self.fix)
        return f"{problem} [{self.rule or self.check}]"


# Dotted names of three parts and more: modules and tensors. A match starts only at the beginning of
# a word, so that long words are scanned once.
DOTTED_NAME = re.compile(r"(?<![\w#])[\w#]+(?:\.[\w#]+){2,}")


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, with those that differ only in the layer or tensor as one finding.

    Its `where` is the first place and the number of the others.
    """
    alike: dict[tuple[str | None, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        texts = (finding.expected, finding.got, finding.fix)
        shapes = (DOTTED_NAME.sub("NAME", text) for text in texts)
        # A finding that names its places already stands for several.
        alone = str(number) if finding.places else None
        key = (alone, finding.check, finding.claim, finding.severity, *shapes)
        alike.setdefault(key, []).append(finding)
    return tuple(map(_as_one, alike.values()))


def _as_one(alike: Sequence[Finding]) -> Finding:
    first, places = alike[0], tuple(dict.fromkeys(each.where for each in alike))
    if len(places) < 2:
        return first
    return replace(first, where=first_and_more(places), places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotJudged:
    """A part of the checkpoint that was not checked, and the reason."""

    what: str
    why: str

    @property
    def brief(self) -> Self:
        """This entry without vLLM's message after the cause."""
        return (
            replace(self, why=without_details(self.why)) if MESSAGE_SEPARATOR in self.why else self
        )

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Findings on a checkpoint. `ok` is True if no error was found in the parts that were judged.

    `vllm`, `tp` and `sm` are the vLLM version, the tensor parallel sizes and the compute
    capabilities that the check assumed. An empty `sm` means any GPU. `vllm` and `tp` are empty if
    the checkpoint could not be opened. `judged_by` is "loaders" if vLLM's loaders have loaded the
    checkpoint or refused it, and "static" if only the static rules have judged it. `ignored` are
    findings of rules that the user silenced.
    """

    schema: Literal["vexport.check/1"] = "vexport.check/1"
    checkpoint: str
    ok: bool
    judged_by: JudgedBy = "static"
    findings: tuple[Finding, ...]
    ignored: tuple[Finding, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    vllm: str = ""
    tp: tuple[int, ...] = ()
    sm: tuple[int, ...] = ()

    @property
    def loaders_failed(self) -> str:
        """Return why vLLM's loaders could not judge the checkpoint.

        Return "" if they judged it, or if they were not requested (`--static`).
        """
        reasons = (each.brief.why for each in self.not_judged if each.what == LOADERS)
        return next(reasons, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Engine that ran the model: versions, platform, and kernels for each kind of layer.

    `compilation` is vLLM's name of the compilation mode (NONE in eager mode). `settings` maps the
    engine's arguments, defaults included, to their values as text. `input_bits` is the smallest
    number of bits to which a kernel rounds its layer's input, or None if no kernel reports it.
    `blind_spots` lists properties that cannot be tested on this platform. `canary_seconds` is the
    time of the canaries, 0 without canaries.
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
    canary_seconds: float = 0.0

    @property
    def device(self) -> str:
        """Return the device in words, such as `CPU, emulated` (see `device_words`)."""
        compiled = self.compilation
        return device_words(
            self.platform, self.processor, emulated=self.emulated, compilation=compiled
        )


def device_words(platform: str, processor: str, *, emulated: bool, compilation: str = "") -> str:
    """Return `CPU, emulated` or `NVIDIA H100, compiled`.

    Eager mode is named on a GPU only, because a CPU mostly runs in eager mode.
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

    If the model ends the sequence after `ended_after` tokens, the engine still continues up to
    `tokens`. `text` is the part before that end. `non_finite` is the number of tokens with a
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
    """Full-vocabulary log-probabilities of vLLM compared with a reference on the same tokens.

    `mean_kl` and `max_kl` are KL(reference || vLLM) in nats per token. `limit` applies to
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
"""Check name of findings that are not faults of the checkpoint, such as an engine that crashed."""
# Mode in which vLLM runs a model. "default" compiles it if the platform does so, as in serving.
# "eager" runs it operator by operator.
EngineMode = Literal["default", "eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Load of a checkpoint in the real engine.

    `tp` is the tensor parallel size. `vllm` is the version, empty if it is unknown. `vllm_python`
    is the Python interpreter, empty for the interpreter that runs vexport. `log_tail` is the end of
    the log if the engine crashed.
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


CellStatus = Literal["loads", "other precision", "faulty", "refused", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """Load of a checkpoint, or of a kind of its layers, on `tp` devices of capability `sm`.

    `sm` is 90 for SM 9.0. Values of `status` include:
    - "faulty": it loads, but wrongly
    - "other precision": it loads, but computes in another precision than stored
    - "not shown": only a load on a real device can show the result

    `needed` is True if the checkpoint must load in this cell. A faulty cell is an error even if it
    is not needed. `precision` names the bits of weight and activation (W8A16), `kernel` is vLLM's
    class, and `reason` is vLLM's message if it refuses.
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
        """Return True if the checkpoint loads correctly, in any precision."""
        return self.status in ("loads", "other precision")

    @property
    def fails(self) -> bool:
        """Return True if the checkpoint loads wrongly, or if it must load and does not."""
        return self.status == "faulty" or (self.needed and not self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """Kind of layer (`model.layers.*.mlp.down_proj`): number of layers, scheme and storage."""

    name: str
    count: int
    scheme: str
    stored: str
    cells: tuple[MatrixCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMemory:
    """Bytes of KV cache that a rank reserves for a sequence of `tokens`."""

    tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of weights and KV cache that each of `tp` ranks needs.

    `sequences` has the KV cache for increasing lengths. The last length is the model's maximum.
    """

    tp: int
    weight_bytes: int
    sequences: tuple[SequenceMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRoom:
    """Number of sequences of length `tokens` that fit next to the weights on `tp` GPUs.

    `kv_bytes` is the part of vLLM's memory that remains for the KV cache. It is negative if the
    weights do not fit. `sequences` is the number of sequences that fit at once, rounded down.
    """

    gpu: str
    tp: int
    kv_bytes: int
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernels:
    """Kernels that a `library` compiles when a server first starts, and what the host `needs`."""

    library: str
    needs: str
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLoadReport:
    """Load of a checkpoint's headers by vLLM's model class and loaders, for each tp and sm.

    `cells` has a cell of the whole checkpoint for each tp and sm. Each of the `rows` has the same
    cells for one kind of layer. There are no rows if no cell was loaded. `memory` has an entry for
    each tp that was loaded. `without_toolkit` has the rows that differ on a host without a CUDA
    toolkit. `compiled` has the kernels of both that are compiled on the host. `rooms` has an entry
    for each GPU, tp and sequence length. `vllm_python` is the Python interpreter, empty for the
    interpreter that runs vexport. `cuda` is True if the loaders are those of a CUDA build.
    `not_judged` lists faults that also occur with the unquantized model. With `server`, the dry
    load was compared with a server, and `not_judged` lists values that could not be compared.
    """

    schema: Literal["vexport.dry-load/1"] = "vexport.dry-load/1"
    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    vllm: str
    vllm_python: str = ""
    cuda: bool = False
    cells: tuple[MatrixCell, ...]
    rows: tuple[MatrixRow, ...]
    without_toolkit: tuple[MatrixRow, ...] = ()
    compiled: tuple[CompiledKernels, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    rooms: tuple[GpuRoom, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    blind_spots: tuple[str, ...]
    server: ServerComparison | None = None
    # Static findings on the unquantized model that vexport made from the checkpoint's config. It is
    # empty if no such model was made. The JSON does not contain it.
    unquantized: tuple[Finding, ...] = field(default=(), metadata={"exclude": True})
    # vLLM's messages in the first cell that loaded. The JSON does not contain them.
    log: tuple[str, ...] = field(default=(), metadata={"exclude": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """Distance by which a repair moved a layer's weight, dequantized by compressed-tensors.

    `relative` is |after - before| / |before| in Frobenius norms, and `snr_db` expresses it as a
    signal-to-noise ratio. Both are None if the layer could not be dequantized before the repair.
    They are relative to the stored weight, which may be wrong. `source_snr_db` is the weight's
    signal-to-noise ratio against the source, before and after the repair. It is None without a
    source.
    """

    relative: float | None
    snr_db: float | None
    source_snr_db: tuple[float | None, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A repair: the place, the value before, the value now, and the precision that it costs.

    `assumption` describes an assumption of the repair that the checkpoint does not confirm. It is
    None without an assumption, or if the values were compared with a source. `layer` is the linear
    layer with the weight that the repair may move, and `change` is the distance. Both are None for
    other repairs.
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
    """Repairs of a checkpoint, and the findings that remain.

    `ok` is True if `out` was written and `vexport check` finds no error in it. If `ok` is False,
    nothing was written, and `refusals` lists the errors that cannot be repaired. `source` is the
    unquantized checkpoint that repaired values were compared with, or None. `warnings` remain in
    `out`.
    """

    schema: Literal["vexport.repair/1"] = "vexport.repair/1"
    checkpoint: str
    out: str
    ok: bool
    repairs: tuple[Repair, ...]
    refusals: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()
    source: str | None = None
