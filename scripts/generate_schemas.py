#!/usr/bin/env python3
"""Write vexport/reports/*.schema.json from the types; run it after a change of Report or CheckReport."""

from vexport.reports.json import write_schemas

write_schemas()
