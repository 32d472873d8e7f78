"""Names of metrics that are programs: lm-eval gives what it does not know to `evaluate`, which imports it."""

from pathlib import Path

METRIC_CODE = "Python that would be run"
METRIC_FIX = "add --trust-remote-code if you trust it, or name a metric of lm-eval"


def is_foreign_code(metric: str) -> bool:
    """Whether `evaluate.load` would import a file, or what an account of the hub has (evaluate/loading.py).

    A name alone is lm-eval's own, or one of the account of `evaluate`, unless a folder here has that name.
    """
    return "/" in metric or metric.endswith(".py") or Path(metric, f"{metric}.py").is_file()
