"""Rules of vLLM's engine: its arguments, its devices, and its failures.

The names of failures are the kinds of `FailureKind`.
"""

from vexport.rules.book import Rule
from vexport.rules.environment import UNINSTALL

UNKNOWN_ARGUMENT = Rule(
    "engine/unknown-argument",
    got="an unknown argument",
    need="an engine argument of vLLM {version}",
    do="correct or remove the argument{hint}",
)
ARGUMENT = Rule(
    "engine/argument", got="{value}", need="{need}", do="correct or remove the argument"
)
HEADS = Rule(
    "engine/heads",
    got="{heads}",
    need="attention heads that can be divided over {ranks} ranks",
    do="use --tp {possible}",
)
DEVICES = Rule(
    "engine/devices",
    got="{count:# GPU}",
    need="{least:# GPU}",
    do="use a machine with more GPUs, a smaller --tp, or Ray over several hosts",
)
QUANTIZED_LAYERS = Rule(
    "engine/quantized-layers",
    got="layers that are already quantized: {reason}",
    need="layers that this version of vLLM can quantize again",
    do="remove the argument, or limit its targets to unquantized layers",
)
REFERENCE = Rule(
    "engine/reference",
    got="{found}",
    need="a compressed-tensors checkpoint that transformers can load, with transforms of linear "
    "layers only",
    do="measure the accuracy with `vexport eval` instead of comparing with transformers",
)

# Failures of the engine.
REFUSED = Rule(
    "engine/refused",
    got="vLLM refuses to load the checkpoint: {message}",
    do="export the checkpoint again",
)
UNSUPPORTED = Rule(
    "engine/unsupported",
    got="vLLM cannot run the checkpoint on this CPU: {message}",
    do="load it on a GPU, or check it with `vexport load --dry`",
)
NO_COMPILER = Rule(
    "engine/no-compiler",
    got="vLLM found no C++ compiler: {message}",
    do="install a C++ compiler (g++), or load it with --mode eager",
)
CRASHED = Rule(
    "engine/crashed",
    got="the engine stopped unexpectedly: {message}",
    do="read the log, and report it to vLLM if the checkpoint is sound",
)
OUT_OF_MEMORY = Rule(
    "engine/out-of-memory",
    got="the engine ran out of memory: {message}",
    do="free memory, use more devices (--tp), or lower max_model_len, max_num_seqs, "
    "gpu_memory_utilization or, on a CPU, VLLM_CPU_KVCACHE_SPACE",
)
NO_SPACE = Rule(
    "engine/no-space",
    got="the disk is full: {message}",
    do="free disk space in the results folder, in TMPDIR (default /tmp) and in /dev/shm",
)
TIMED_OUT = Rule(
    "engine/timed-out",
    got="the engine took too long: {message}",
    do="increase the time limit, or reduce the work",
)
MISMATCHED_BUILD = Rule(
    "engine/mismatched-build",
    got="a package was built for another version of torch: {message}",
    do=UNINSTALL,
)
NO_PACKAGE = Rule(
    "engine/no-package",
    got="a package that vLLM imports is missing or broken: {message}",
    do="install the package again in vLLM's environment (python -m pip install NAME)",
)
MISSING = Rule(
    "engine/missing",
    got="vLLM cannot be started: {message}",
    do="install vLLM for this interpreter (python -m pip install vllm), or choose another "
    "--vllm-python",
)
