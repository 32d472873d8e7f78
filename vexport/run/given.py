"""Describe models that a command gives to a run: a checkpoint, an address, or results of lm-eval.

`vexport eval` and `vexport load` are runs with such a given checkpoint. A scenario makes its
checkpoint instead. `vexport report` imports this module, without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vexport.engine.installed import installed_text
from vexport.names import ModelRef, ResultFiles
from vexport.records import EngineMode
from vexport.scenario import Evaluate, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model of a run, and the place of its responses.

    `ref` says what runs the tasks: a server, vLLM on this machine, or nothing if results are given.
    `role` is the model's name in progress and in errors. `checkpoint` is the folder that vLLM
    serves on this machine, or None if the model is only on a server or in results. `tokenizer` is
    the folder of the tokenizer for a server's prompts. If it is None, the tokenizer is chosen when
    the first prompt is sent. The tokenizer's code runs only if `trust_tokenizer` is set. `served`
    is the server's description of its model, or "" if there is no server. `variant` has the
    settings and the interpreter of this model's engine, if they differ from the command's.
    """

    ref: ModelRef
    role: str
    checkpoint: Path | None = None
    tokenizer: Path | None = None
    trust_tokenizer: bool = False
    served: str = ""
    variant: Variant | None = None

    @property
    def name(self) -> str:
        """Return the model's name as the user gave it, with the name of its variant."""
        return f"{self.ref} ({variant_name(self.variant)})" if self.variant else str(self.ref)

    @property
    def needs_answers(self) -> bool:
        """Return True if the run must get responses from the model, because none are given."""
        return not isinstance(self.ref, ResultFiles)

    @property
    def prompt_folder(self) -> Path | None:
        """Return the folder with the tokenizer and chat template of the model's prompts."""
        return self.checkpoint or self.tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Models of a run that makes no checkpoint, and how they are judged.

    Without `evaluate` the candidate is only loaded, in `mode`. `against` is an accepted baseline
    that replaces `baseline`. If a command has several candidates, `candidate_folder` is the name of
    the folder with this candidate's results below DIR/candidate. `results_folder` is the folder of
    both models' results in the run directory, if this run is a part of another run.
    `prompt_folders` maps the role of each model without given responses to the folder with the
    tokenizer and chat template of its prompts. The baseline comes first.
    """

    name: str
    candidate: RunModel
    baseline: RunModel | None = None
    against: Path | None = None
    evaluate: Evaluate | None = None
    mode: EngineMode = "eager"
    candidate_folder: str = ""
    results_folder: str = ""
    prompt_folders: Mapping[str, Path] = field(default_factory=dict)

    @property
    def is_compared(self) -> bool:
        """Return True if there is a baseline for the candidate."""
        return self.baseline is not None or self.against is not None


def variant_name(variant: Variant) -> str:
    """Return the name of a variant in messages: its setting, and its version of vLLM."""
    if not variant.has_other_vllm:
        return variant.setting
    version = installed_text(variant.vllm_python)
    return f"{variant.setting} with vLLM {version or variant.vllm_python}"


def candidate_folders(refs: Sequence[ModelRef]) -> tuple[str, ...]:
    """Return the folder of each candidate's results below `candidate`.

    It is empty for a single candidate.
    """
    if len(refs) == 1:
        return ("",)
    return tuple(f"{number}-{ref.file_name}" for number, ref in enumerate(refs, 1))
