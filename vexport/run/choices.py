"""Which layers get which scheme: what the rules say, what `auto` chooses, what was promoted since."""

from functools import cached_property

from vexport.checkpoint.index import SourceIndex
from vexport.files import from_json, to_json, write_text
from vexport.plan import build_plan
from vexport.run.attempts import read_attempts
from vexport.run.directory import Digests, checkpoint_digest, path_digest, value_digest
from vexport.run.pipeline import calibrate_plan, plan_settings, scenario_index, unit_losses, will_calibrate
from vexport.run.stages import Stages
from vexport.scenario import Rule
from vexport.sensitivity.choose import mixed_scheme
from vexport.sensitivity.layer_groups import LayerGroup, find_layer_groups, probe_plan, rest_bytes, rules_with
from vexport.types import Calibration, MixedScheme, Plan, Sensitivity
from vexport.version import __version__

SENSITIVITY = "sensitivity.json"
MIXED = "mixed.json"


class Choices:
    """The rules that a checkpoint is made by; what they rest on is done when first asked for."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.scenario = stages.scenario
        self.folder = stages.folder

    @cached_property
    def index(self) -> SourceIndex:
        """The source's headers."""
        return scenario_index(self.scenario, on_progress=self.stages.options.on_progress)

    @cached_property
    def units(self) -> tuple[LayerGroup, ...]:
        """What can be given a scheme of its own."""
        scenario = self.scenario
        return find_layer_groups(self.index, scenario.rules, scenario.auto, plan_settings(scenario))

    @property
    def schemes(self) -> dict[str, str]:
        """The scheme of every unit: of its rule, else what was chosen, else what it was promoted to since."""
        mixed = self.mixed
        chosen = {one.name: one.scheme for one in mixed.choices} if mixed else {}
        promoted = {one.name: one.after for one in read_attempts(self.folder).promotions}
        return {unit.name: unit.allowed[0] for unit in self.units} | chosen | promoted

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The scenario's rules, and before them one for each layer that they do not decide about alone."""
        if not self.scenario.is_mixed and not read_attempts(self.folder).promotions:
            return self.scenario.rules
        return rules_with(self.units, self.schemes, self.scenario.rules)

    @cached_property
    def calibration(self) -> Calibration | None:
        """What the samples showed; None where no scheme has a use for them."""
        plan = self._probe
        if not will_calibrate(plan, self.scenario.calibration):
            return None
        file = self.folder / "calibration" / "statistics.json"

        def make() -> None:
            calibration = calibrate_plan(
                self.index,
                plan,
                self.scenario.calibration,
                on_progress=self.stages.options.on_progress,
                trust_remote_code=self.stages.options.trust_remote_code,
            )
            write_text(file, to_json(calibration))

        self.stages.once("calibrate", self.made_from(self.scenario.rules), make)
        return from_json(Calibration, file)

    @cached_property
    def _probe(self) -> Plan:
        """What calibration has to serve: the rules' plan, or with `auto` every candidate."""
        settings = plan_settings(self.scenario)
        if not self.scenario.is_mixed:
            return build_plan(self.index, self.scenario.rules, settings)
        return probe_plan(
            build_plan(self.index, rules_with((), {}, self.scenario.rules), settings), self.units
        )

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """What quantizing each unit costs, as far as it was asked for."""
        file = self.folder / SENSITIVITY

        def make() -> None:
            losses = unit_losses(
                self.index,
                self.units,
                self.calibration,
                self.scenario,
                file=self.folder / "sensitivity" / "trials.json",
                on_progress=self.stages.options.on_progress,
                trust_remote_code=self.stages.options.trust_remote_code,
            )
            write_text(file, to_json(losses))

        settings = self.scenario.sensitivity
        inputs = {"sensitivity": value_digest(settings.model_dump(mode="json") if settings else None)}
        self.stages.once("sensitivity", {**self.made_from(self.scenario.rules), **inputs}, make)
        return from_json(Sensitivity, file)

    @cached_property
    def mixed(self) -> MixedScheme | None:
        """What `auto` chose; None where no rule leaves it a choice."""
        if self.scenario.auto is None:
            return None
        mixed = mixed_scheme(
            self.sensitivity.groups,
            {unit.name: unit.allowed for unit in self.units},
            self.scenario.auto,
            rest_bytes=rest_bytes(self.index, self.units, self._probe),
            source_bytes=self.index.num_bytes,
            parameters=self.index.num_parameters,
        )
        write_text(self.folder / MIXED, to_json(mixed))
        return mixed

    @property
    def known_sensitivity(self) -> Sensitivity | None:
        """The losses where the scenario asks for them or a round has needed them, else None."""
        asked = self.scenario.is_mixed or self.scenario.sensitivity is not None
        return self.sensitivity if asked or (self.folder / SENSITIVITY).is_file() else None

    def made_from(self, rules: tuple[Rule, ...]) -> Digests:
        """What a checkpoint by these rules depends on."""
        settings = self.scenario.calibration
        digests = {
            "vexport": __version__,
            "source": checkpoint_digest(self.index.root),
            "rules": value_digest([rule.model_dump() for rule in rules]),
            "calibration": value_digest(settings.model_dump(mode="json") if settings else None),
        }
        if self.scenario.auto:
            digests["candidates"] = value_digest(list(self.scenario.auto.candidates))
        return digests | ({"calibration data": path_digest(settings.data)} if settings else {})
