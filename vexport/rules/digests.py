"""Rules of the files' recorded digests."""

from vexport.rules.book import Rule

_LIST = (
    "download or export the file again; if the list may be wrong, get it from the checkpoint's "
    "publisher"
)

CHANGED_FILE = Rule(
    "digests/changed-file",
    claim="values",
    got="digest {actual}",
    need="digest {digest}, as recorded",
    do="download or export the file again; if it was changed on purpose, remove {key!r} from "
    "{recipe}",
)
OTHER_FILE = Rule(
    "digests/other-file",
    claim="values",
    got="digest {actual}",
    need="digest {digest}, as listed",
    do=_LIST,
)
MISSING_FILE = Rule(
    "digests/missing-file",
    claim="values",
    got="no such file, but digest {digest} is listed for it",
    do=_LIST,
)
