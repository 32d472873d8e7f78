"""Rules of the paths that vexport writes to, and of the digests of what it wrote."""

from vexport.rules.book import Rule

_OTHER = "choose another path"
_DIGESTS = "create the list again, or get it from the producer of the checkpoint"

OVERLAP = Rule(
    "outputs/overlap",
    got="{relation} {other}",
    need="a separate path",
    do="choose another {label}; nothing was changed",
)
PATH = Rule(
    "outputs/path",
    got="a path that cannot be resolved",
    need="a valid path",
    do="check the path and its links",
)
FOREIGN_FILES = Rule(
    "outputs/foreign-files",
    got="{names}, which vexport did not write",
    need="a folder that contains only vexport's files",
    do="move the other files elsewhere, or choose another folder",
)
FILE = Rule("outputs/file", got="a file", need="a folder to write to", do=_OTHER)
FOREIGN_FOLDER = Rule(
    "outputs/foreign-folder",
    got="a folder that vexport did not make",
    need="an empty folder or {kind}",
    do="choose another path, or move the folder away (mv {path} {path}.old)",
)
NOT_EMPTY = Rule(
    "outputs/not-empty",
    got="a folder that is not empty",
    need="a new folder",
    do="choose another path or add --overwrite",
)
LOCKED = Rule(
    "outputs/locked",
    got="another process is writing it",
    do="wait for it, or choose another {option}",
)
MOUNT_POINT = Rule(
    "outputs/mount-point",
    got="a mount point",
    need="a folder that can be renamed",
    do="choose a folder below it",
)
FOREIGN_WORK = Rule(
    "outputs/foreign-work",
    got="a hidden folder {work} with content that vexport did not write{entry}",
    need="a working folder that only vexport uses",
    do="check and remove {work}, or choose another path",
)
REPLACED_MEANWHILE = Rule(
    "outputs/replaced-meanwhile",
    got="another program created a folder here while vexport was replacing the old folder",
    do="move the old folder ({old}) elsewhere",
)
NO_MANIFEST = Rule(
    "outputs/no-manifest",
    got="it has no {manifest}, the list of vexport's files, so none is removed",
    do="move the folder away (mv {path} {path}.old), or choose another folder",
)
NO_DIGESTS = Rule(
    "outputs/no-digests",
    got="it has no {key}, as each checkpoint that vexport wrote",
    do="remove --digests, or give a list that sha256sum wrote",
)
NO_HUB_DIGESTS = Rule(
    "outputs/no-hub-digests",
    got="none of its files has a digest of the hub",
    need="a snapshot in the hub's cache, or a download with --local-dir and its .cache folder",
    do="download the model again with `hf download`, or compare with --digests FILE",
)
DIGEST_LIST = Rule(
    "outputs/digest-list", got="{reason}", need="a list that sha256sum wrote", do="check the path"
)
DIGEST = Rule("outputs/digest", got="{value}", need="a digest and a file name", do=_DIGESTS)
DIGEST_PATH = Rule(
    "outputs/digest-path",
    got="the path {path}",
    need="a path inside the checkpoint",
    do="run sha256sum in the checkpoint's folder",
)

# The run directory of a call that resumes.
OTHER_NUMBER = Rule(
    "outputs/other-number",
    got="the results of {found}, but this call evaluates {given}",
    do="choose another {option}, or {restart}",
)
OTHER_INPUTS = Rule(
    "outputs/other-inputs",
    got="an earlier run with another {changed} (stage {stage!r})",
    do="choose another {option}, or {restart}",
)
CHANGED_FILES = Rule(
    "outputs/changed-files",
    got="files that have changed since the run wrote them, so its results are outdated",
    do="restore them, or {restart}",
)
