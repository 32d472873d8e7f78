"""Places to write to: apart from what is read, and only over what vexport itself made."""

from vexport.outputs.directory import (
    aside_folder,
    kept_as_failed,
    new_directory,
    resumable_directory,
    working_folder,
)
from vexport.outputs.replaceable import (
    RECIPE,
    FolderKind,
    NamedPath,
    refuse_existing,
    refuse_others,
    require_new_answer,
    require_separate,
    written_alone,
)
