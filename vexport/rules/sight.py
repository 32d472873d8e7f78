"""Rules of models that take pictures, and of the task `sight`."""

from vexport.rules.book import Rule

_DO_TOWER = (
    "compare the tower and the projector with the source (`vexport check --source`), and look at "
    "the processor's files"
)
BLIND = Rule("sight/blind", got="shows a blind model: {how}", do=_DO_TOWER)
BLIND_BASELINE = Rule(
    "sight/blind-baseline",
    got="cannot show a loss: the baseline does not see: {how}",
    do="choose a baseline that takes pictures, or check how the baseline is served",
)
NOT_SEEN = Rule(
    "sight/not-seen",
    got="does not show that the model sees: {how}",
    do=_DO_TOWER,
)
TEXT_MODEL = Rule(
    "sight/text-model",
    got="a model without pictures ({architecture})",
    need="a model that takes pictures, for the task {task}",
    do="remove the task, or choose another checkpoint",
)
REFUSED = Rule(
    "sight/refused",
    got="{reply}",
    need="a model and a chat template that take pictures",
    do="remove the task, or raise max_model_len if the prompt is too long",
)
TASK = Rule(
    "sight/task",
    got="{found}",
    need="a task that generates text, from text or pictures (`output_type: generate_until`)",
    do="remove the task",
)
DOCUMENT = Rule(
    "sight/document",
    got="{reason}",
    need="a picture for each `<image>` of the text, in the data or in the folder of the data",
    do="correct the document. lm-eval passes no pictures of few-shot examples (--num-fewshot 0)",
)
