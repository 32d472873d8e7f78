"""Two ranks that see half of the data each have the statistics of one rank that sees all."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import distributed

from tests.forked import finish, start
from tests.texts import assert_raises
from vexport.formats.arguments import QuantArgs
from vexport.observers import IMatrixMSEObserver, Observer
from vexport.observers.llmcompressor.older import reduce_values

RANKS = 2
TENSOR = QuantArgs(num_bits=8, type="float", strategy="tensor")
GROUP = QuantArgs(num_bits=8, type="int", strategy="group", group_size=16, dynamic=True)
CHANNEL = QuantArgs(num_bits=8, type="int", strategy="channel")


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(7, 32, generator=generator) * (n + 1)).to(torch.bfloat16) for n in range(6)
    ]


def samples_of_rank(rank: int) -> list[torch.Tensor]:
    return samples()[rank * 3 : rank * 3 + 3]


def observe(name: str, args: QuantArgs, values: list[torch.Tensor]) -> Observer:
    observer = Observer.load_from_registry(name, base_name="input", args=args)
    for value in values:
        observer(value)
    return observer


def gather_importance(values: list[torch.Tensor]) -> IMatrixMSEObserver:
    observer, layer = (
        IMatrixMSEObserver("weight", CHANNEL),
        torch.nn.Linear(32, 2, dtype=torch.bfloat16),
    )
    observer.attach(layer)
    for value in values:
        layer(value)
    observer.detach(layer)
    return observer


def check_extremes(rank: int) -> None:
    """Compare the extremes, for both shapes of statistics, and with a rank without data."""
    for args in (TENSOR, GROUP):
        alone, shared = (
            observe("static_minmax", args, seen) for seen in (samples(), samples_of_rank(rank))
        )
        assert shared.sync_activation_stats() == []
        assert torch.equal(shared.range()[0], alone.range()[0])
        assert torch.equal(shared.range()[1], alone.range()[1])
        assert shared.tokens == alone.tokens == 42
        lonely = observe("static_minmax", args, samples() if rank == 1 else [])
        lonely.sync_activation_stats()
        assert torch.equal(lonely.range()[1], alone.range()[1])
    nobody = observe("static_minmax", TENSOR, [])
    nobody.sync_activation_stats()
    assert not nobody.has_statistics


def check_averages(rank: int) -> None:
    """Compare with the mean of the moving averages of all ranks that saw data."""
    for name in ("minmax", "mse"):
        halves = [observe(name, TENSOR, samples_of_rank(other)).range() for other in range(RANKS)]
        shared = observe(name, TENSOR, samples_of_rank(rank))
        shared.sync_activation_stats()
        for end in (0, 1):
            mean = torch.stack([half[end] for half in halves]).float().mean(0)
            assert torch.equal(shared.range()[end], mean.to(halves[0][end].dtype))
        assert shared.tokens == 42
        alone = observe(name, TENSOR, samples()).range()
        lonely = observe(name, TENSOR, samples() if rank == 0 else [])
        lonely.sync_activation_stats()
        assert torch.equal(lonely.range()[1], alone[1])


def check_importance(rank: int) -> None:
    """Compare the sum of squares, and the scales of a weight that follow from it."""
    alone, shared = gather_importance(samples()), gather_importance(samples_of_rank(rank))
    shared.sync_activation_stats()
    assert alone.gathered is not None
    assert shared.gathered is not None
    assert shared.gathered.tokens == alone.gathered.tokens == 42
    assert torch.equal(shared.gathered.mean(), alone.gathered.mean())
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    scales = [observer(weight).get_qparams()["scale"] for observer in (alone, shared)]
    assert torch.equal(*scales)


def check_memoryless(rank: int) -> None:
    """Check that ranks share only the number of tokens."""
    observer = observe("memoryless_minmax", TENSOR, samples_of_rank(rank))
    before = observer.range()[1].clone()
    observer.sync_activation_stats()
    assert torch.equal(observer.range()[1], before)
    assert observer.tokens == 42


class Declared(Observer):
    """Observer that declares reductions of its statistics, like in llm-compressor's documents."""

    _act_sync_dict: ClassVar[dict[str, object]] = {
        "min_vals": distributed.ReduceOp.MIN,
        "max_vals": distributed.ReduceOp.AVG,
        "seen": distributed.ReduceOp.SUM,
    }
    seen: int | None = None

    def update_statistics_from_observed(self, observe: torch.Tensor) -> None:
        self.min_vals, self.max_vals = observe.amin(dim=(0, -1)), observe.amax(dim=(0, -1))
        self.seen = (self.seen or 0) + 1


class DeclaredNothing(Declared):
    """Observer that declares no reduction."""

    _act_sync_dict: ClassVar[dict[str, object]] = {}


def check_declared(rank: int) -> None:
    """Check that each attribute is reduced by its operation.

    Ranks without data get the values of the other ranks.
    """
    parts = [torch.stack(samples_of_rank(other)) for other in range(RANKS)]
    observer = Declared("input", TENSOR)
    observer(parts[rank])
    observer.sync_activation_stats()
    assert float(observer.min_vals) == min(float(part.min()) for part in parts)
    mean = sum(float(part.max()) for part in parts) / RANKS
    assert float(observer.max_vals) == pytest.approx(mean, rel=1e-2)
    assert observer.seen == RANKS
    lonely = Declared("input", TENSOR)
    if rank == 1:
        lonely(parts[1])
    lonely.sync_activation_stats()
    assert float(lonely.max_vals) == float(parts[1].max())
    assert int(lonely.seen or 0) == 1
    alone = DeclaredNothing("input", TENSOR)
    alone(parts[rank])
    alone.sync_activation_stats()
    assert float(alone.max_vals) == float(parts[rank].max())


@pytest.mark.parametrize(
    ("operation", "value"),
    [
        (distributed.ReduceOp.MIN, 1.0),
        (distributed.ReduceOp.MAX, 4.0),
        (distributed.ReduceOp.SUM, 5.0),
        (distributed.ReduceOp.AVG, 2.5),
    ],
)
def test_declared_reductions(operation: object, value: float) -> None:
    ranks = [torch.tensor([number], dtype=torch.bfloat16) for number in (1.0, 4.0)]
    assert reduce_values(ranks, operation, "max_vals").tolist() == [value]
    with assert_raises(ValueError, "_act_sync_dict", "max_vals", "ReduceOp.MIN, MAX, SUM or AVG"):
        reduce_values(ranks, distributed.ReduceOp.BAND, "max_vals")


def run_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    try:
        for check in (
            check_extremes,
            check_averages,
            check_importance,
            check_memoryless,
            check_declared,
        ):
            check(rank)
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(RANKS)]
    ranks = [start(log, run_rank, rank, str(tmp_path / "store")) for rank, log in enumerate(logs)]
    for rank, log in zip(ranks, logs, strict=True):
        finish(rank, log)
