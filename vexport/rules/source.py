"""Rules of a checkpoint that is compared with its unquantized source."""

from vexport.rules.book import Rule

_EXPORT = "export the checkpoint again"
_EXPORT_OR_OTHER_SOURCE = (
    "export the checkpoint again; if the weights were smoothed or rotated, pass the smoothed or "
    "rotated model with --source"
)
_COPY_FILE = "copy the source's file"
_COPY_VALUE = "copy the source's value"
_INTENDED = "ignore this if the change is intended"
_COMPARABLE = "a quantized weight to compare with the source's weight"
_EXPONENTS = "exponents that do not change the outputs of any layer"
_OTHER_SOURCE = "pass the source that the checkpoint was made from, or export the checkpoint again"

QUANTIZED_SOURCE = Rule(
    "source/quantized-source",
    got="a quantized checkpoint",
    need="the unquantized model that the checkpoint was made from",
    do="pass the unquantized model with --source",
)
NO_SOURCE_WEIGHT = Rule(
    "source/no-source-weight",
    got="no weight of this layer in the source",
    do="pass the model that the checkpoint was made from with --source",
)
OTHER_SIZE = Rule(
    "source/other-size",
    got="tensors that do not fit the source's weight {shape}",
    need=_COMPARABLE,
    do=_EXPORT,
)
DIFFERENT_WEIGHT = Rule(
    "source/different-weight",
    claim="values",
    got="{faults}",
    need="the source's weight, rounded to {scheme} (SQNR about {rounding:.1f} dB)",
    do=_EXPORT_OR_OTHER_SOURCE,
)
ROUNDED_FAR = Rule(
    "source/rounded-far",
    "warning",
    "values",
    got="{faults} (by vexport's rounding: the files match their recorded digests)",
    need="an error as with rounding to nearest (an SQNR of about {rounding:.1f} dB)",
    do="evaluate the checkpoint; with more calibration text, rounding changes the weights less "
    "(--samples, --seq-len)",
)
SCALED_COLUMNS = Rule(
    "source/scaled-columns",
    "warning",
    "values",
    got="{columns}",
    need="columns as in the source, with the error of rounding to {scheme}",
    do="evaluate the checkpoint; if no refit scaled these columns, export the layer again",
)
SMOOTHED = Rule(
    "source/smoothed",
    "info",
    got="the weight with factors on its inputs or outputs, which a norm or layer compensates",
    need="the source's weight",
    do="ignore this: AWQ and SmoothQuant store such factors, and the comparison removed them",
)
KEPT_PART = Rule(
    "source/kept-part",
    "info",
    got="{tensors:# tensor}, equal to the source's",
)
SIGNAL_TO_NOISE = Rule(
    "source/signal-to-noise",
    "info",
    got="signal-to-noise {least} to {most}, median {median}, lowest in {layer}",
)
EXPONENTS_OF_OTHER_SOURCE = Rule(
    "source/exponents-of-other-source",
    claim="values",
    got="exponents that do not fit the source's tensor ({tensor})",
    need=_EXPONENTS,
    do=_OTHER_SOURCE,
)
EXPONENTS = Rule(
    "source/exponents",
    claim="values",
    got="exponents that change the outputs",
    need=_EXPONENTS,
    do=_OTHER_SOURCE,
)
UNVERIFIED_EXPONENTS = Rule(
    "source/unverified-exponents",
    "warning",
    "values",
    got="unverified exponents, because the source cannot run: {reason}",
    need=_EXPONENTS,
    do="ignore this if you trust the checkpoint's producer",
)
CHANGED_TENSOR = Rule(
    "source/changed-tensor",
    claim="values",
    got="different bytes ({dtype} {shape})",
    need="the same bytes as in the source ({source_dtype} {source_shape})",
    do=_EXPORT_OR_OTHER_SOURCE,
)
CHANGED_WEIGHT = Rule(
    "source/changed-weight",
    claim="values",
    got="different values",
    need="the source's weight",
    do=_EXPORT,
)
CHANGED_DTYPE = Rule(
    "source/changed-dtype",
    "warning",
    "values",
    got="the same values in {dtype}",
    need="dtype {source_dtype}",
    do=_INTENDED,
)
ADDED_TENSOR = Rule(
    "source/added-tensor",
    "warning",
    "values",
    got="a tensor that the source lacks",
    need="a tensor of the source",
    do=_INTENDED,
)
MISSING_TENSOR = Rule(
    "source/missing-tensor",
    claim="values",
    got="no such tensor, but the source has it: vLLM would use uninitialized memory",
    do=_EXPORT,
)
MISSING_DRAFT_LAYER = Rule(
    "source/missing-draft-layer",
    "warning",
    "values",
    got="no such tensor, but the source has it: vLLM cannot use this layer for drafting",
    do=_INTENDED,
)
CHANGED_VALUE = Rule(
    "source/changed-value",
    claim="values",
    got="{value!j}",
    need="{source!j}, as in the source",
    do=_COPY_VALUE,
)
ADDED_VALUE = Rule(
    "source/added-value",
    "warning",
    "values",
    got="{value!j}",
    need="no such key, as in the source",
    do=_COPY_VALUE,
)
MISSING_FILE = Rule(
    "source/missing-file",
    claim="values",
    got="no such file, but the source has it",
    do=_COPY_FILE,
)
MISSING_TOKENIZER = Rule(
    "source/missing-tokenizer",
    claim="values",
    got="no such file, but the source has it: vLLM refuses to start",
    do=_COPY_FILE,
)
CHANGED_TOKENIZER = Rule(
    "source/changed-tokenizer",
    claim="values",
    got="a different value: the same text gets other token ids",
    need="the source's value",
    do=_COPY_FILE,
)
CHANGED_VOCABULARY = Rule(
    "source/changed-vocabulary",
    claim="values",
    got="different bytes",
    need="the same bytes as in the source",
    do=_COPY_FILE,
)
MISSING_TEMPLATE = Rule(
    "source/missing-template",
    claim="values",
    got="no chat template, but the source has one: vLLM refuses chat requests",
    do=_COPY_FILE,
)
CHANGED_TEMPLATE = Rule(
    "source/changed-template",
    claim="values",
    got="a different chat template: the same chat becomes another prompt",
    need="the source's chat template",
    do=_COPY_FILE,
)
ADDED_TEMPLATE = Rule(
    "source/added-template",
    "warning",
    "values",
    got="a chat template",
    need="no chat template, as in the source",
    do=_INTENDED,
)
