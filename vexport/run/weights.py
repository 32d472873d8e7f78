"""The stages that make and check the weights: plan, calibrate, quantize, check."""

from dataclasses import replace
from functools import cached_property, partial

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checks import check_checkpoint
from vexport.fidelity.roundtrip import changed_tensors, layer_errors
from vexport.files import from_json, to_json, write_text
from vexport.plan import build_plan
from vexport.quantize.recipe import recipe
from vexport.run.choices import Choices
from vexport.run.directory import Digests
from vexport.run.pipeline import plan_settings, write_checkpoint
from vexport.run.stages import Stages
from vexport.types import Calibration, CheckReport, LayerError, LayerErrors, Plan


class Weights:
    """The checkpoint of a scenario; each stage is done when first asked for."""

    def __init__(self, stages: Stages, choices: Choices) -> None:
        self.stages = stages
        self.choices = choices
        self.scenario = stages.scenario
        self.folder = stages.folder
        self.options = stages.options
        self.checkpoint = stages.folder / "checkpoint"

    @cached_property
    def planned(self) -> tuple[SourceIndex, Plan]:
        """Headers and plan; made anew each time, since it takes no time."""
        index = self.choices.index
        plan = build_plan(index, self.choices.rules, plan_settings(self.scenario))
        write_text(self.folder / "plan.json", to_json(plan))
        return index, plan

    @property
    def calibration(self) -> Calibration | None:
        """What the samples showed; None where the plan has no use for them."""
        return self.choices.calibration

    @cached_property
    def written(self) -> SourceIndex:
        """The quantized checkpoint."""
        index, plan = self.planned
        calibration = self.calibration

        def make() -> None:
            write_checkpoint(
                index,
                plan,
                calibration,
                self.checkpoint,
                overwrite=True,
                on_progress=self.options.on_progress,
                recipe=recipe(
                    index,
                    plan,
                    self.choices.rules,
                    self.scenario.calibration,
                    calibration,
                    self.checkpoint,
                    planning=plan_settings(self.scenario),
                    source=self.scenario.source,
                ),
            )

        self.stages.once("quantize", self.made_from, make)
        return read_index(self.checkpoint)

    @cached_property
    def checked(self) -> CheckReport:
        """Static findings, and whether what should have been copied was."""
        written = self.written
        index, plan = self.planned

        def make() -> None:
            report = check_checkpoint(str(self.checkpoint))
            findings = (*report.findings, *changed_tensors(index, written, plan))
            ok = report.ok and len(findings) == len(report.findings)
            on_layer = partial(self.options.on_progress, "read back (layers)")
            layers = LayerErrors(layers=layer_errors(index, written, plan, on_layer=on_layer))
            write_text(self.folder / "layers.json", to_json(layers))
            write_text(self.folder / "check.json", to_json(replace(report, ok=ok, findings=findings)))

        self.stages.once("check", self.made_from, make)
        return from_json(CheckReport, self.folder / "check.json")

    @property
    def layers(self) -> tuple[LayerError, ...]:
        """The weight error of each layer, measured by the check stage."""
        return from_json(LayerErrors, self.folder / "layers.json").layers

    @cached_property
    def made_from(self) -> Digests:
        """What the checkpoint depends on."""
        return self.choices.made_from(self.choices.rules)
