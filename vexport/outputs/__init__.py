"""Where a command writes: apart from what it reads, and only over what vexport itself made."""

from vexport.outputs.separate import NamedPath, require_separate

__all__ = ["NamedPath", "require_separate"]
