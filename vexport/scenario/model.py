"""A scenario: its sections and what they need of each other."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from vexport.scenario.calibration import Calibration, Sensitivity
from vexport.scenario.evaluate import Evaluate
from vexport.scenario.rules import Auto, Rule
from vexport.scenario.scheme_keys import AUTO
from vexport.scenario.section import Section
from vexport.scenario.serve import Serve
from vexport.types import KvCache, OnUnsupportedShape

# Names that keys of a scenario had before.
FORMER_KEYS = {"on_misfit": "on_unsupported_shape"}


class Scenario(Section):
    """One complete run.

    `source` is a folder or a model of the hub, `revision` its branch, tag or commit (or ORG/NAME@REVISION).
    `on_unsupported_shape` says what becomes of layers whose shapes vLLM could not run; `kv_cache` how keys
    and values are stored, in the model's dtype where it is not given; `smoothing` how far inputs are
    smoothed, as far as the schemes need where it is not given. With `sensitivity` the report says what
    quantizing each group of layers costs; a rule with scheme `auto` needs `auto` and implies it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    source: str
    revision: str | None = None
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    on_unsupported_shape: OnUnsupportedShape = "refuse"
    kv_cache: KvCache | None = None
    smoothing: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    calibration: Calibration | None = None
    auto: Auto | None = None
    sensitivity: Sensitivity | None = None
    serve: Serve = Serve()
    evaluate: Evaluate | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_former_keys(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        renamed = {old: new for old, new in FORMER_KEYS.items() if new not in content}
        return {renamed.get(key, key): value for key, value in content.items()}

    @model_validator(mode="after")
    def _has_what_auto_needs(self) -> Self:
        if self.is_mixed != (self.auto is not None):
            raise ValueError("a rule with scheme: auto and the section `auto` with its budget, or neither")
        if self.calibration is None and (self.is_mixed or self.sensitivity):
            raise ValueError("`calibration`, whose first samples show what each group of layers costs")
        return self

    @property
    def run_dir(self) -> Path:
        """Where everything goes unless a command names another folder."""
        return Path("runs") / self.name

    @property
    def is_mixed(self) -> bool:
        """Whether a rule leaves the choice of schemes to a budget."""
        return any(rule.scheme == AUTO for rule in self.rules)
