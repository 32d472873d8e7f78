"""Rules of margins and of the metrics that decide."""

from vexport.rules.book import Rule

NO_TASK = Rule(
    "margin/no-task",
    got="{name}",
    need="the name of a task or group ({names:or})",
    do="name one of these; for tasks in a group, name the group",
)
NO_METRIC = Rule(
    "margin/no-metric",
    got="{metric}{reason}",
    need="a metric that can decide ({known:or})",
    do="name one of these, or restore the task's files",
)
DIRECTION = Rule(
    "margin/direction",
    got="{gate}",
    need="{metric}:{recorded}, as in the results of {task}",
    do="leave it out",
)
KIND = Rule(
    "margin/kind",
    got="{margin} for {metric}",
    need="points for a share of correct responses, and a part of the value for other metrics",
    do="use --margin {task}={fitting}",
)
