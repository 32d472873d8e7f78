"""Model of a scenario with its sections, and checks across the sections."""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vexport.scenario.calibration import Calibration, Sensitivity
from vexport.scenario.declaring import Key
from vexport.scenario.evaluate import Evaluate
from vexport.scenario.model_names import SourceSetting
from vexport.scenario.planning import (
    IncludeVisionSetting,
    KvCacheSetting,
    RevisionSetting,
    SmoothingSetting,
    UnsupportedShapeSetting,
)
from vexport.scenario.rules import AUTO, Auto, Rule
from vexport.scenario.section import ScenarioSection, located_error
from vexport.scenario.serve import Serve
from vexport.scenario.variants import Setting, Variants

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MOST_CHARACTERS = 100


def _check_name(value: str) -> str:
    if re.fullmatch(_NAME, value) is None or len(value) > MOST_CHARACTERS:
        raise ValueError(
            f"at most {MOST_CHARACTERS} letters, digits, dots, underscores and hyphens, "
            "beginning with a letter or digit"
        )
    return value


class Check(ScenarioSection):
    """Settings of the check of the checkpoint that a run makes."""

    ignore_rules: Annotated[
        tuple[str, ...],
        Key("IDs of rules whose findings are only listed, such as `config/unquantized`."),
    ] = ()


class Scenario(ScenarioSection):
    """A complete run.

    With `sensitivity`, the report shows the loss from quantizing each group of layers. A rule with
    scheme `auto` needs the section `auto`, and implies `sensitivity`.
    """

    name: Annotated[
        str,
        AfterValidator(_check_name),
        WithJsonSchema({"type": "string", "pattern": _NAME, "maxLength": MOST_CHARACTERS}),
        Key(
            "Name of the run: letters, digits, dots, underscores and hyphens.",
            more="The run directory is `runs/NAME`.",
        ),
    ]
    source: Annotated[
        SourceSetting,
        Key("The unquantized model: a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the hub."),
    ]
    revision: RevisionSetting = None
    rules: Annotated[
        tuple[Rule, ...],
        Field(min_length=1),
        Key("Schemes of the layers; the first rule that matches a layer wins."),
    ]
    on_unsupported_shape: UnsupportedShapeSetting = "refuse"
    kv_cache: KvCacheSetting = None
    smoothing: SmoothingSetting = None
    include_vision: IncludeVisionSetting = False
    calibration: Annotated[
        Calibration | None,
        Key(
            "Text for rounding, static scales and losses.",
            unset="the text that ships with vexport, if the rules need text",
        ),
    ] = None
    auto: Annotated[Auto | None, Key("Candidates and budget of the rules with `scheme: auto`.")] = (
        None
    )
    sensitivity: Annotated[
        Sensitivity | None, Key("Report the loss from quantizing each group of layers.")
    ] = None
    check: Annotated[Check, Key("Rules of the check that do not count.")] = Check()
    serve: Annotated[
        Serve, Key("Arguments of vLLM, and the GPUs on which the checkpoint must load.")
    ] = Serve()
    evaluate: Annotated[
        Evaluate | None,
        Key("Tasks, and the limits of the verdict.", unset="the run ends after the load"),
    ] = None
    variants: Annotated[
        Variants | None,
        Key(
            "Settings and versions of vLLM to compare for the checkpoint, or a list of settings.",
            more="Needs `evaluate`.",
        ),
    ] = None

    @field_validator(
        "variants", mode="before", json_schema_input_type=Variants | tuple[Setting, ...] | None
    )
    @classmethod
    def _wrap_list_of_settings(cls, value: object) -> object:
        return {"serve": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _check_sections_for_auto(self) -> Self:
        if self.is_mixed and self.auto is None:
            need = "the candidates and the budget of the rule with scheme: auto"
            raise located_error("auto", None, need, "add the section auto")
        if self.auto is not None and not self.is_mixed:
            need = "a rule with scheme: auto, to which this section applies"
            fix = "add such a rule, or remove the section"
            raise located_error("auto", self.auto.model_dump(mode="json"), need, fix)
        if self.is_mixed and self.include_vision:
            need = "rules with named schemes, because losses of towers are not measured"
            fix = "remove include_vision, or the rule with scheme: auto"
            raise located_error("include_vision", True, need, fix)
        if self.calibration is None and (self.is_mixed or self.sensitivity):
            need = "text on which the loss of each group of layers is measured"
            raise located_error("calibration", None, need, "add calibration: {data: default}")
        return self

    @model_validator(mode="after")
    def _check_variants_are_evaluated(self) -> Self:
        if self.variants is not None and self.evaluate is None:
            raise ValueError(
                "the section evaluate, because variants are compared on its tasks or text"
            )
        if self.variants is not None:
            self.variants.matrix(self.serve, None)
        return self

    @property
    def run_dir(self) -> Path:
        """Return the default run directory. A command may override it."""
        return Path("runs") / self.name

    @property
    def is_mixed(self) -> bool:
        """Return True if a rule has `scheme: auto`, so that a budget decides the schemes."""
        return any(rule.scheme == AUTO for rule in self.rules)
