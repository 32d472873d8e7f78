"""Where memory or a disk ends: no library says so by a type of its own, all of them by its words."""

import re

# What the allocators of torch, C++ and CUDA, the kernel and vLLM's own memory planning say.
_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can(?:'t|not) allocate memory|bad_alloc"
    r"|No available memory for the cache blocks|less than desired (?:GPU|CPU) memory"
    r"|larger than the available KV cache memory|Not enough memory|can't start new thread"
    r"|Thread creation failed|cannot map zero-fill pages",
    re.IGNORECASE,
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)


def is_memory(message: str) -> bool:
    """Whether an exception says that there is too little memory."""
    return _MEMORY.search(message) is not None


def is_disk(message: str) -> bool:
    """Whether an exception says that a disk is full."""
    return _DISK.search(message) is not None
