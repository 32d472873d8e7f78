"""The stages that make and check the weights: plan, calibrate, quantize, check."""

from dataclasses import replace
from functools import cached_property, partial

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checks import check_checkpoint
from vexport.files import from_json, to_json, write_text
from vexport.pipeline import calibrate_plan, plan_scenario, will_calibrate, write_checkpoint
from vexport.roundtrip import changed_tensors, layer_errors
from vexport.run.stages import Stages
from vexport.rundir import Digests, checkpoint_digest, path_digest, value_digest
from vexport.types import Calibration, CheckReport, LayerError, LayerErrors, Plan
from vexport.version import __version__


class Weights:
    """The checkpoint of a scenario; each stage is done when first asked for."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.scenario = stages.scenario
        self.folder = stages.folder
        self.options = stages.options
        self.checkpoint = stages.folder / "checkpoint"

    @cached_property
    def planned(self) -> tuple[SourceIndex, Plan]:
        """Headers and plan; made anew each time, since it takes no time."""
        index, plan = plan_scenario(self.scenario)
        write_text(self.folder / "plan.json", to_json(plan))
        return index, plan

    @cached_property
    def calibration(self) -> Calibration | None:
        """What the samples showed; None where the plan has no use for them."""
        index, plan = self.planned
        if not will_calibrate(plan, self.scenario.calibration):
            return None
        file = self.folder / "calibration" / "statistics.json"

        def make() -> None:
            calibration = calibrate_plan(
                index,
                plan,
                self.scenario.calibration,
                on_progress=self.options.on_progress,
                trust_remote_code=self.options.trust_remote_code,
            )
            write_text(file, to_json(calibration))

        self.stages.once("calibrate", self.made_from, make)
        return from_json(Calibration, file)

    @cached_property
    def written(self) -> SourceIndex:
        """The quantized checkpoint."""
        index, plan = self.planned
        calibration = self.calibration

        def make() -> None:
            settings = self.scenario.calibration
            write_checkpoint(
                index,
                plan,
                calibration,
                self.checkpoint,
                overwrite=True,
                on_progress=self.options.on_progress,
                device=settings.device if settings else None,
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
        settings = self.scenario.calibration
        digests = {
            "vexport": __version__,
            "source": checkpoint_digest(self.planned[0].root),
            "rules": value_digest([rule.model_dump() for rule in self.scenario.rules]),
            "calibration": value_digest(settings.model_dump(mode="json") if settings else None),
        }
        return digests | ({"calibration data": path_digest(settings.data)} if settings else {})
