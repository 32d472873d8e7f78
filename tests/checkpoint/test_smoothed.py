"""Exponents in a checkpoint are believed only where they can be a smoothing: the model computes the same."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from tests.command import vexport
from tests.models import Good
from vexport.checkpoint.smoothed import encode, smoothing_of
from vexport.errors import InputError

LAYER = "model.layers.0."


def exponents(*values: int) -> str:
    return encode(np.array(values, np.int8))


def pair(rows: str, columns: str, reader: str = f"{LAYER}mlp.down_proj.weight") -> str:
    """The text of a file with what two tensors are scaled by."""
    maker = {"rows": rows, "columns": ""}
    tensors = {f"{LAYER}mlp.up_proj.weight": maker, reader: {"rows": "", "columns": columns}}
    return json.dumps({"tensors": tensors})


SOUND = pair(exponents(1, -2), exponents(-1, 2))
FORGED: dict[str, str | bytes] = {
    "one side": json.dumps(
        {"tensors": {f"{LAYER}mlp.up_proj.weight": {"rows": exponents(1), "columns": ""}}}
    ),
    "both sides alike": pair(exponents(1, -2), exponents(1, -2)),
    "another layer": pair(exponents(1), exponents(-1), "model.layers.1.mlp.down_proj.weight"),
    "to infinity": pair(exponents(127), exponents(-127)),
    "to zero": pair(exponents(-128), exponents(-128)),
    "no base64": pair("!!!", ""),
    "no text": pair(exponents(1), "").replace('""', "5"),
    "cut": SOUND[:40],
    "no object": "[1]",
    "deep": "[" * 100_000,
    "not UTF-8": b"\xff\xfe\0",
    "empty": "",
}


def test_sound_exponents_are_read(tmp_path: Path) -> None:
    (tmp_path / "smoothing.json").write_text(SOUND)
    assert len(smoothing_of(tmp_path)) == 2


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED.keys())
def test_exponents_that_are_no_smoothing_are_refused(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "smoothing.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match="smoothing.json"):
        smoothing_of(tmp_path)


def test_weights_do_not_pass_for_smoothed_ones(good: Good, llama: Path, tmp_path: Path) -> None:
    """With 2^127 every weight of the source would be infinite, which no weight differs from."""
    folder = copytree(good("W4A16"), tmp_path / "forged")
    (folder / "smoothing.json").write_text(pair(exponents(127), exponents(-127)))
    ran = vexport("check", folder, "--source", llama)
    assert ran.code == 1
    assert "the exponent 127" in ran.stdout
