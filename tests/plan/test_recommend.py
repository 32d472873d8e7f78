"""Which scheme for which GPU: memory, the bound and the choice, by bytes that are counted by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.architectures.headers import save_headers
from tests.command import vexport
from tests.models import save_llama, save_qwen3
from tests.plan.test_outlook import valid
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.formats.gpus import CARDS, Card
from vexport.plan.bound import Rank, arithmetic, crossover
from vexport.plan.choose import EIGHT_BITS, FOUR_BITS, WEIGHTS_ONLY, choose
from vexport.plan.kv_tokens import KvCacheOfRank, KvLayer, kv_cache_of
from vexport.plan.rank_weights import Experts, Part, RankWeights
from vexport.plan.recommend import Target, recommend
from vexport.types import Candidate, Json, Recommendation

MOE = Path(__file__).parent.parent / "peer" / "moe"
H100 = CARDS["H100"]
# tests/peer/moe: hidden 128, 4 heads of 32 and one of keys, one of two experts of 3 x 128 x 128 is chosen.
QKV, O_PROJ, EXPERT, ROUTER, NORMS, TABLE = 192 * 128, 128 * 128, 3 * 128 * 128, 2 * 128, 448, 64 * 128
CONTEXT = 128
KV = CONTEXT * 2 * 32 * 2
ROW = 128 * 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SourceIndex:
    return read_index(save_llama(tmp_path_factory.mktemp("llama") / "model"))


def row_of(found: Recommendation, scheme: str) -> Candidate:
    return next(row for row in found.schemes if row.scheme == scheme)


def tokens(row: Candidate, position: int = 0) -> float:
    """The bound itself, from the upper end of the interval; the lower is 50 % of it."""
    assert row.speed is not None
    decode = row.speed.decode[position]
    assert decode.low is not None
    assert decode.high is not None
    assert decode.low / decode.high == pytest.approx(5 / 9)
    return decode.high / 0.9


def test_a_step_reads_the_chosen_experts_only() -> None:
    found = recommend(read_index(MOE), Target(card=H100, context=CONTEXT))
    others = 2 * (ROUTER + NORMS + TABLE) + ROW + KV
    assert tokens(found.source_row) == pytest.approx(3.35e12 / (2 * (QKV + O_PROJ + EXPERT) + others))
    # One byte a weight, and four for each row's scale.
    quantized = QKV + 4 * 192 + O_PROJ + 4 * 128 + EXPERT + 4 * 3 * 128
    assert tokens(row_of(found, "FP8_DYNAMIC")) == pytest.approx(3.35e12 / (quantized + others))
    # Half a byte, an FP8 scale for 16 weights and a global scale a layer.
    layers = 3 + 1 + 3
    packed = (QKV + O_PROJ + EXPERT) * 9 // 16 + 4 * layers
    assert tokens(row_of(found, "NVFP4A16")) == pytest.approx(3.35e12 / (packed + others))


def test_more_tokens_go_to_more_experts() -> None:
    found = recommend(read_index(MOE), Target(card=H100, context=CONTEXT))
    read = 2 * EXPERT * (1 - 0.5**8)
    step = 2 * (QKV + O_PROJ + read + ROUTER + NORMS + TABLE) + 8 * (ROW + KV)
    assert tokens(found.source_row, 1) == pytest.approx(8 * 3.35e12 / step)
    assert any("experts" in note for note in found.notes)


def test_a_tied_head_is_held_and_read_once(tmp_path: Path, llama: SourceIndex) -> None:
    tied = read_index(save_qwen3(tmp_path / "tied"))
    found = recommend(tied, Target(card=H100, context=64))
    assert found.source_row.weight_bytes == tied.num_bytes
    kv = 64 * 3 * 2 * 128 * 2
    assert tokens(found.source_row) == pytest.approx(3.35e12 / (tied.num_bytes + 512 + kv))
    apart = recommend(llama, Target(card=H100, context=64))
    assert apart.source_row.weight_bytes == llama.num_bytes
    read = llama.num_bytes - 384 * 256 * 2
    assert tokens(apart.source_row) == pytest.approx(3.35e12 / (read + 512 + kv))
    # A stored copy of a tied head is not loaded; what the language model's own config says decides.
    outer: dict[str, Json] = {**llama.config, "tie_word_embeddings": True}
    copied = recommend(replace(llama, config=outer), Target(card=H100))
    assert copied.source_row.weight_bytes == read
    nested: dict[str, Json] = {**outer, "text_config": dict(llama.config)}
    untied = recommend(replace(llama, config=nested), Target(card=H100))
    assert untied.source_row.weight_bytes == llama.num_bytes


def test_groups_that_do_not_fit_are_tried_in_the_largest_that_does(tmp_path: Path) -> None:
    """As SmolLM2's: no multiple of 128, but of 64."""
    odd = read_index(save_llama(tmp_path / "odd", hidden_size=320, head_dim=64))
    found = recommend(odd, Target(card=CARDS["A100"]))
    names = [row.scheme for row in found.schemes]
    assert names[names.index("W4A16") + 1] == "W4A16_G64"
    assert (row_of(found, "W4A16").runs, row_of(found, "W4A16_G64").runs) == ("no", "in full")
    assert (found.recommended, found.alternative) == ("W8A8", "W4A16_G64")
    assert recommend(odd, Target(card=H100)).crossover
    made = vexport("plan", odd.root, "--scheme", "W4A16_G64", "--gpu", "A100", "--format", "json")
    (memory,) = json.loads(made.stdout)["outlook"]["rooms"]
    assert row_of(found, "W4A16_G64").weight_bytes == memory["weight_bytes"]


def test_weights_are_those_of_the_checkpoint_and_are_cut_over_ranks(llama: SourceIndex) -> None:
    table = json.loads(vexport("plan", llama.root, "--format", "json").stdout)
    sizes = {row["scheme"]: row["output_bytes"] for row in table["schemes"] if row["fits"]}
    one = recommend(llama, Target(card=H100))
    for scheme in ("FP8_DYNAMIC", "NVFP4A16", "FP8_BLOCK", "W8A8"):
        assert row_of(one, scheme).weight_bytes == sizes[scheme], scheme
    two = recommend(llama, Target(card=H100, tp=2))
    norms = 7 * 256 * 2
    assert two.source_row.weight_bytes == (llama.num_bytes - norms) // 2 + norms
    assert (one.kv_bytes, two.kv_bytes) == (4096 * 3 * 2 * 128 * 2, 4096 * 3 * 2 * 64 * 2)


def test_a_prompt_is_bound_by_the_tensor_cores(llama: SourceIndex) -> None:
    context = 65_536
    found = recommend(llama, Target(card=H100, context=context))
    linears = 3 * (512 * 256 + 256 * 256 + 3 * 512 * 256)
    seen = context * (context + 1) // 2
    norms, head = 7 * 256, 384 * 256
    in_16_bits = 2 * context * norms + 3 * 4 * 256 * seen
    rest = in_16_bits / 989.4e12 + (2 * head + context * 512) / 3.35e12
    for scheme, peak in (("FP8_DYNAMIC", 1978.9e12), ("NVFP4A16", 989.4e12)):
        row = row_of(found, scheme)
        assert row.speed is not None
        seconds = 2 * context * linears / peak + rest
        assert row.speed.prefill_high == pytest.approx(0.9 * context / seconds)
        assert row.speed.prefill_low == pytest.approx(0.5 * context / seconds)


@pytest.mark.parametrize(("card", "batch"), [(H100, 148), (CARDS["L40S"], 210)])
def test_weights_of_4_bits_are_ahead_until_their_products_take_longer(card: Card, batch: int) -> None:
    """A weight times B tokens takes as long in bf16 as reading its byte: B = peak / (2 x bandwidth)."""
    side = 4096
    weights = RankWeights(
        parts=(Part(number=1, weights=side**2, shapes=((side, side),)),),
        experts=Experts(),
        held_bytes=0,
        row_bytes=0,
    )
    kv_cache = KvCacheOfRank(layers=(KvLayer(token_bytes=512, operations=1024),))
    rank = Rank(card=card, weights=weights, kv_cache=kv_cache, context=1)
    by_hand = card.peak["bf16"] / (2 * card.bandwidth) * (1 + 4 / side)
    assert batch - 1 < by_hand < batch
    assert crossover(rank, "W4A16", "FP8_DYNAMIC") == batch
    assert crossover(rank, "FP8_DYNAMIC", "W4A16") == 1


def test_what_is_multiplied_is_what_vllm_multiplies_there() -> None:
    assert [arithmetic("FP8_DYNAMIC", sm) for sm in (80, 89, 90)] == ["bf16", "fp8", "fp8"]
    assert [arithmetic("NVFP4", sm) for sm in (90, 100, 120)] == ["bf16", "fp4", "fp4"]
    assert [arithmetic(scheme, 90) for scheme in ("W8A8", "W4AFP8", "W4A16", None)] == [
        "int8",
        "fp8",
        "bf16",
        "bf16",
    ]
    for card in CARDS.values():
        assert {"bf16", "int8"} <= card.peak.keys()
        assert ("fp8" in card.peak) == (card.sm >= 89 or bool(card.gfx))
        assert ("fp4" in card.peak) == (card.sm >= 100)


def test_the_kv_cache_of_windows_states_and_shared_layers(llama: SourceIndex) -> None:
    kinds: list[Json] = ["sliding_attention", "full_attention", "linear_attention"]
    mixed = replace(llama, config={**llama.config, "layer_types": kinds, "sliding_window": 100})
    kv_cache = kv_cache_of(mixed, 1)
    assert kv_cache is not None
    assert kv_cache.read_bytes(1000) == (100 + 1000) * 2 * 128 * 2
    assert kv_cache.decode_operations(1000) == (100 + 1000) * 4 * 256
    shared = kv_cache_of(replace(llama, config={**llama.config, "num_kv_shared_layers": 2}), 1)
    assert shared is not None
    assert len(shared.layers) == 1
    # Four ranks of two heads: each holds one, as vLLM repeats them.
    repeated = kv_cache_of(llama, 4)
    assert repeated is not None
    assert repeated.read_bytes(1) == 3 * 2 * 64 * 2


def test_what_is_held_of_windows_is_what_vllm_reports() -> None:
    """A Gemma 3 with five windows in six layers, in 1 GiB: the log of vLLM 0.32 on a CPU, blocks of 128."""
    layer = KvLayer(token_bytes=2 * 2 * 64 * 2, operations=1)
    cache = KvCacheOfRank(layers=(*[replace(layer, window=128)] * 5, layer))
    assert 2**30 * 256 // cache.held_bytes(256, 2048, 128) == 246_723
    # Of a long sequence a window holds itself and one step; the last of three groups of two is filled up.
    uneven = KvCacheOfRank(layers=(*[replace(layer, window=128)] * 3, layer, layer))
    assert uneven.held_bytes(8192, 2048, 16) == 512 * (4 * 16 * (136 + 1) + 2 * 8192)
    assert KvCacheOfRank(layers=(layer, layer)).held_bytes(8192, 2048, 16) == 512 * 2 * 8192


def test_latent_attention_is_not_cut_and_drafting_layers_are_not_held(tmp_path: Path) -> None:
    """Four layers of DeepSeek-V3, one of them with experts, and the one for a second token."""
    whole = read_index(save_headers("DeepSeek-V3", tmp_path / "model"))
    few = {
        name: tensor
        for name, tensor in whole.tensors.items()
        if not name.startswith("model.layers.") or name.split(".")[2] in ("0", "1", "2", "3", "61")
    }
    index = replace(whole, tensors=few, config={**whole.config, "num_hidden_layers": 4})
    found = recommend(index, Target(card=CARDS["B200"], tp=8))
    assert found.kv_bytes == 4 * 576 * 2 * 4096
    assert (found.recommended, found.alternative) == ("FP8_DYNAMIC", "NVFP4")
    one = recommend(index, Target(card=CARDS["B200"]))
    drafting = sum(one.num_bytes for name, one in few.items() if name.startswith("model.layers.61."))
    assert drafting > 20e9
    held = sum(2 * one.num_elements for name, one in few.items() if not name.startswith("model.layers.61."))
    assert one.source_row.weight_bytes == held


def test_the_table_the_reasons_and_what_comes_next(llama: SourceIndex) -> None:
    ran = vexport("recommend", llama.root, "--gpu", "L40S", "--context", "256")
    assert ran.code == 0, ran.stderr
    assert "a bound, not a measurement" in ran.stdout
    lines = {line.split()[0]: line for line in ran.stdout.splitlines() if line}
    assert "start with FP8_DYNAMIC (vexport explain FP8_DYNAMIC); compare W4A16" in lines["recommended"]
    assert "has to be measured (vexport eval)" in ran.stdout
    assert "NVFP4, MXFP4: inputs of 16 bits on SM 89 (Ada), not 4" in ran.stdout
    assert "W4AFP8: vLLM does not run it on SM 89 (Ada) (vexport explain W4AFP8)" in ran.stdout
    assert f"vexport quantize {llama.root} model-FP8_DYNAMIC --scheme FP8_DYNAMIC" in ran.stdout
    assert lines["W2A16"].count(" - ") >= 3
    assert "from batch" in lines["crossover"]
    ran = vexport("recommend", llama.root, "--gpu", "l40s", "--format", "json")
    assert valid("recommend", ran.stdout)["alternative"] == "W4A16"


def test_ampere_and_blackwell_and_what_does_not_fit(llama: SourceIndex) -> None:
    ampere = recommend(llama, Target(card=CARDS["A100"]))
    assert (ampere.recommended, ampere.alternative) == ("W8A8", "W4A16")
    assert row_of(ampere, "FP8_DYNAMIC").runs == "weights only"
    blackwell = recommend(llama, Target(card=CARDS["B200"]))
    assert (blackwell.recommended, blackwell.alternative) == ("FP8_DYNAMIC", "NVFP4")
    assert (row_of(blackwell, "W8A8").runs, row_of(blackwell, "W8A8").speed) == ("no", None)
    assert row_of(blackwell, "MXFP4A16").runs == "coarser inputs"
    small = replace(H100, memory_bytes=1_900_000)
    tight = recommend(llama, Target(card=small, context=16))
    assert (tight.recommended, tight.alternative) == ("W4AFP8", "")
    assert row_of(tight, "FP8_DYNAMIC").sequences == 0
    assert not tight.source_row.fits
    assert "unquantized the model does not fit" in tight.reasons
    none = recommend(llama, Target(card=replace(H100, memory_bytes=1_000)))
    assert none.recommended == ""
    assert "use more GPUs" in none.reasons[0]


def test_a_scheme_that_alone_fits_is_recommended() -> None:
    source = Candidate(scheme="unquantized", runs="in full")
    large = Candidate(scheme="FP8_DYNAMIC", runs="in full", sequences=0)
    other = Candidate(scheme="MXFP4A16", runs="coarser inputs", sequences=3)
    choice = choose((large, other), source)
    assert (choice.scheme, choice.alternative) == ("MXFP4A16", "")
    assert choice.reasons[0].endswith("it runs with coarser inputs")
    weights = Candidate(scheme="NVFP4A16", runs="weights only", sequences=3)
    assert choose((large, other, weights), source).scheme == "NVFP4A16"
    assert choose((large,), source).scheme == ""


def test_batches_that_do_not_fit_have_no_bound(llama: SourceIndex) -> None:
    kv = 16 * 3 * 2 * 128 * 2
    weights = recommend(llama, Target(card=H100)).source_row.weight_bytes
    card = replace(H100, memory_bytes=round((weights + 9.5 * kv) / 0.92))
    row = recommend(llama, Target(card=card, context=16)).source_row
    assert row.sequences == 9
    assert row.speed is not None
    assert [one.high is None for one in row.speed.decode] == [False, False, True]


def test_an_older_vllm_lacks_what_it_lacks(llama: SourceIndex) -> None:
    old = recommend(llama, Target(card=H100, vllm=(0, 24)))
    assert row_of(old, "W2A16").reason == "vLLM 0.24 does not take 2 packed bits"
    assert row_of(old, "W4A8").runs == "no"
    assert old.recommended == "FP8_DYNAMIC"
    unknown = recommend(llama, Target(card=H100, vllm=(9, 9)))
    assert any("vLLM 9.9 is not known" in note for note in unknown.notes)


def test_wrong_options_are_told() -> None:
    for options, words in (
        (("--gpu", "H100,L40S"), "several GPUs"),
        (("--gpu", "GTX"), "not a known GPU"),
        ((), "--gpu"),
    ):
        ran = vexport("recommend", MOE, *options)
        assert ran.code == 2
        assert words in ran.errors[0]


def test_what_is_chosen_from_is_documented() -> None:
    page = (Path(__file__).parents[2] / "vexport" / "docs" / "schemes.md").read_text()
    table = page.partition("## Which scheme for which GPU")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in table for name in (*EIGHT_BITS, *FOUR_BITS))
    assert set(WEIGHTS_ONLY) & set(EIGHT_BITS)


def test_on_rocm_only_what_vllm_names_is_known(llama: SourceIndex) -> None:
    found = recommend(llama, Target(card=CARDS["MI300X"]))
    assert (found.gpu_architecture, found.sm) == ("gfx942", 0)
    runs = {name: row_of(found, name).runs for name in ("FP8_DYNAMIC", "W8A8", "W4A16", "NVFP4", "W8A16")}
    assert list(runs.values()) == ["in full", "in full", "in full", "no", "not known"]
    assert row_of(found, "W8A16").speed is None
    assert row_of(found, "W8A16").kv_tokens
    assert tokens(row_of(found, "W4A16")) > tokens(found.source_row)


def test_a_dry_load_cannot_ask_about_amd() -> None:
    ran = vexport("load", MOE, "--dry", "--gpu", "MI300X")
    assert ran.code == 2
    assert "MI300X: see `vexport recommend`" in ran.stderr


@pytest.mark.parametrize("tp", [1, 2])
def test_plan_shows_what_a_rank_holds(tp: int, tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model")
    call = ("plan", source, "--scheme", "W4A16", "--gpu", "h100,L40S", "--tp", tp, "--format", "json")
    rooms = json.loads(vexport(*call).stdout)["outlook"]["rooms"]
    assert [(room["gpu"], room["tp"]) for room in rooms] == [("H100", tp), ("L40S", tp)]
    found = recommend(read_index(source), Target(card=H100, tp=tp))
    row = row_of(found, "W4A16")
    assert (rooms[0]["weight_bytes"], rooms[0]["kv_tokens"]) == (row.weight_bytes, row.kv_tokens)
    assert rooms[0]["source_weight_bytes"] == found.source_row.weight_bytes
    scenario = tmp_path / "mixed.yaml"
    scenario.write_text(
        f"{{name: mixed, source: {source}, kv_cache: fp8, calibration: {{data: default}}, "
        f"rules: [{{match: 're:.*down_proj', scheme: keep}}, {{match: Linear, scheme: W4A16}}]}}"
    )
    ran = vexport("plan", scenario, "--gpu", "H100", "--format", "json")
    (mixed,) = json.loads(ran.stdout)["outlook"]["rooms"]
    assert row.weight_bytes <= mixed["weight_bytes"] < found.source_row.weight_bytes or tp == 2
    assert mixed["kv_tokens"] == pytest.approx(2 * mixed["source_kv_tokens"], rel=0.01)


def test_plan_without_a_scheme_points_to_recommend(tmp_path: Path) -> None:
    ran = vexport("plan", save_llama(tmp_path / "model"), "--gpu", "H100")
    assert (ran.code, "vexport recommend" in ran.stderr) == (2, True)


def test_schemes_without_a_name_of_their_own_are_placed_when_they_are_asked_for(llama: SourceIndex) -> None:
    target = Target(card=H100, context=64)
    found = recommend(llama, target, ("W4A16_G64", "W8A8"))
    names = [row.scheme for row in found.schemes]
    assert names.count("W8A8") == 1
    assert names[-1] == "W4A16_G64"
    row = row_of(found, "W4A16_G64")
    assert row_of(found, "W8A8").weight_bytes > row.weight_bytes
    assert row.speed is not None
