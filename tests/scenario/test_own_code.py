"""Observers `package.module:Class` run only with --trust-remote-code.

An imported module writes a file, so that each test can check whether code ran.
"""

from pathlib import Path

import pytest

from tests.command import vexport
from vexport.api import plan
from vexport.errors import InputError

OBSERVER = (
    "from pathlib import Path\nPath({ran!r}).write_text('ran')\n"
    "from vexport.observers import MemorylessMinMaxObserver\n"
    "class C(MemorylessMinMaxObserver):\n    pass\n"
)


def scenario(folder: Path, source: Path, name: str = "evil:C") -> Path:
    path = folder / "s.yaml"
    path.write_text(
        f"name: a\nsource: {source}\nrules:\n"
        f"  - {{match: Linear, scheme: W4A16_CHANNEL, observer: '{name}'}}\n"
    )
    return path


def recipe(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        "quant_stage:\n  quant_modifiers:\n    QuantizationModifier:\n      ignore: [lm_head]\n"
        "      config_groups:\n        group_0:\n          targets: [Linear]\n          weights:\n"
        "            {num_bits: 8, type: float, strategy: channel, observer: 'evil:C'}\n"
        "          input_activations: {num_bits: 8, type: float, strategy: token, dynamic: true}\n"
    )
    return path


def test_commands_need_trust_flag(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan`, `quantize` and `run` refuse the code and name the flag.

    The code is named by a scenario, a recipe, an option or a file of options.
    """
    folder, ran_file = tmp_path / "theirs", tmp_path / "ran"
    folder.mkdir()
    (folder / "evil.py").write_text(OBSERVER.format(ran=str(ran_file)))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    for arguments in (
        ("plan", scenario(folder, llama)),
        ("run", folder / "s.yaml", "--run-dir", tmp_path / "run"),
        ("plan", llama, "--recipe", recipe(folder)),
        ("quantize", llama, tmp_path / "out", "--recipe", folder / "recipe.yaml"),
        ("quantize", llama, tmp_path / "out", "--scheme", "W4A16_CHANNEL", "--observer", "evil:C"),
    ):
        ran = vexport(*arguments)
        assert ran.code == 2, ran.stderr
        assert "--trust-remote-code" in ran.stderr
        assert "evil:C" in ran.stderr
        assert not ran_file.exists()
    (folder / "vexport.toml").write_text('[plan]\nobserver = "evil:C"\n')
    ran = vexport("plan", llama, "--scheme", "W4A16_CHANNEL")
    assert ran.code == 2, ran.stderr
    assert "evil:C" in ran.stderr
    (folder / "vexport.toml").unlink()
    with pytest.raises(InputError, match="trust-remote-code"):
        plan(folder / "s.yaml")
    assert not ran_file.exists()
    ran = vexport("plan", folder / "s.yaml", "--trust-remote-code")
    assert ran.code == 0, ran.stderr
    assert ran_file.exists()
    assert plan(folder / "s.yaml", trust_remote_code=True).groups
