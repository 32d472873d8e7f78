"""Models that a command gives to a run by name: a checkpoint, an address, or answers of lm-eval.

`vexport eval` and `vexport load` are runs whose checkpoint is given in this way. A scenario makes
its checkpoint instead. `vexport report` imports this module, without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vexport.records import EngineMode
from vexport.scenario import Evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """One of the two models of a run, and the place of its answers.

    `name` is the model as the command or scenario names it. `role` names the model in progress and
    errors. `checkpoint` is the folder that vLLM serves on this machine, None if a server has the
    model. `url` is the address of the server that answers tasks, None if vLLM on this machine does.
    `tokenizer` is the folder of the tokenizer for that server's prompts, None if it is chosen
    when the server is asked. Its code runs only with `trust_tokenizer`. `answers` are results of
    lm-eval that were given: then the model is not asked.
    """

    name: str
    role: str
    checkpoint: Path | None = None
    url: str | None = None
    tokenizer: Path | None = None
    trust_tokenizer: bool = False
    answers: Path | None = None

    @property
    def is_asked(self) -> bool:
        """Return whether the run asks the model."""
        return self.answers is None

    @property
    def prompt_folder(self) -> Path | None:
        """Return the folder with the tokenizer and chat template of the model's prompts."""
        return self.checkpoint or self.tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The models of a run that makes no checkpoint, and how they are judged.

    Without `evaluate` the candidate is only loaded, in `mode`. `against` is an accepted baseline,
    which takes the place of `baseline`. If a command has several candidates, `part` is the folder
    of this candidate's results: DIR/candidate/PART. `prompted` has the folder of each model that
    answers the same questions, by role, the baseline first.
    """

    name: str
    candidate: RunModel
    baseline: RunModel | None = None
    against: Path | None = None
    evaluate: Evaluate | None = None
    mode: EngineMode = "eager"
    part: str = ""
    prompted: Mapping[str, Path] = field(default_factory=dict)

    @property
    def is_compared(self) -> bool:
        """Return whether there is a baseline to compare the candidate with."""
        return self.baseline is not None or self.against is not None


def candidate_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Return the folder of each candidate's results below `candidate`, empty for a single one."""
    if len(names) == 1:
        return ("",)
    return tuple(f"{number}-{Path(name).name}" for number, name in enumerate(names, 1))


def title_of(name: str) -> str:
    """Return what a report calls a model: the last part of its path, or the host of its address."""
    host = name.partition("://")[2].split("/")[0]
    return host or Path(name).name or name
