"""The stages of a run in their order: when each is done, from what, and what it leaves for the others."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vexport.run import choosing, concluding, making, proving
from vexport.run.directory import Digests
from vexport.run.state import (
    ATTRIBUTION,
    CALIBRATION,
    CANDIDATES,
    CHECKED,
    CONCLUSION,
    DRIFT,
    DRY_LOADED,
    LOADED,
    LOADED_BASELINE,
    MIXED,
    PLAN,
    QUESTIONS,
    REPORT,
    SENSITIVITY,
    SERVED_BASELINE,
    SERVED_CANDIDATE,
    VERDICT,
    WRITTEN,
    Output,
    Run,
)
from vexport.types import Report

LOG = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)


def always(run: Run) -> bool:
    """The condition of a stage that every run has."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[T_co]):
    """One stage of a run. `make` leaves `output`, and sees only those outputs that the stage `reads`.

    `digest` has a digest of each input: a stage that was finished from the same ones is not done again, from
    others it is an InputError. A stage without `digest` takes no time and is done at every call. All of them
    are skipped unless `when`.
    """

    name: str
    reads: tuple[Output[object], ...] = ()
    digest: Callable[[Run], Digests] | None = None
    make: Callable[[Run], T_co | None]
    output: Output[T_co]
    when: Callable[[Run], bool] = always


# fmt: off
STAGES: tuple[Stage[object], ...] = (
    Stage(name="plan candidates",
          make=choosing.plan_candidates, output=CANDIDATES),
    Stage(name="questions",
          make=proving.settle_questions, output=QUESTIONS),
    Stage(name="calibrate", when=choosing.needs_samples, reads=(CANDIDATES,), digest=choosing.scenario_inputs,
          make=choosing.calibrate, output=CALIBRATION),
    Stage(name="sensitivity", when=choosing.is_sensitivity_asked, reads=(CALIBRATION,),
          digest=choosing.sensitivity_inputs, make=choosing.measure, output=SENSITIVITY),
    Stage(name="choose", when=choosing.is_mixed, reads=(CANDIDATES, SENSITIVITY),
          make=choosing.choose, output=MIXED),
    Stage(name="plan", reads=(MIXED,),
          make=making.plan, output=PLAN),
    Stage(name="quantize", reads=(MIXED, PLAN, CALIBRATION), digest=making.checkpoint_inputs,
          make=making.write, output=WRITTEN),
    Stage(name="check", reads=(MIXED, PLAN, WRITTEN), digest=making.checkpoint_inputs,
          make=making.check, output=CHECKED),
    Stage(name="dry load", when=proving.names_devices, reads=(MIXED, CHECKED), digest=proving.device_inputs,
          make=proving.dry_load, output=DRY_LOADED),
    Stage(name="serve baseline", when=proving.is_loadable, reads=(CHECKED, DRY_LOADED, QUESTIONS),
          digest=proving.baseline_inputs, make=proving.serve_baseline, output=SERVED_BASELINE),
    Stage(name="serve candidate", when=proving.is_loadable,
          reads=(MIXED, CHECKED, DRY_LOADED, QUESTIONS, SERVED_BASELINE),
          digest=proving.candidate_inputs, make=proving.serve_candidate, output=SERVED_CANDIDATE),
    Stage(name="load baseline", when=proving.is_served, reads=(SERVED_BASELINE, SERVED_CANDIDATE),
          digest=proving.baseline_sessions, make=proving.load_baseline, output=LOADED_BASELINE),
    Stage(name="load", when=proving.is_served, reads=(SERVED_BASELINE, SERVED_CANDIDATE),
          digest=proving.candidate_sessions, make=proving.load_candidate, output=LOADED),
    Stage(name="drift", when=proving.is_served, reads=(SERVED_BASELINE, SERVED_CANDIDATE),
          make=concluding.measure_drift, output=DRIFT),
    Stage(name="judge", when=concluding.is_evaluated,
          reads=(LOADED, DRIFT, SERVED_BASELINE, SERVED_CANDIDATE),
          make=concluding.judge, output=VERDICT),
    Stage(name="conclude", reads=(CHECKED, DRY_LOADED, LOADED, VERDICT),
          make=concluding.conclude_run, output=CONCLUSION),
    Stage(name="attribute", when=concluding.is_explained,
          reads=(SERVED_BASELINE, SERVED_CANDIDATE, CONCLUSION),
          make=concluding.attribute_loss, output=ATTRIBUTION),
    Stage(name="report",
          reads=(PLAN, CALIBRATION, SENSITIVITY, MIXED, WRITTEN, CHECKED, DRY_LOADED, LOADED_BASELINE, LOADED,
                 DRIFT, VERDICT, CONCLUSION, ATTRIBUTION),
          make=concluding.report, output=REPORT),
)
# fmt: on


def finish(run: Run) -> Report:
    """Do every stage that is not done yet; the report of all of them."""
    for stage in STAGES:
        if is_due(run, stage):
            do(run, stage)
    return run.result(REPORT)


def is_due(run: Run, stage: Stage[object]) -> bool:
    """Return whether a run has the stage, as far as the stages before it tell."""
    run.readable = stage.reads
    try:
        return stage.when(run)
    finally:
        run.readable = None


def do(run: Run, stage: Stage[object]) -> None:
    """Do a stage unless it was finished from the same inputs; InputError where it was from others."""
    run.readable = stage.reads
    try:
        inputs = stage.digest(run) if stage.digest else None
        if inputs is not None and run.directory.is_done(stage.name, inputs):
            LOG.debug("%s: done before", stage.name)
            run.restore(stage.output)
            return
        start = time.monotonic()
        run.keep(stage.output, stage.make(run))
        LOG.debug("%s: %.1f s", stage.name, time.monotonic() - start)
        if inputs is not None:
            made = run.checkpoint if stage.output == WRITTEN else None
            run.directory.finish(stage.name, inputs, time.monotonic() - start, made)
    finally:
        run.readable = None
