"""GPUs by any spelling of their names, and their compute capabilities."""

import pytest

from vexport.formats.gpus import (
    CARDS,
    GENERATIONS,
    cards,
    find_card,
    parse_capabilities,
    parse_capability,
)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("l40s", "L40S"),
        ("NVIDIA H100", "H100"),
        ("RTX 5090", "RTX5090"),
        ("GeForce RTX 5070 Ti", "RTX5070Ti"),
        ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
        ("DGX Spark", "DGX-Spark"),
        ("gb10", "DGX-Spark"),
        ("Jetson AGX Thor", "Thor"),
        ("A100-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H100 PCIe", "H100"),
    ],
)
def test_spellings_of_gpus(name: str, card: str) -> None:
    found = find_card(name)
    assert found is not None
    assert found.name == card


def test_capability_of_name() -> None:
    assert [parse_capability(text) for text in ("90", "9.0", "sm_90a", "H200")] == [90] * 4
    assert parse_capability("B300") == 103
    assert parse_capability("H1000") is None
    assert parse_capability("1000") is None


def test_duplicate_and_unknown_gpus() -> None:
    assert [card.name for card in cards(["H100", "h100 ", "L4"])] == ["H100", "L4"]
    with pytest.raises(ValueError, match=r"'L41S' is not a known NVIDIA GPU.*mean L40S.*--sm 89"):
        cards(["L41S"])


@pytest.mark.parametrize(
    "name", ["MI300X", "AMD Instinct MI355X", "RX 7900 XTX", "Gaudi3", "TPUv5"]
)
def test_gpu_of_another_maker(name: str) -> None:
    """MI300X resembles B300, but is no misspelled B300."""
    for parse in (cards, parse_capabilities):
        with pytest.raises(ValueError, match=r"NVIDIA GPU") as raised:
            parse(name)
        assert "Did you mean" not in str(raised.value)


def test_table_of_gpus_is_plausible() -> None:
    assert all(card.sm in GENERATIONS for card in CARDS.values())
    assert all(4 * 2**30 < card.memory_bytes < 400 * 2**30 for card in CARDS.values())
