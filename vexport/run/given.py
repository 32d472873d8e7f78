"""Describe models that a command gives to a run: a checkpoint, an address, or results of lm-eval.

`vexport eval` and `vexport load` are runs with such a given checkpoint. A scenario makes its
checkpoint instead. `vexport report` imports this module, without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vexport.records import EngineMode
from vexport.scenario import Evaluate, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model of a run, and the place of its responses.

    `name` is the model's name in the command or scenario. `role` is the model's name in progress
    and in errors. `checkpoint` is the folder that vLLM serves on this machine, or None if the model
    is only on a server. `url` is the address of the server that runs the tasks, or None if vLLM on
    this machine runs them. `tokenizer` is the folder of the tokenizer for that server's prompts. If
    it is None, the tokenizer is chosen when the first prompt is sent. The tokenizer's code runs
    only if `trust_tokenizer` is set. `served` is the server's description of its model, or "" if
    there is no server. `answers` is the path of given lm-eval results. If it is set, the run does
    not start the model. `variant` has the settings and the interpreter of this model's engine, if
    they differ from the command's.
    """

    name: str
    role: str
    checkpoint: Path | None = None
    url: str | None = None
    tokenizer: Path | None = None
    trust_tokenizer: bool = False
    served: str = ""
    answers: Path | None = None
    variant: Variant | None = None

    @property
    def needs_answers(self) -> bool:
        """Return True if the run must get responses from the model, because none are given."""
        return self.answers is None

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


def candidate_folders(names: Sequence[str]) -> tuple[str, ...]:
    """Return the folder of each candidate's results below `candidate`.

    It is empty for a single candidate.
    """
    if len(names) == 1:
        return ("",)
    return tuple(f"{number}-{Path(name).name}" for number, name in enumerate(names, 1))


def title_of(name: str) -> str:
    """Return a model's name in reports: the last part of its path, or the host of its address."""
    host = name.partition("://")[2].split("/")[0]
    return host or Path(name).name or name
