"""Rules of rounding with the help of text."""

from vexport.rules.book import Rule

FALLBACK = Rule(
    "rounding/fallback",
    "warning",
    got="weights rounded to nearest: {reason}",
    need="weights rounded with the help of calibration text",
    do="calibrate with more rows, or give these layers a rule with rounding: nearest",
)
MEMORY = Rule(
    "rounding/memory",
    got="{samples} samples with {tokens:,} tokens in total, which need {needed:.1f} GB while "
    "rounding",
    need="at most {most:.1f} GB, half of the memory",
    do="{remedy}",
)
