"""Build transformers models without weights, check torch devices, and store hidden states."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numba
import torch
import transformers

from vexport.errors import InputError, first_line
from vexport.errors.extras import mismatch_of
from vexport.rules import calibration as rules

# Options of glibc's `mallopt` (malloc.h) and their values. Smaller blocks than the first value come
# from the heap. The heap's end is returned to the operating system if more than the second value is
# free there.
M_MMAP_THRESHOLD, LARGEST_HEAP_BYTES = -3, 1 << 25
M_TRIM_THRESHOLD, FREE_HEAP_BYTES = -1, 1 << 28


def build_on_meta(
    root: Path, *, trust_remote_code: bool, device: str = "cpu"
) -> transformers.PreTrainedModel:
    """Return the model in eval mode, with parameters on the meta device and buffers on `device`.

    The model's class is the class in config.json if transformers has this class. Otherwise, and if
    the config names trusted Python code (`auto_map`), AutoModelForCausalLM selects the class. The
    dtype is the config's. Raises InputError if transformers cannot build the model.

    Also sets torch's number of threads to numba's number. The order of sums depends on the number
    of threads. When numba runs its first kernel, numba changes torch's number of threads. A resumed
    call runs its first kernel at another time than an uninterrupted call. Without the same number
    of threads from the beginning, the two calls could compute different bytes.
    """
    torch.set_num_threads(numba.get_num_threads())
    keep_freed_memory()
    try:
        model = _build(root, trust_remote_code)
    except Exception as error:  # the model's code may raise any error
        if isinstance(error, MemoryError | ImportError) or mismatch_of(error):
            raise
        where = str(root / "config.json")
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise InputError.of(rules.MODEL_CODE, where) from error
        raise InputError.of(rules.MODEL, where, reason=first_line(error)) from error
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next tensors, 256 MiB at most.

    Otherwise glibc often returns it to the operating system, and the next tensors cause a page
    fault for each of their pages. Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, FREE_HEAP_BYTES)


def _build(root: Path, trust_remote_code: bool) -> transformers.PreTrainedModel:
    """Build the class in config.json, or the class that AutoModelForCausalLM selects."""
    config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    dtype = config.dtype or torch.bfloat16
    with parameters_on_meta():
        if named is not None and not (trust_remote_code and hasattr(config, "auto_map")):
            model: transformers.PreTrainedModel = named._from_config(config, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create the parameters of all modules on the meta device inside the block.

    Buffers keep their values: the constructor computes rotary frequencies, and checkpoints do not
    store them.
    """
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def decoder_layers(model: transformers.PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """Return the name and the list of the decoder layers.

    The decoder layers are the module list with the most parameters in the text model. Raises
    InputError for a model without a list of modules.
    """
    within = set(model.get_decoder().modules())
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and module in within
    }
    if not lists:
        raise InputError.of(rules.DECODER, type(model).__name__)
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    name = max(sizes, key=lambda key: sizes[key])
    return name, lists[name]


def tie_head(model: transformers.PreTrainedModel) -> None:
    """Use the weights of the embeddings for an output head without weights."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight.is_meta:
        head.weight = embeddings.weight


def joined(*parts: str) -> str:
    """Join the parts of a dotted name. Parts may be empty."""
    return ".".join(part for part in parts if part)


def unload(module: torch.nn.Module) -> None:
    """Drop the module's weights: its parameters go back to the meta device, its buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))


def default_device() -> str:
    """Return "cuda" if torch can use a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(name: str) -> None:
    """Raise InputError if torch does not support the device or cannot put a tensor on it."""
    try:
        torch.empty(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        place, reason = f"device {name!r}", first_line(error)
        raise InputError.of(rules.DEVICE, place, reason=reason) from None


def finite(value: torch.Tensor) -> torch.Tensor:
    """Return a Boolean tensor without dimensions: True if no element is infinite or NaN.

    An empty tensor is finite. The host does not wait for a GPU.
    """
    if not value.numel():
        return torch.ones((), dtype=torch.bool, device=value.device)
    low, high = torch.aminmax(value)
    return torch.isfinite(low) & torch.isfinite(high)


def read_flags(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Return the values of Boolean tensors without dimensions. The host waits for a GPU once."""
    if not flags:
        return []
    read: list[bool] = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return read


# Hidden states beyond this many bytes go to memory-mapped temporary files.
MEMORY_BYTES = 2**30


class HiddenStates:
    """Hidden states of every batch, overwritten layer after layer.

    The first `memory_bytes` stay in main memory, which is pinned for a GPU. Other states are in
    unnamed files in the temporary folder (TMPDIR), and their pages leave the process's memory as
    soon as they are written.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._room = memory_bytes
        self._states: list[torch.Tensor] = []
        # The mapped pages of the states on disk, by batch.
        self._pages: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return len(self._states)

    def append(self, states: torch.Tensor) -> None:
        """Append a copy of a batch's states."""
        if states.nbytes <= self._room:
            self._room -= states.nbytes
            # Copies to and from a GPU are faster in pinned memory, and the host does not wait.
            pinned = states.device.type == "cuda" or states.is_pinned()
            kept = torch.empty_like(states, device="cpu", pin_memory=pinned)
            self._states.append(kept.copy_(states, non_blocking=pinned))
            return
        with tempfile.TemporaryFile(prefix="vexport-hidden-") as file:
            try:
                # Without allocated blocks, writing on a full disk would end the process by SIGBUS.
                os.posix_fallocate(file.fileno(), 0, states.nbytes)
            except OSError as error:
                error.filename = tempfile.gettempdir()
                raise
            pages = self._pages[len(self)] = mmap.mmap(file.fileno(), states.nbytes)
        self._states.append(torch.frombuffer(pages, dtype=states.dtype).view(states.shape))
        self[len(self) - 1] = states

    def __getitem__(self, batch: int) -> torch.Tensor:
        """Return the states of a batch. They are valid until they are overwritten.

        The copy from a GPU may not have finished. Copies to the GPU follow it, but the host must
        wait before it reads the states.
        """
        return self._states[batch]

    def __setitem__(self, batch: int, states: torch.Tensor) -> None:
        """Overwrite the states of a batch with states of the same shape."""
        kept = self._states[batch]
        assert states.shape == kept.shape, (states.shape, kept.shape)
        kept.copy_(states, non_blocking=states.device.type == "cuda" and kept.is_pinned())
        if batch in self._pages:
            # The pages leave memory. Their data stay in the file, because the mapping is shared.
            self._pages[batch].madvise(mmap.MADV_DONTNEED)
