"""Rules of the files' recorded digests."""

from vexport.rules.book import Rule

_LIST = (
    "download or export the file again; if the list may be wrong, get it from the checkpoint's "
    "publisher"
)

_DOWNLOAD = "download the file again"

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
OTHER_THAN_HUB = Rule(
    "digests/other-than-hub",
    claim="values",
    got="digest {actual}",
    need="digest {digest}, as on the hub",
    do=_DOWNLOAD,
)
MISSING_FILE = Rule(
    "digests/missing-file",
    claim="values",
    got="a missing file, which the hub has with digest {digest}",
    do=_DOWNLOAD,
)
NOT_VERIFIED = Rule(
    "digests/not-verified",
    "info",
    got="{count:# file} without a digest of the hub",
    need="verified files only",
    do="compare with --digests FILE if the files matter",
)
