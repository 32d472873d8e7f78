"""Files of a session with a model, in the folder with the model's responses."""

from pathlib import Path

from vexport.engine.messages import ANSWERS
from vexport.outputs.manifest import (
    is_recorded,
    record,
    remove_recorded,
    require_manifest,
    unlisted_entries,
)
from vexport.outputs.replaceable import is_filled_folder, require_no_others

LOGPROBS = "logprobs.safetensors"
TEXT_FILE = "text.safetensors"
"""File with the log-probability of each token of the text."""
ENGINE_LOG = "vllm.log"
SERVER_LOG = "lm-eval.log"


def add_to_manifest(file: Path) -> Path:
    """Add a file to the manifest before another process writes it, and return its path."""
    record(file)
    return file


def clear_session(folder: Path, root: Path) -> None:
    """Remove the files of an unfinished session, except the kept responses.

    `root` is the folder with the manifest. Raises InputError, before anything is removed, if `root`
    has no manifest or if `folder` has files that vexport did not write.
    """
    if not is_filled_folder(folder):
        return
    require_manifest(root)
    require_no_others(root, unlisted_entries(root, folder))
    remove_recorded(root, folder, folder.glob(f"{ANSWERS}*"))


def remove_answers(folder: Path) -> None:
    """Remove the kept responses, once lm-eval's results are complete."""
    for file in folder.glob(f"{ANSWERS}*"):
        if is_recorded(file):
            file.unlink()
