"""Names that a repository or a bucket gives become paths: none leads out of the folder."""

import pytest

from vexport.checkpoint.hub import side_files


@pytest.mark.parametrize("name", ["/etc/x.json", "../x.json", "a/../../x.json", "//x.json", ".x.json"])
def test_names_that_lead_elsewhere_are_no_files(name: str) -> None:
    assert side_files([name, "config.json", "a/tokenizer.json"]) == ["a/tokenizer.json", "config.json"]
