"""`vexport run --until-pass`: what gets more bits after a FAIL, and what each round cost."""

from vexport.errors import InputError, raise_all
from vexport.reports.formatting import plural, size
from vexport.run.attempts import ATTEMPTS, read_attempts, set_aside
from vexport.run.choosing import chosen_schemes
from vexport.run.state import SENSITIVITY, Conclusion, Run
from vexport.scenario import Scenario
from vexport.sensitivity.promote import loss_of, next_promotions
from vexport.types import Attempt, Plan, Report

# Five promotions leave a billionth of the predicted loss: what failed is then kept in 16 bits.
MOST_ROUNDS = 6


def require_promotable(scenario: Scenario) -> None:
    """InputErrors for a scenario of which nothing says that it passes, or what to promote."""
    needed = {
        "evaluate": (scenario.evaluate, "tasks, whose verdict says when to stop"),
        "calibration": (scenario.calibration, "samples that show which layers lose most"),
    }
    raise_all(
        [
            InputError(f"{scenario.name}: {key}", got="nothing", need=need, fix="add it for --until-pass")
            for key, (value, need) in needed.items()
            if value is None
        ]
    )


def may_promote(report: Report, run: Run) -> bool:
    """Whether a round failed on accuracy, and another is left."""
    rounds = len(read_attempts(run.folder).failed) + 1
    is_lossy = report.load.ok and report.verdict is not None and report.outcome == "FAIL"
    return is_lossy and rounds < MOST_ROUNDS


def promote(report: Report, run: Run) -> bool:
    """Set a failed round aside and begin the next; False where nothing is left to promote.

    Reads the losses, which must have been measured.
    """
    attempts = read_attempts(run.folder)
    number = len(attempts.failed) + 1
    promotions = next_promotions(run.result(SENSITIVITY).groups, chosen_schemes(run), number)
    if not promotions:
        return False
    price = sum(promotion.num_bytes for promotion in promotions)
    conclusion = Conclusion(outcome=report.outcome, reason=report.reason)
    failed = attempt_of(run, report.plan, conclusion, f"{ATTEMPTS}/{number}")
    set_aside(run.directory, failed, attempts, promotions)
    share = f"{100 * price / report.plan.output_bytes:.1f} %"
    note = (
        f"round {number + 1}: {plural(len(promotions), 'group')} promoted for {size(price)} more (+{share})"
    )
    run.options.on_progress(note, 1, 1)
    return True


def attempts_with(run: Run, plan: Plan, conclusion: Conclusion) -> tuple[Attempt, ...]:
    """All rounds with this one, which ran in the run directory itself; none where there was but one."""
    failed = read_attempts(run.folder).failed
    return (*failed, attempt_of(run, plan, conclusion, ".")) if failed else ()


def attempt_of(run: Run, plan: Plan, conclusion: Conclusion, folder: str) -> Attempt:
    """The round that runs, whose results are in `folder`."""
    attempts, schemes = read_attempts(run.folder), chosen_schemes(run)
    return Attempt(
        number=len(attempts.failed) + 1,
        folder=folder,
        promotions=attempts.current,
        output_bytes=plan.output_bytes,
        loss=sum(loss_of(group, schemes[group.name]) for group in run.result(SENSITIVITY).groups),
        outcome=conclusion.outcome,
        reason=conclusion.reason,
    )
