"""Walks through two models on a device, as a program: `read_ahead.py DEVICE WHOLE BROKEN`; prints JSON.

Of the whole one: the threads that read layers, whether their weights are the file's, what is left of the
threads when the walk is broken off. Of the broken one, the error.
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tests.quantize.second_device import NAME, register
from vexport.calibration import Samples
from vexport.calibration.walk import LayerWalk
from vexport.calibration.weights import Filling, Weights
from vexport.checkpoint.index import read_index
from vexport.errors import InputError

TEXT = Samples(token_ids=((1, 2, 3, 4),), rows=(1,))


def main(device: str, whole: Path, broken: Path) -> None:
    registered = register() if device == NAME else None
    threads, read = list[str](), Weights.read

    def noted(*words: object) -> list[Filling]:
        threads.append(threading.current_thread().name)
        into: Callable[..., list[Filling]] = read
        return into(*words)

    setattr(Weights, "read", noted)  # noqa: B010
    walk, plain = LayerWalk(read_index(whole), device=device), LayerWalk(read_index(whole))
    equal = list[bool]()
    with walk.text(TEXT), plain.text(TEXT):
        for layer, same in zip(walk.forward(), plain.forward(), strict=True):
            values = zip(layer.module.parameters(), same.module.parameters(), strict=True)
            equal.append(all(torch.equal(one.cpu(), other) for one, other in values))
    readers = sorted(threads)
    try:
        with walk.text(TEXT):
            for _ in walk.forward():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
    try:
        walk = LayerWalk(read_index(broken), device=device)
        with walk.text(TEXT):
            reached = 0
            for _ in walk.forward():
                reached += 1
    except InputError as error:
        told = str(error)
    del registered
    print(json.dumps({"readers": readers, "equal": equal, "left": left, "reached": reached, "error": told}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
