"""Read and validate scenarios. A scenario describes a complete run in a YAML file."""

from vexport.scenario.calibration import Calibration, Sensitivity, default_calibration
from vexport.scenario.evaluate import (
    DEFAULT_ALPHA,
    DEFAULT_KL_LIMIT,
    DEFAULT_KL_PROMPTS,
    DEFAULT_NLL_LIMIT,
    DEFAULT_TEXT_ROWS,
    DEFAULT_TEXT_TOKENS,
    Evaluate,
)
from vexport.scenario.planning import Planning
from vexport.scenario.reading import base_scenario, is_scenario, problems_at, read_scenario
from vexport.scenario.rules import AUTO, Auto, IgnoredLayers, Rule, parse_group_size
from vexport.scenario.scenario import Check, Scenario
from vexport.scenario.serve import Serve
from vexport.scenario.variants import Variant, Variants
