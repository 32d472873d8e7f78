"""The escapes of `vexport.errors.escaping`, under the name that the formats know."""

from vexport.errors.escaping import clip as clip
from vexport.errors.escaping import visible as visible
