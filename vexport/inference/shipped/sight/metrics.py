"""Names of the metrics of `sight`."""

CHANGES, WITHOUT, REJECTS = (
    "changes_with_picture",
    "changes_without_picture",
    "rejects_other_picture",
)
