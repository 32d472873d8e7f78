"""What a task reads is fetched before an engine starts."""

import pytest

from tests.hub.conftest import DATA, Machine
from tests.hub.server import Hub

pytestmark = pytest.mark.vllm  # not started, but looked for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "variables", "code", "message"),
    [
        ("gated", {}, 2, "accept them at "),
        ("missing", {}, 2, "no dataset of that name on the hub"),
        ("", {"HF_DATASETS_OFFLINE": "1"}, 4, "unset HF_DATASETS_OFFLINE"),
        ("", {"HF_ENDPOINT": "http://127.0.0.1:9"}, 4, "no connection to http://127.0.0.1:9"),
    ],
)
def test_no_engine_starts_without_the_data(
    machine: Machine,
    hub: Hub,
    llama: object,
    change: str,
    variables: dict[str, str],
    code: int,
    message: str,
) -> None:
    hub.repositories[DATA].gated = change == "gated"
    if change == "missing":
        del hub.repositories[DATA]
    ran = machine.run("eval", llama, "--baseline", llama, "--task", "task.yaml", **variables)
    assert ran.code == code, ran.stderr
    assert f"dataset {DATA}: " in ran.stderr
    assert message in ran.stderr
    assert "load" not in ran.stderr
    assert not (machine.folder / "runs").exists()
