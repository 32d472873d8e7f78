"""Metadata that a model card inherits from the source's card."""

import os
from pathlib import Path

import pytest

from vexport.run.source_card import inherited_card

# A front matter of 600 bytes whose aliases expand to 9^8 keys.
BOMB = (
    "---\nlicense: mit\na0: &a0 {k: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    + "---\n"
)


@pytest.mark.parametrize(
    ("text", "inherited"),
    [
        (
            "---\nlicense: mit\nlanguage: [en, de]\ntags: [x]\n---\n# A\n",
            {"license": "mit", "language": ("en", "de")},
        ),
        ("---\nlicense: {a: 1}\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("# No front matter\n", {}),
        ("---\n- a\n---\n", {}),
        ("---\nlicense: &a [*a]\n---\n", {}),
        (f"---\nlicense: {'[' * 30_000}\n---\n", {}),
        ("---\nlicense: 2020-99-99\n---\n", {}),
        (f"---\nlicense: {'9' * 6000}\n---\n", {}),
        ('---\nlicense: "mit\\nbase_model: x"\n---\n', {}),
        (BOMB, {}),
        ("", {}),
    ],
)
def test_inherited_metadata(tmp_path: Path, text: str, inherited: dict[str, object]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert inherited_card(tmp_path) == inherited


@pytest.mark.parametrize("name", ["", "README.md"])
def test_source_without_card(tmp_path: Path, name: str) -> None:
    """A pipe with a card's name is ignored: reading it would block the end of a run."""
    if name:
        os.mkfifo(tmp_path / name)
    assert inherited_card(tmp_path) == {}
