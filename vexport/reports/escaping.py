"""The escapes of `vexport.escaping`, under the name that the formats know."""

from vexport.escaping import clip as clip
from vexport.escaping import visible as visible
