"""Requests to the processes that import vLLM, and their results, both as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from vexport.architectures.faults import FaultyLayer
from vexport.records import BatchSize, Canary, DraftCounts, Endpoint, EngineInfo, RankMemory
from vexport.scenario.evaluate import LmEvalSettings
from vexport.scenario.serve import EngineArguments

# Tokens of a greedy continuation: enough to show errors that grow with the length (KV cache,
# long-range positions).
CANARY_TOKENS = 200
# Tokens that are generated after each prompt with speculative decoding: some 50 drafts.
DRAFT_TOKENS = 128
# Tokens of each row of a text for which log-probabilities of the whole vocabulary are compared.
# vLLM returns them as Python lists.
KL_TOKENS = 64
ANSWERS = "answers-"
"""Prefix of the file names of lm-eval's caches, next to lm-eval's results."""
SERVER = "server"
"""Platform of a session with a model behind an HTTP address."""
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
# missing: part of a parameter gets no value (vLLM reads uninitialized memory). unused: a stored
# tensor is not loaded. cast: its values are converted to a dtype of another kind. narrowed: only
# part of the tensor is read. stretched: the tensor is smaller than the part of a parameter that it
# is copied to, and its values are repeated.
MiscopyKind = Literal["missing", "unused", "cast", "narrowed", "stretched"]
Outcome = Literal["loaded", "refused", "unknown"]
# Word in vLLM's messages between the cause of a refusal and the reason of each kernel or backend.
REASONS = "Reasons:"
# The unquantized model that a dry load compares a checkpoint with. "source": its source. "same
# config": the model that transformers builds from the same config.json, under the names that
# transformers saves. "config alone": the same config.json without its quantization. "default
# config": the class in its default configuration. The last two are built without weights.
ControlKind = Literal["source", "same config", "config alone", "default config"]
# Unquantized models without weights.
WITHOUT_WEIGHTS: tuple[ControlKind, ...] = ("config alone", "default config")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """A request to start one engine, with all the work for this engine.

    If `enforce_eager` is None, the platform decides: compiled on a GPU, eager on a CPU. `arguments`
    are further arguments of vLLM.

    `logprob_prompts` are token ids. If `logprobs_file` is set, their full-vocabulary
    log-probabilities are written to it (see `vexport.inference`). `text` are rows of token ids. The
    negative log-likelihood of each token and the likeliest tokens are written to `text_file`.
    `drafted` are prompts that the engine continues with speculative decoding.

    `tasks` are lm-eval task names or YAML files. If there are any, `output` is the folder for
    lm-eval's result and sample files, and `lm_eval` has the settings of lm-eval. With `repeat`, a
    part of the documents or rows is evaluated a second time. `accepted` has the digest of each
    question of an accepted baseline, by task and document. If a question differs, the request ends
    with a problem before the engine starts.

    `identity` names everything that the responses depend on, except the engine. If it is set, the
    responses are stored in `output` after each batch. A later session reuses them if this session
    is killed. With an `endpoint`, `checkpoint` is the folder of its tokenizer, and no engine is
    started. The code of that tokenizer runs only with `trust_tokenizer`.
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
    batch_size: BatchSize = "auto"
    repeat: bool = False
    accepted: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    output: Path | None = None
    identity: str | None = None
    seed: int = 0
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """Failure of a session: its kind, vLLM's last message, and the end of the log.

    "refused" means that the checkpoint is at fault, "unsupported" that this platform lacks a kernel
    for the checkpoint.
    """

    kind: FailureKind
    message: str
    log_tail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProblem:
    """A VexportError of the worker (an unusable task, for example) that the parent raises again."""

    exit_code: int
    where: str
    got: str
    need: str
    fix: str
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSet:
    """Arguments of one engine of vLLM, and the number of devices that this engine needs."""

    arguments: EngineArguments
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsRequest:
    """Arguments of several engines to check."""

    sets: tuple[ArgumentSet, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """Responses of a session. If `failure` is set, these are the responses before the failure.

    `files` maps the pictures that the tasks' documents name to their SHA-256.
    """

    checkpoint: Path
    platform: str
    vllm: str = ""
    engine: EngineInfo | None = None
    canaries: tuple[Canary, ...] = ()
    logprobs_file: Path | None = None
    text_file: Path | None = None
    drafts: tuple[DraftCounts, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    failure: EngineFailure | None = None
    problem: InputProblem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A combination to try: tensor parallel size and compute capability (90 is SM 9.0).

    `toolkit` is True if the host has a CUDA toolkit (nvcc).
    """

    tp: int
    sm: int
    toolkit: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRequest:
    """Checkpoints and the cells to try for each. Each finished try writes a file to `folder`.

    `arguments` are the arguments of vLLM that the user set. `speculative` is the method of
    speculative decoding, `METHOD` or `METHOD=FOLDER` of the draft model. It is empty without
    speculative decoding. With `controlled`, each cell with an error is
    tried again with an unquantized model: the `source`, or a model that transformers makes (see
    `ControlKind`). The unquantized model is also tried in `plain_cells`, to find out whether it
    loads in any cell. A try ends after `try_seconds`.
    """

    checkpoints: tuple[Path, ...]
    cells: tuple[Cell, ...]
    folder: Path
    arguments: EngineArguments = field(default_factory=dict)
    trust_remote_code: bool = False
    speculative: str = ""
    controlled: bool = False
    source: Path | None = None
    plain_cells: tuple[Cell, ...] = ()
    try_seconds: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DryTry:
    """One checkpoint of a request in one cell as one rank, in a separate process.

    `number` is the position of the checkpoint in the request. With `control`, the unquantized model
    is tried instead of the checkpoint.
    """

    request: DryRequest
    number: int
    cell: Cell
    rank: int
    control: ControlKind | None = None

    @property
    def checkpoint(self) -> Path:
        """Folder that is loaded."""
        if self.control == "source" and self.request.source is not None:
            return self.request.source
        if self.control is not None:
            return self.request.folder / self._name
        return self.request.checkpoints[self.number]

    @property
    def file(self) -> Path:
        """Path of the file with the CellResult of this try."""
        cell = self.cell
        host = "" if cell.toolkit else "-no-toolkit"
        return self.request.folder / f"{self._name}-{cell.tp}-{cell.sm}{host}-{self.rank}.json"

    def shared_result_file(self, signature: str) -> Path:
        """Return the file for the result of loading a checkpoint as a rank.

        Tries for different compute capabilities share this file if their models have the same
        signature. The weights are then loaded only once.
        """
        return self.request.folder / f"{self._name}-{self.cell.tp}-{self.rank}-{signature}.json"

    @property
    def _name(self) -> str:
        return (
            f"{self.number}-{self.control.replace(' ', '-')}" if self.control else f"{self.number}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Miscopy:
    """A fault that the copy audit found.

    `where` is a parameter of vLLM if the kind is "missing", and a stored tensor otherwise. `layer`
    is the name of the parameter's layer with `*` for indices. It is empty for a tensor that is not
    loaded.
    """

    kind: MiscopyKind
    where: str
    layer: str
    got: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """All layers with the same name (indices as *), stored precision, running precision and kernel.

    Precisions look like W4A16, and are empty if unknown. `kernel` is the name of vLLM's class.
    """

    name: str
    count: int
    scheme: str
    stored: str
    runs: str
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Result of one checkpoint in one cell.

    If the `outcome` is "refused", `reason` is vLLM's reason. `where` is then the stored tensor at
    which vLLM stopped, the layers whose kernel fails, or empty. "unknown" means that the dry load
    stopped at a step that it cannot imitate. `built` is False if vLLM raised before the model was
    built. `in_class` is True if the code of the model class raised. `control` is the result of an
    unquantized model in the same cell, if it was tried. `known_faults` are the layers with a known
    fault of vLLM. `log` has vLLM's messages while it built the model. `compiled` maps the names of
    kernels, attention backends and the sampler to the libraries that compile them on the host.
    `asks_toolkit` is False if vLLM did not ask whether the host has a CUDA toolkit: the result is
    then the same without it.
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
    log: tuple[str, ...] = ()
    control: "Control | None" = None
    known_faults: tuple[FaultyLayer, ...] = ()
    compiled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    asks_toolkit: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Result of an unquantized model in a cell in which the checkpoint has an error.

    `is_same` is True if vLLM refused both for the same reason. `loads_elsewhere` is True if the
    unquantized model loads in a plain cell. In this case the GPU or the tensor parallel size of the
    cell causes the error.
    """

    kind: ControlKind
    is_same: bool = False
    faults: tuple[Miscopy, ...] = ()
    loads_elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DryResult:
    """Results of all cells of each checkpoint, in the order of the request."""

    vllm: str
    cuda: bool
    checkpoints: tuple[tuple[CellResult, ...], ...]


def draft_counts(metrics: Mapping[str, float], ending: str = "") -> DraftCounts:
    """Return vLLM's counts of drafts from its metrics, or counts of 0 without drafting.

    `ending` is appended to the names of the metrics. A server's metrics have such an ending.
    """
    names = (counter.name for counter in fields(DraftCounts))
    return DraftCounts(
        **{name: int(metrics.get(f"vllm:spec_decode_num_{name}{ending}", 0)) for name in names}
    )


def speculative_config(speculative: str, tokens: int = 1) -> dict[str, JsonValue] | None:
    """Return vLLM's `speculative_config` for `METHOD` or `METHOD=FOLDER`.

    `tokens` is the number of tokens of a draft.

    Return None if `speculative` is empty.
    """
    method, _, model = speculative.partition("=")
    draft: dict[str, JsonValue] = {"model": model} if model else {}
    return {"method": method, "num_speculative_tokens": tokens, **draft} if method else None
