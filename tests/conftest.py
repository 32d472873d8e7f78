"""Fixtures that several test modules share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import recorded_texts
from tests.changed import ROOT, changed_files
from tests.engine.warm import Warm
from tests.models import Good, quantize, save_llama, write_calibration

# Maximum number of cases that `--quick` runs for each test. They are evenly spaced, and include the
# first and the last case.
CASES = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--quick`, `--changed` and `--whole`.

    `--quick` runs no vLLM, no slow tests, and only some cases of each test. `--changed` runs vLLM
    and slow tests only from files that changed (`tests/changed.py`). `--whole` compares the check
    with all recorded results of vLLM instead of a sample.
    """
    parser.addoption("--quick", action="store_true")
    parser.addoption("--changed", action="store_true")
    parser.addoption("--whole", action="store_true")
    recorded_texts.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Let commands that tests start receive SIGINT, which a shell's background jobs ignore.

    The commands also do not verify their output with vLLM.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # exec resets it to the default
    os.environ["VEXPORT_NO_VERIFY"] = "1"  # tests/quantize/test_proof.py has the dry load
    recorded_texts.start(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files that start engines first.

    A pytest worker runs a whole file at a time, so short files should be last.
    """
    if config.getoption("quick"):
        items[:] = sampled([item for item in items if not is_slow(item)])
    if config.getoption("changed"):
        changed = {ROOT / file for file in changed_files()}
        items[:] = [item for item in items if item.path in changed or not is_slow(item)]
    engines = {item.path for item in items if item.get_closest_marker("vllm")}
    items.sort(key=lambda item: item.path not in engines)


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test starts vLLM or lm-eval, or has the marker `slow`."""
    assert isinstance(item, pytest.Function)
    is_marked = any(map(item.get_closest_marker, ("vllm", "slow")))
    return is_marked or "lm_eval_runs" in item.fixturenames


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return at most CASES cases of each test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = []
    for cases in tests.values():
        step = max(1, (len(cases) - 1) / (CASES - 1))
        kept += [cases[int(number * step)] for number in range(min(len(cases), CASES))]
    return kept


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork vexport's workers from a process that has already imported vLLM.

    This process starts when the first worker is needed. All processes of pytest share it.
    """
    root = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        processes = Warm((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "warm")
        patch.setattr(
            "vexport.engine.session.started_process_group", processes.started_process_group
        )
        yield
        processes.end()


@pytest.fixture
def matmul_in_model_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply 16-bit tensors in their dtype, for tests of equality to the last bit.

    Without this fixture, vexport multiplies them in float32 on CPUs on which that is faster.
    """
    monkeypatch.setattr("vexport.calibration.capture.prefers_float32", lambda device: False)


@pytest.fixture(scope="module")
def matmul_in_model_dtype_for_module() -> Iterator[None]:
    """Do the same as `matmul_in_model_dtype`, for the shared fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vexport.calibration.capture.prefers_float32", lambda device: False)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a micro Llama checkpoint. Tests only read it."""
    return save_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calibration(tmp_path_factory.mktemp("calibration") / "rows.jsonl")


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory, llama: Path, calibration: Path) -> Good:
    """Return a function that quantizes the micro Llama in a scheme. Tests only read the result."""
    root = tmp_path_factory.mktemp("good")

    def quantized(scheme: str) -> Path:
        out = root / scheme
        if not out.exists():
            quantize(llama, out, scheme, "--calibration", calibration)
        return out

    return quantized
