"""A hub on localhost with a model and a dataset, and calls of vexport that use this hub."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command import Ran, vexport
from tests.hub.server import Hub, Repository, running_hub

MODEL, DATA = "acme/llama", "acme/sums"
TASK = """task: hub_sums
dataset_path: acme/sums
test_split: test
output_type: generate_until
doc_to_text: "{{a}} + {{b}} ="
doc_to_target: "{{sum}}"
generation_kwargs: {until: ["."], max_gen_toks: 2}
metric_list: [{metric: exact_match}]
"""
HUB_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> dict[str, Path]:
    """Return the folders of a dataset and of a model with extra files, like on the hub."""
    root = tmp_path_factory.mktemp("repositories")
    shutil.copytree(llama, root / "model")
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "model.gguf",
        "original/a.safetensors",
    ):
        file = root / "model" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x" * 1000)
    (root / "model/README.md").write_text("---\nlicense: mit\n---\n")
    (root / "data").mkdir()
    rows = [{"a": i % 10, "b": i // 10, "sum": i % 10 + i // 10} for i in range(30)]
    (root / "data/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {MODEL: root / "model", DATA: root / "data"}


@pytest.fixture
def hub(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    with running_hub() as running:
        running.repositories[MODEL] = Repository(folder=repositories[MODEL])
        running.repositories[DATA] = Repository(folder=repositories[DATA], kind="datasets")
        yield running


class Machine:
    """Computer that uses the test's hub, with its own cache."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.url = folder, hub.url
        (folder / "task.yaml").write_text(TASK)

    @contextmanager
    def connected(self, **variables: str) -> Iterator[None]:
        """Set up this process in `folder`, with these environment variables.

        huggingface_hub reads some variables only once. Its constants are set instead.
        """
        endpoint = variables.get("HF_ENDPOINT", self.url)
        constants = {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": (
                f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            ),
            "HF_HUB_CACHE": str(self.folder / "cache" / "hub"),
            "HF_HUB_OFFLINE": "HF_HUB_OFFLINE" in variables,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name in HUB_VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            for name, constant in constants.items():
                patch.setattr(f"huggingface_hub.constants.{name}", constant)
            yield

    def run(self, *arguments: object, **variables: str) -> Ran:
        """Run `vexport ARGUMENTS...` in this process, connected with these variables."""
        with self.connected(**variables):
            return vexport(*arguments)

    def python(self, *arguments: object, **variables: str) -> Ran:
        """Run another interpreter with these environment variables."""
        command = [sys.executable, *map(str, arguments)]
        own = {name: value for name, value in os.environ.items() if name not in HUB_VARIABLES}
        cache = str(self.folder / "cache")
        known = {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm")}
        environment = (
            own | known | {"HF_ENDPOINT": self.url, "HF_HOME": cache, "HOME": cache} | variables
        )
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        return Ran(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture
def machine(tmp_path: Path, hub: Hub) -> Machine:
    return Machine(tmp_path, hub)
