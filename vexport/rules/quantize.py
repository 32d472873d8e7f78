"""Rules of a source and of a call that quantizes it."""

from vexport.rules.book import Rule

ALREADY_QUANTIZED = Rule(
    "quantize/already-quantized",
    got="a checkpoint that is already quantized ({method})",
    need="an unquantized model",
    do="use the original model; `vexport check` and `vexport eval` accept this checkpoint",
)
NO_CALIBRATION = Rule(
    "quantize/no-calibration",
    need="{samples}",
    do="add --calibration DATA (in a scenario `calibration:`); `default` is the text that ships "
    "with vexport",
)
NO_TOWER = Rule(
    "quantize/no-tower",
    got="no tower or projector for pictures that vLLM can load quantized",
    do="leave out --include-vision (in a scenario `include_vision:`)",
)
NEAREST_TOWER = Rule(
    "quantize/nearest-tower",
    "info",
    got="{count:# layer} of the tower and its projector, rounded to nearest: text rounds only the "
    "language model",
    do="check the responses with `vexport eval --task sight`",
)
NO_PICTURES = Rule(
    "quantize/no-pictures",
    got="no calibration row has pictures, but {reason} needs the inputs of the tower",
    do="calibrate on rows with pictures, or use a scheme without static scales (and an observer "
    "that needs no importance)",
)
FOLDER_REPLACED = Rule(
    "quantize/folder-replaced",
    got="the folder was replaced while it was being written",
    do="run the command again when no other call writes this folder",
)
OTHER_PLAN = Rule(
    "quantize/other-plan",
    got="its plan differs from the plan of rank 0",
    do="start all ranks with the same source and arguments",
)
NOT_FINITE = Rule(
    "quantize/not-finite",
    got="NaN or infinite values",
    need="finite weights",
    do="restore the source checkpoint",
)
KV_HEADS = Rule(
    "quantize/kv-heads",
    got="keys and values of {heads} heads in calibration",
    need="keys and values of {needed}",
    do="keep the KV cache in the model's dtype, or use fp8 (one scale for all heads)",
)
