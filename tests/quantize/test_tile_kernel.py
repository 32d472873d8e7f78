"""The Triton kernel that rounds columns, in Triton's interpreter and compiled for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quantize.tile_rounding import COLUMNS, arguments
from vexport.observers.search import format_of
from vexport.quantize import gptq
from vexport.quantize.gptq import GPTQ, factorize, round_blocks, round_on_device

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# Distance of a value from the middle between two codes, in units of the distance of the codes.
TIE = 1e-5
CASES = [name for name, _ in arguments()]


def run_module(name: str, **environment: str) -> list[dict[str, Any]]:
    """Run a module of the tests in a new process, and return the JSON objects that it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.quantize.{name}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in run_module("tile_rounding", TRITON_INTERPRET="1")}


@pytest.mark.parametrize("case", [*CASES, "few rows", "NaN"])
def test_codes_equal_round_compiled(case: str, compared: dict[str, dict[str, Any]]) -> None:
    """In each row, the first code that differs belongs to a value at a tie."""
    found = compared[case]
    distances = found["distances"]
    print(f"{case}: {len(distances)} of {found['rows']} rows differ")
    assert all(distance <= TIE for distance in distances)


def test_nan_spoils_only_its_row(compared: dict[str, dict[str, Any]]) -> None:
    assert 0 < compared["NaN"]["nan"] < COLUMNS
    assert not compared["INT4"]["nan"]


def test_kernel_compiles_for_gpus() -> None:
    """Triton brings the assembler. Divisions round to nearest, as on the CPU."""
    for found in run_module("tile_compilation", TRITON_INTERPRET="0"):
        assert found["bytes"] > 0
        assert found["divisions"] == ["div.rn.f32"]


def test_blocks_are_rounded_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert not gptq.has_triton()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 32, generator=generator)
    factor = factorize(inputs.T @ inputs, GPTQ.ridge)
    assert factor is not None
    values = torch.randn(4, 32, generator=generator)
    grid = gptq.Grid(
        form=format_of(dict(arguments())["INT4"]),
        scale=torch.full((4, 1), 0.1),
        zero=torch.zeros(4, 1),
        width=32,
    )
    expected = values.clone()
    round_blocks(expected, factor, grid)
    round_on_device(values, factor, grid)
    assert torch.equal(values, expected)
