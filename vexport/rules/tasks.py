"""Rules of the tasks of lm-eval: names, YAML files, documents, metrics and prompts."""

from vexport.rules.book import Rule

NO_SUCH_TASK = Rule(
    "tasks/no-such-task",
    got="an unknown name",
    need="a task of lm-eval or a YAML file",
    do="{remedy}, or give its YAML file with --task, or its folder with --include-path",
)
TWICE = Rule(
    "tasks/twice",
    got="a second task {name}",
    need="each task name only once",
    do="remove one of the tasks, or rename it (key `task`)",
)
SHIPPED_NAME = Rule(
    "tasks/shipped-name",
    got="the name {name}, which a task that ships with vexport has",
    do="rename your task (key `task` or `group`)",
)
NAME = Rule(
    "tasks/name", got="{name!r}", need="a valid file name", do="use letters, digits, - and _"
)
KEY = Rule("tasks/key", got="no usable value of the key {key}", do="add or correct the key")
TOO_LARGE = Rule(
    "tasks/too-large",
    got="more than {most:,} {what}",
    do="split the group, or join files that include each other",
)
NO_FILE = Rule(
    "tasks/no-file",
    got="no file {file}",
    do="put it next to the YAML file, or correct dataset_kwargs.data_files",
)
SEVERAL_FILES = Rule(
    "tasks/several-files",
    got="{count} files {file}",
    need="one file of documents",
    do="name one of them: {files:or}",
)
PICKLED = Rule(
    "tasks/pickled",
    got="pickled documents",
    need="data that cannot run code",
    do="store the documents as JSON lines or parquet",
)
CODE = Rule(
    "tasks/code",
    got="{name}, Python code that would run",
    do="add --trust-remote-code if you trust the code, or use a task or a metric of lm-eval",
)
MODEL_CODE = Rule(
    "tasks/model-code",
    got="the task runs Python code that the model writes",
    do="add --trust-remote-code, preferably in a container",
)
METRIC = Rule(
    "tasks/metric",
    got="{metric}",
    need="{known:or} ({output_type})",
    do="correct the name{hint}",
)
NO_METRIC = Rule(
    "tasks/no-metric",
    got="neither lm-eval nor the hub nor the cache of `evaluate` has this metric",
    do="correct the name, or load it once on a machine with access to the hub (`python -c "
    "\"import evaluate; evaluate.load('{metric}')\"`), and copy the folder `modules` of HF_HOME "
    "from there",
)
LOAD = Rule(
    "tasks/load", got="{reason}", need="a task that lm-eval can load", do="correct the task"
)
THINKING = Rule(
    "tasks/thinking",
    got="enable_thinking with the output type {kind}",
    need="a task that generates text, because a model does not think to score given texts",
    do="remove enable_thinking (--enable-thinking), or evaluate this task in a separate call",
)
TEMPLATE = Rule(
    "tasks/template",
    got="{reason}",
    need="a template that fits the task's documents",
    do="correct doc_to_text, doc_to_target or doc_to_choice of the task",
)
