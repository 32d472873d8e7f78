"""Requests to the processes that import vLLM, and their results: JSON in, JSON out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from vexport.records import Canary, DraftCounts, Endpoint, EngineInfo, LmEvalSettings, RankMemory
from vexport.scenario.serve import EngineArguments

# Long enough to show a slow loss (KV cache, long-range positions).
CANARY_TOKENS = 200
# After each prompt that is continued by drafting: some 50 drafts.
DRAFT_TOKENS = 128
# Of each row of a text, as far as vocabularies are compared: vLLM answers in Python lists.
KL_TOKENS = 64
ANSWERS = "answers-"
"""The beginning of the names of lm-eval's caches, next to its results."""
SERVER = "server"
"""The platform of a session with a model behind an address."""
FailureKind = Literal[
    "refused",
    "unsupported",
    "no compiler",
    "crashed",
    "out of memory",
    "no space",
    "timed out",
    "missing",
    "mismatched build",
    "no package",
]
# missing: part of a parameter gets no value (vLLM reads uninitialized memory); unused: a stored
# tensor goes nowhere; cast: its values are converted to a dtype of another kind; narrowed: only
# part of it is read. stretched: it has fewer values than the part of a parameter that it is copied
# to, which repeats them.
MiscopyKind = Literal["missing", "unused", "cast", "narrowed", "stretched"]
Outcome = Literal["loaded", "refused", "unknown"]
# What vLLM writes between the cause of a refusal and the reason of each kernel or backend.
REASONS = "Reasons:"
# The unquantized model that a dry load compares a checkpoint with: its source; the model that
# transformers builds of the same config.json, under the names that transformers saves; the same
# config.json alone, or the class in its default configuration, which are built without weights.
ControlKind = Literal["source", "same config", "config alone", "default config"]
# Models of which there are no weights.
WITHOUT_WEIGHTS: tuple[ControlKind, ...] = ("config alone", "default config")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """One engine start and everything to do in it.

    Without `enforce_eager` the platform decides: compiled on a GPU, operator by operator on a CPU.
    `arguments` are further ones of vLLM.

    `logprob_prompts` are token ids; with `logprobs_file` set, their full-vocabulary
    log-probabilities are written there (see `worker`). `text` are rows of token ids; what each
    token costs and the likeliest one go to `text_file`. `drafted` are prompts that the engine
    continues by drafting. `tasks` are lm-eval task names or YAML files; with any, `output` is the
    folder for lm-eval's own result and sample files, and `lm_eval` says how they are asked. `limit`
    bounds the documents of each task, below 1 to a share of them. With `repeat` a part of the
    documents is asked again. `identity` names what the answers depend on besides the engine: with
    it they are kept in `output` batch by batch, and those of a killed session are not asked again.
    With an `endpoint`, `checkpoint` is the folder of its tokenizer, and no engine is started. The
    code of that tokenizer runs only with `trust_tokenizer`.
    """

    checkpoint: Path
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    arguments: EngineArguments = field(default_factory=dict)
    trust_remote_code: bool = False
    trust_tokenizer: bool = False
    canaries: tuple[str, ...] = ()
    logprob_prompts: tuple[tuple[int, ...], ...] = ()
    logprobs_file: Path | None = None
    text: tuple[tuple[int, ...], ...] = ()
    text_file: Path | None = None
    drafted: tuple[tuple[int, ...], ...] = ()
    tasks: tuple[str, ...] = ()
    include_paths: tuple[Path, ...] = ()
    lm_eval: LmEvalSettings = LmEvalSettings()
    limit: int | float | None = None
    repeat: bool = False
    output: Path | None = None
    identity: str | None = None
    seed: int = 0
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """The reason why a session has no full result: cause, vLLM's own last words, the end of the
    log.

    "refused" is the checkpoint's fault; "unsupported" means that this platform lacks a kernel for
    it.
    """

    kind: FailureKind
    message: str
    log_tail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProblem:
    """A VexportError raised inside the worker (an unusable task, say), to be raised again by the
    parent.
    """

    exit_code: int
    where: str
    got: str
    need: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsRequest:
    """Arguments of vLLM to look at, and how many devices an engine with them needs."""

    arguments: EngineArguments
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """The answers of a session; with `failure` set, those before that."""

    checkpoint: Path
    platform: str
    vllm: str = ""
    engine: EngineInfo | None = None
    canaries: tuple[Canary, ...] = ()
    logprobs_file: Path | None = None
    text_file: Path | None = None
    drafts: tuple[DraftCounts, ...] = ()
    failure: EngineFailure | None = None
    problem: InputProblem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column of the matrix: tensor parallel size and compute capability (90 is SM 9.0)."""

    tp: int
    sm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRequest:
    """Checkpoints and the cells to try for each; `folder` takes a file per finished cell.

    `speculative` is the method of drafting, `METHOD` or `METHOD=FOLDER` of the draft model, empty
    for none. With `controlled`, each cell with an error is tried again with an unquantized model:
    with the `source`, or with a model that transformers makes (see `ControlKind`). `plain_cells`
    are further cells for that model, which show whether it loads anywhere. A try that takes more
    than `try_seconds` is ended.
    """

    checkpoints: tuple[Path, ...]
    cells: tuple[Cell, ...]
    folder: Path
    trust_remote_code: bool = False
    speculative: str = ""
    controlled: bool = False
    source: Path | None = None
    plain_cells: tuple[Cell, ...] = ()
    try_seconds: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DryTry:
    """One checkpoint of a request, by its `number`, in one cell as one rank, in a separate process.

    With `control` the unquantized model is tried in the checkpoint's place.
    """

    request: DryRequest
    number: int
    cell: Cell
    rank: int
    control: ControlKind | None = None

    @property
    def checkpoint(self) -> Path:
        """The folder that is loaded."""
        if self.control == "source" and self.request.source is not None:
            return self.request.source
        if self.control is not None:
            return self.request.folder / self._name
        return self.request.checkpoints[self.number]

    @property
    def file(self) -> Path:
        """The file that takes the CellResult."""
        return self.request.folder / f"{self._name}-{self.cell.tp}-{self.cell.sm}-{self.rank}.json"

    def loaded(self, signature: str) -> Path:
        """The file in which tries of one checkpoint and rank, whose models have the same signature,
        tell each other what became of its tensors: that does not depend on the capability."""
        return self.request.folder / f"{self._name}-{self.cell.tp}-{self.rank}-{signature}.json"

    @property
    def _name(self) -> str:
        return (
            f"{self.number}-{self.control.replace(' ', '-')}" if self.control else f"{self.number}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Miscopy:
    """A fault that the copy audit saw: at a parameter of vLLM's (missing) or a stored tensor (the
    others).

    `layer` is the kind of layer whose parameter it is, empty for a tensor that went nowhere.
    """

    kind: MiscopyKind
    where: str
    layer: str
    got: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """All layers of the same name (indices as *), stored precision, running precision and kernel.

    Precisions are like W4A16 with the type's name behind them where it matters; `kernel` is vLLM's
    class.
    """

    name: str
    count: int
    scheme: str
    stored: str
    runs: str
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The outcome of one checkpoint in one cell.

    "refused" has vLLM's reason, and in `where` the stored tensor that it was at, if any; "unknown"
    means that the dry load could not follow vLLM that far. `built` is False if vLLM raised before
    it had built the model; `in_class` is True if it raised in the code of the model class.
    `control` is the same cell with an unquantized model, if that was tried.
    """

    cell: Cell
    outcome: Outcome
    reason: str = ""
    where: str = ""
    built: bool = True
    in_class: bool = False
    layers: tuple[LayerKind, ...] = ()
    faults: tuple[Miscopy, ...] = ()
    memory: RankMemory | None = None
    control: "Control | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An unquantized model in the cell in which a checkpoint has an error.

    `loads_elsewhere` is True if this model loads in a plain cell, so that the cell is at fault.
    """

    kind: ControlKind
    outcome: Outcome
    reason: str = ""
    where: str = ""
    faults: tuple[Miscopy, ...] = ()
    loads_elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DryResult:
    """Every checkpoint's cells, in the order of the request."""

    vllm: str
    checkpoints: tuple[tuple[CellResult, ...], ...]


def draft_counts(metrics: Mapping[str, float], ending: str = "") -> DraftCounts:
    """vLLM's totals of drafts among its metrics, 0 where it drafts none; `ending` is of a server's
    names.
    """
    names = (counter.name for counter in fields(DraftCounts))
    return DraftCounts(
        **{name: int(metrics.get(f"vllm:spec_decode_num_{name}{ending}", 0)) for name in names}
    )


def speculative_config(speculative: str, tokens: int = 1) -> dict[str, JsonValue] | None:
    """The `speculative_config` of vLLM for `METHOD` or `METHOD=FOLDER`, with drafts of so many
    tokens.
    """
    method, _, model = speculative.partition("=")
    draft: dict[str, JsonValue] = {"model": model} if model else {}
    return {"method": method, "num_speculative_tokens": tokens, **draft} if method else None
