"""The output folders of lm-eval that `tests/scores` makes."""

from tests.scores.conftest import copies, lm_eval_runs

__all__ = ["copies", "lm_eval_runs"]
