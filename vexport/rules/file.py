"""Rules of single files that users or other programs wrote."""

from vexport.rules.book import Rule

_RESTORE = "correct or restore the file"
_PATH = "check the path"
_AGAIN = "restore the file, or evaluate again"

PATH = Rule(
    "file/path",
    got="{reason}",
    need="a usable path",
    do="check the path and its permissions",
)
MISSING = Rule("file/missing", got="no such file", do=_PATH)
LFS_POINTER = Rule(
    "file/lfs-pointer",
    got="a Git LFS pointer",
    need="the file itself",
    do="run `git lfs pull`, or check out with `lfs: true`",
)
CHANGED = Rule(
    "file/changed",
    got="{change}",
    need="a file that does not change while it is read",
    do="run the command again while no other process writes to the file",
)
DEVICE = Rule("file/device", got="a pipe or a device", need="a file", do="give the path of a file")
UNREADABLE = Rule("file/unreadable", got="{reason}", need="a file that can be read", do=_PATH)
TOO_LARGE = Rule(
    "file/too-large",
    got="more than {most} MB",
    need="{need} of at most {most} MB",
    do="check the path, or shorten the file",
)
JSON = Rule("file/json", got="broken JSON ({reason})", need="{need}", do=_RESTORE)
JSON_OBJECT = Rule(
    "file/json-object", got="{kind} instead of an object", need="{need}", do=_RESTORE
)
YAML = Rule("file/yaml", got="{reason}", need="valid YAML", do="correct the file")
TOML = Rule("file/toml", got="{reason}", need="valid TOML", do="correct the file")
TOML_KEY = Rule(
    "file/toml-key",
    got="a key of more than {most} parts",
    need="shorter keys",
    do="correct the file",
)
PARQUET = Rule("file/parquet", got="{reason}", need="{need}", do=_AGAIN)
LONG_LINE = Rule("file/long-line", got="a longer line", need="at most {most} MB", do=_AGAIN)
FIELDS = Rule(
    "file/fields",
    got="a row without usable {names:and}",
    need="{need}",
    do="correct the file, or evaluate again with a version that vexport reads",
)
FIELD_TWICE = Rule(
    "file/field-twice", got="the field {name} twice", need="each field once", do=_AGAIN
)
DEPTH = Rule(
    "file/depth",
    got="more than {most} levels of lists and objects",
    do=_AGAIN,
)
NUMBER = Rule("file/number", got="{name} {value}", need="a number", do=_AGAIN)
FINITE_NUMBER = Rule("file/finite-number", got="{name} {value}", need="a finite number", do=_AGAIN)
NUMBER_RANGE = Rule(
    "file/number-range", got="{name} {value}", need="a number from {low:g} to {high:g}", do=_AGAIN
)
WHOLE_NUMBER = Rule(
    "file/whole-number", got="{name} {value}", need="a whole number from 0", do=_AGAIN
)
IDENTITY = Rule(
    "file/identity", got="{name} {value}", need="a number or a text", do="name each document"
)
