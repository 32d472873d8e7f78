"""Rules of calibration: the text, the model that reads it, and what was observed."""

from vexport.rules.book import Rule

ROW_FORMS = (
    "a row with text, messages or conversations (and tools), input_ids, or a pair such as prompt "
    "and completion, instruction and output, query and response, or question and answer"
)
_ROW = "correct or remove the row"
_FILE = "check the file"
_SPLIT = "correct calibration.split"
_NO_TEXT = "use a scheme that needs no text, with --rounding nearest"
_CHECKPOINT = f"restore the checkpoint, or {_NO_TEXT}"
_CODE = "review the code, then add --trust-remote-code"

# The data.
NO_DATA = Rule(
    "calibration/no-data",
    got="no such file or folder, and no data set on the hub (ORG/NAME)",
    do="check the path",
)
EMPTY_FOLDER = Rule(
    "calibration/empty-folder",
    got="a folder without data files",
    need="files that end in {suffixes}",
    do="check the path",
)
SPLIT = Rule(
    "calibration/split",
    got="no split {split}: its splits are {known}",
    do=_SPLIT,
)
SPLIT_OF_FOLDER = Rule(
    "calibration/split-of-folder",
    got="no file of the split {split}: no file or folder has {split} in its name",
    do=_SPLIT,
)
SAVED = Rule(
    "calibration/saved",
    got="entries that are not in its folder",
    need="a data set as `datasets.save_to_disk` writes it",
    do="save the data set again",
)
DATASET = Rule(
    "calibration/dataset",
    got="{reason}",
    need="a dataset that the package `datasets` can read, and an existing split and subset",
    do="give the split as ORG/NAME:SPLIT:COLUMN, and the subset as calibration.subset in a "
    "scenario",
)
PIPE = Rule(
    "calibration/pipe",
    got="a pipe or a device",
    need="a file or a folder",
    do="write the text to a file",
)
COMPRESSED = Rule(
    "calibration/compressed",
    got="a compressed {suffix} file",
    need="a plain {suffix} file",
    do="unpack {name}",
)
EXPANSION = Rule(
    "calibration/expansion",
    got="a file that expands to more than {times} times its size",
    need="compressed text",
    do="unpack it and check its content",
)
JSON_LINES = Rule(
    "calibration/json-lines",
    got="{found}",
    need="JSON lines, or one JSON list of objects",
    do="write one row per line: `jq -c {filter} {name}`",
)
TEXT = Rule(
    "calibration/text",
    got="data that is no text and begins with {start}",
    need="text in UTF-8: JSON lines, a JSON list or plain text; or parquet",
    do="convert the text to UTF-8 (`iconv -f utf-16 -t utf-8`), or name the file by its format, as "
    ".parquet, .arrow or .jsonl.gz",
)
ENCODING = Rule(
    "calibration/encoding",
    got="text that is not UTF-8: byte 0x{byte:02x} at position {position}",
    need="text in UTF-8",
    do="convert the file to UTF-8, from Latin-1 by `iconv -f latin1 -t utf-8`",
)
LONG_ROW = Rule(
    "calibration/long-row", got="a longer row", need="rows of at most {most} MB", do="split the row"
)
LONG_LIST = Rule(
    "calibration/long-list",
    got="a larger file",
    need="a JSON list of at most {most} MB",
    do="write JSON lines",
)
JSON = Rule(
    "calibration/json",
    got="{reason}",
    need="a JSON list of objects, or JSON lines",
    do="correct the file",
)
TABLE = Rule("calibration/table", got="{reason}", need="a valid {suffix} file", do=_FILE)

# The rows.
NO_ROWS = Rule("calibration/no-rows", got="{found}", need=ROW_FORMS, do="add rows")
ROW = Rule("calibration/row", got="{reason}", need=ROW_FORMS, do=_ROW)
JSON_ROW = Rule(
    "calibration/json-row",
    got="{reason}",
    need=ROW_FORMS,
    do=f"{_ROW}, or name a file of plain text .txt",
)
ROW_FORM = Rule(
    "calibration/row-form",
    got="{reason}",
    need=ROW_FORMS,
    do="name the column of the text or conversation (DATA:COLUMN), or correct the row",
)
TURNS = Rule(
    "calibration/turns", got="{reason}", need="turns that the chat template renders", do=_ROW
)
NO_TEXT = Rule(
    "calibration/no-text",
    got="no row that calibration can read: {each} images, video or sound (first: {what!r}, "
    "{place})",
    do="add texts, or pictures if the model takes them (`vexport explain pictures`)",
)
_PICTURES = (
    "pictures as data addresses or bytes, or as files in the folder of the data (PNG, JPEG, WebP, "
    "GIF, BMP, TIFF)"
)
PICTURE = Rule("calibration/picture", got="{reason}", need=_PICTURES, do=_ROW)
PLACEHOLDERS = Rule(
    "calibration/placeholders",
    got="{reason}",
    need="a placeholder such as <image> for each picture of the row, or no placeholder",
    do=_ROW,
)
REMOTE_PICTURE = Rule(
    "calibration/remote-picture",
    got="{reason}",
    need=_PICTURES,
    do="download the pictures into the folder of the data, and name the files in the rows",
)
PICTURE_SIZE = Rule(
    "calibration/picture-size",
    got="{reason}",
    do="scale the picture down, or remove the row",
)
PICTURE_TOKENS = Rule(
    "calibration/picture-tokens",
    got="no row whose pictures fit in a sample: the first needs {reason} ({place})",
    do="raise --seq-len, or scale the pictures down",
)
PROCESSOR = Rule(
    "calibration/processor",
    got="no usable processor of pictures ({reason})",
    do="add the processor's files (preprocessor_config.json) from the source model, or use text "
    "only",
)
PROCESSOR_CODE = Rule(
    "calibration/processor-code",
    got="a processor of pictures that needs Python code from the checkpoint",
    do=_CODE,
)
CHAT_TEMPLATE = Rule(
    "calibration/chat-template",
    got="a model without a chat template, but {text} has conversations",
    need="a chat template that renders conversations",
    do="add {file} to the model, or use rows of text (FILE:COLUMN names a column)",
)
ANSWER_MARKS = Rule(
    "calibration/answer-marks",
    got="a chat template that does not mark the assistant's turns, but only the answers in {text} "
    "count",
    need="the tags generation and endgeneration around the text of these turns",
    do="add the tags to {file} of the model, use rows of input_ids with loss_mask, or leave out "
    "--calibrate-on",
)
NO_ANSWERS = Rule(
    "calibration/no-answers",
    got="{count:# sample} without an answer, and only answers count",
    need="input_ids with loss_mask, conversations with a turn of the assistant, or pairs such as "
    "prompt and completion",
    do="add answers, use a longer --seq-len, or leave out --calibrate-on",
)
ANSWERS_OF_EXPERTS = Rule(
    "calibration/answers-of-experts",
    got="a module that does not see the tokens in the order of the text, as a list of experts",
    need="a module whose input shows which tokens are answers",
    do="leave out --calibrate-on, or keep this layer unquantized",
)
TOKEN_OFFSETS = Rule(
    "calibration/token-offsets",
    got="a tokenizer that does not show the characters of a token, which finds the tokens of "
    "answers",
    need="a fast tokenizer (tokenizer.json)",
    do="convert the tokenizer, or use rows of input_ids with loss_mask",
)
TOKENIZER = Rule(
    "calibration/tokenizer",
    got="no usable tokenizer ({reason})",
    do="add its files, or give calibration rows as input_ids",
)
TOKENIZER_CODE = Rule(
    "calibration/tokenizer-code",
    got="a tokenizer that needs Python code from the checkpoint",
    do=f"{_CODE}; if a server reports the tokenizer, pass it with --tokenizer as well",
)

# The model.
MODEL = Rule(
    "calibration/model",
    got="a model that transformers refuses ({reason})",
    need="a model that transformers can build for calibration",
    do=f"correct config.json, or {_NO_TEXT}",
)
MODEL_CODE = Rule(
    "calibration/model-code",
    got="a model that needs Python code from the checkpoint",
    do=_CODE,
)
DECODER = Rule(
    "calibration/decoder",
    got="no list of layers, as each decoder-only model has it",
    do=_NO_TEXT,
)
DEVICE = Rule(
    "calibration/device",
    got="a device that cannot be used ({reason})",
    need="a device that this version of torch supports, such as cpu or cuda:0",
    do="use another device, or install the build of torch for it",
)
NO_WEIGHT = Rule(
    "calibration/no-weight",
    got="no tensor with this name, which the model class needs",
    do=_CHECKPOINT,
)
WEIGHT_SHAPE = Rule(
    "calibration/weight-shape",
    got="tensors that do not fit {target} ({reason})",
    need="the number and shapes of tensors that the model class expects",
    do=_CHECKPOINT,
)
LAYER_ORDER = Rule(
    "calibration/layer-order",
    got="{found}",
    need="decoder layers that run in order, each on the output of the previous layer",
    do=_NO_TEXT,
)

# What was observed.
NO_TOKENS = Rule(
    "calibration/no-tokens",
    got="0 tokens in calibration",
    need="at least 1 token for {purpose}",
    do="add samples that reach this layer (for an expert, --calibrate-all-experts), or use "
    "{alternative}",
)
UNREACHABLE = Rule(
    "calibration/unreachable",
    got="{reason}",
    need="a layer with an input that vexport can observe",
    do="use a scheme, rounding and observer without calibration for this layer",
)
KV_CACHE = Rule(
    "calibration/kv-cache",
    got="no attention layer calls transformers' attention interface, where keys and values are "
    "observed",
    do="leave the KV cache unquantized",
)
NOT_FINITE = Rule(
    "calibration/not-finite",
    got="calibration row {row} produces an {side} that is not finite",
    do="remove the row, or check the weights of this layer and keep it unquantized",
)
NOT_OBSERVED = Rule(
    "calibration/not-observed",
    got="{tokens} tokens in calibration",
    need="at least one observation for its static scale",
    do="add samples that reach this module, or keep it unquantized",
)
NOT_FINITE_MODULE = Rule(
    "calibration/not-finite-module",
    got="values that are not finite",
    need="finite values for its scale",
    do="find the layer and the sample that produce them, or keep this module unquantized",
)
