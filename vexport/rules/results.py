"""Rules of results: the files of harnesses, and accepted baselines."""

from vexport.rules.book import Rule

_AGAIN = "evaluate again"
_LM_EVAL = "check the path; lm-eval writes the folder with --output_path FOLDER --log_samples"
_LM_EVAL_FOLDER = "give the folder that lm-eval wrote, with results_*.json in it"
_RESTORE = "restore it from git, or accept it again"

# Which results.
NO_FOLDER = Rule("results/no-folder", got="no such folder", do=_LM_EVAL)
NO_RESULTS = Rule(
    "results/no-results",
    got="no results with lm-eval's date (results_*.json) in it",
    do=_LM_EVAL,
)
SEVERAL_HARNESSES = Rule(
    "results/several-harnesses",
    got="results of {names:and}",
    need="results of a single harness",
    do="give results of a single harness",
)
SEVERAL_MODELS = Rule(
    "results/several-models",
    got="results of {count} models or runs ({found})",
    need="one model's results",
    do="give one of these",
)
SAMPLES_ALONE = Rule(
    "results/samples-alone",
    got="samples of lm-eval alone",
    need="lm-eval's results",
    do=_LM_EVAL_FOLDER,
)
FILE_NAME = Rule(
    "results/file-name",
    got="{name}",
    need="a name that ends in lm-eval's date",
    do=_LM_EVAL_FOLDER,
)

# Contents of results.
NO_TASK = Rule("results/no-task", got="no tasks", do="evaluate at least one task")
TASK_NAME = Rule(
    "results/task-name",
    got="a task named {name!r}",
    need="a name without folders",
    do=_AGAIN,
)
NO_SAMPLES = Rule(
    "results/no-samples",
    got="no samples, by which the documents of two models are paired",
    do="evaluate again with --log_samples",
)
NO_DOCUMENT = Rule(
    "results/no-document", got="no documents", do="evaluate again with a higher --limit"
)
NO_SCORE = Rule(
    "results/no-score",
    got="no response with a score ({reason})",
    do="evaluate again, or correct the scores",
)
DOCUMENT_TWICE = Rule(
    "results/document-twice",
    got="document {document} twice (filter {filter}, seed {seed}), first in {first}",
    need="each document once, or once for each seed",
    do="remove one of the two, or evaluate again into an empty folder",
)
UNEQUAL_SEEDS = Rule(
    "results/unequal-seeds",
    got="{count:# scored response} to document {document}{reason}, {documents} such documents in "
    "all",
    need="{most:# scored response} to every document",
    do="evaluate these documents again",
)
OTHER_DIRECTION = Rule(
    "results/other-direction",
    got="another higher_is_better than in the rows before",
    need="the same direction in all rows of a task",
    do="correct the file",
)

# Results of two models.
OTHER_HARNESS = Rule(
    "results/other-harness",
    got="results of {harness}",
    need="lm-eval's results, because vexport also evaluates with lm-eval",
    do="compare results of two models with `vexport verdict`",
)
MISSING_TASK = Rule(
    "results/missing-task",
    got="results without the task {task}",
    need="the same tasks on both sides",
    do="evaluate the tasks of these results: --task {tasks}",
)
FURTHER_TASK = Rule(
    "results/further-task",
    got="also task {task}, which is not evaluated",
    need="the same tasks on both sides",
    do="evaluate the tasks of these results: --task {tasks}",
)
OTHER_DOCUMENTS = Rule(
    "results/other-documents",
    got="{count:# document}",
    need="{expected:# document}, as this evaluation has",
    do="use --limit {count}, or no limit if these are all documents",
)
UNKNOWN_TASK = Rule(
    "results/unknown-task",
    got="no task or group {task} on either side{hint}",
    do="choose from {known}",
)
NO_SHARED_TASK = Rule(
    "results/no-shared-task",
    got="{missing}",
    need="at least one task that {other} has, too",
    do="evaluate the same tasks, or name tasks of both sides",
)

# Accepted baselines.
NO_BASELINE = Rule(
    "results/no-baseline",
    got="no accepted baseline",
    do="make it with `vexport eval --accept FILE`",
)
BASELINE_SCORES = Rule(
    "results/baseline-scores",
    got="{reason}",
    need="a score and a question's digest for each document, as vexport wrote them",
    do=_RESTORE,
)
BASELINE_MARGIN = Rule("results/baseline-margin", got="{value!r}", need="{need}", do=_RESTORE)
BASELINE_GROUP = Rule(
    "results/baseline-group", got="{tasks!r}", need="tasks of this file", do=_RESTORE
)

# Reports of runs.
NO_REPORT = Rule(
    "results/no-report", got="no {file}, which a finished run directory has", do="{remedy}"
)
NO_RUN = Rule(
    "results/no-run",
    got="{found}",
    need="a run directory, its report.json, or an accepted baseline",
    do="check the path",
)
TWICE = Rule(
    "results/twice", got="the same as {other}", need="each result once", do="leave one out"
)
TIME = Rule(
    "results/time",
    got="{time!r}",
    need="a time such as 2026-11-20T08:30:00+00:00",
    do="restore the file, or make it again",
)
GIVEN_CHECKPOINT = Rule(
    "results/given-checkpoint",
    got="a report on a checkpoint that was given",
    need="a run that made its checkpoint, as a model card requires",
    do="choose another --format, or report on a run of `vexport run`",
)
