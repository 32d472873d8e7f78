"""Which dry loads run at the same time."""

from dataclasses import replace
from pathlib import Path

import pytest

from vexport.engine.dry import worker
from vexport.engine.dry.messages import Cell
from vexport.engine.dry.worker import _Try, _would_wait


@pytest.mark.parametrize(("limit", "waits"), [(0, True), (1 << 20, False)])
def test_one_large_model_at_a_time_is_built_where_the_others_would_wait(
    limit: int, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_LARGE_INDEX_BYTES", limit)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    first = _Try(
        checkpoint=tmp_path,
        cell=Cell(tp=1, sm=90),
        rank=0,
        file=tmp_path / "0.json",
        loaded=tmp_path / "loaded",
    )
    on_another_gpu = replace(first, cell=Cell(tp=1, sm=100))
    on_two_gpus = replace(first, cell=Cell(tp=2, sm=90), loaded=tmp_path / "loaded by two")
    assert _would_wait(on_another_gpu, [first]) is waits
    assert not _would_wait(on_two_gpus, [first])
    assert not _would_wait(first, [])
