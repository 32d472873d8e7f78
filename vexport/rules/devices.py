"""Rules of the ranks and GPUs that a checkpoint should run on."""

from vexport.rules.book import Rule

_LAYERS = "use another scheme for these layers"

HEADS = Rule(
    "devices/heads",
    claim="refused",
    got="{reason}",
    need="attention heads that can be divided over {ranks:or} ranks",
    do="serve it on {possible}",
)
LAYER_ON_RANKS = Rule(
    "devices/layer-on-ranks",
    claim="refused",
    got="{reason}",
    need="a layer that vLLM can run on {ranks:or} ranks",
    do=f"serve it on another number of GPUs, or {_LAYERS}",
)
# A layer that vLLM cannot run on a single rank cannot run on more ranks either.
LAYER = Rule(
    "devices/layer",
    claim="refused",
    got="{reason}",
    need="a layer that vLLM can run on 1 rank",
    do=_LAYERS,
)
SCHEME = Rule(
    "devices/scheme",
    claim="refused",
    got="a GPU on which vLLM refuses the scheme",
    need="{gpus}, for {precision} ({format})",
    do="serve it on another GPU, or use another scheme",
)
# The limit comes from the kernel's code and was not tested on a GPU. The loaders accept the
# checkpoint.
KERNEL = Rule(
    "devices/kernel",
    "warning",
    "refused",
    got="{reason}",
    need="{gpus}, for {precision} ({format})",
    do="try to load it on such a GPU, or store it as {packed}",
)
CACHE = Rule(
    "devices/cache",
    claim="refused",
    got="a GPU on which vLLM has no attention backend for an FP8 cache ({reason})",
    need="SM {least} or above",
    do="serve it on another GPU, or with --kv-cache-dtype bfloat16 (float16 below SM 80)",
)
CACHE_WITH_FLASHINFER = Rule(
    "devices/cache-with-flashinfer",
    claim="refused",
    got="a GPU on which vLLM has no attention backend for an FP8 cache ({reason})",
    need="SM {least} or above ({with_flashinfer} or above with FlashInfer)",
    do="serve it on another GPU, or with --kv-cache-dtype bfloat16 (float16 below SM 80)",
)
# Fewer bits than stored may cost accuracy, and an evaluation on another GPU does not show the loss.
FEWER_BITS = Rule(
    "devices/fewer-bits",
    "warning",
    "precision",
    got="{runs} on {gpus:and}: vLLM rounds the inputs to {bits} bits there",
    need="{stored}, as stored",
    do="measure accuracy there, or serve it on another GPU",
)
# More bits than stored cost speed but no accuracy.
MORE_BITS = Rule(
    "devices/more-bits",
    "info",
    "precision",
    got="{runs} on {gpus:and}: vLLM has no {stored} kernel there, and falls back",
    need="{stored}, as stored",
    do="measure speed there, or serve it on another GPU",
)
