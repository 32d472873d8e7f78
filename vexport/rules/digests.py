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
    got="no such file, although its digest {digest} is recorded",
    do="download or export the file again",
)
OTHER_THAN_HUB = Rule(
    "digests/other-than-hub",
    claim="values",
    got="digest {actual}",
    need="digest {digest}, as on the hub",
    do="download the file again",
)
NOT_VERIFIED = Rule(
    "digests/not-verified",
    "info",
    got="{count:# file} without a digest of the hub",
    need="verified files only",
    do="compare with --digests FILE if the files matter",
)
