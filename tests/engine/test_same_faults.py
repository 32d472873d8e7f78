"""A fault that the static check and vLLM's loaders both find is shown once."""

from dataclasses import replace

from vexport.engine.same_faults import without_repetitions
from vexport.records import Claim, Finding
from vexport.rules.book import Rule

LAYER = "model.layers.2.mlp.up_proj"


def check(where: str, claim: Claim = "refused") -> Finding:
    return Finding.at(Rule("shapes/shape", claim=claim, got="y", need="x", do="z"), where)


def loader(where: str, got: str, claim: Claim = "refused", tp: int = 1) -> Finding:
    rule = Rule("dry-load/refused", claim=claim, got="{got}", need="x", do="z")
    return Finding.at(rule, where, tp=(tp,), sm=(90,), got=got)


def test_refusal_that_names_tensor() -> None:
    message = f"no parameter named '{LAYER.removeprefix('model.')}.weight_shape' in LlamaModel"
    refusal = loader("checkpoint", message)
    (static,), left = without_repetitions([check(f"{LAYER}.weight_shape")], [refusal])
    assert left == ()
    assert message in static.got
    _, left = without_repetitions([check("model.layers.3.mlp.up_proj.weight_shape")], [refusal])
    assert left == (refusal,)


def test_refusal_on_other_ranks_is_another_fault() -> None:
    refusal = loader("checkpoint", "no kernel")
    assert without_repetitions([check("config.json")], [refusal])[1] == ()
    other = replace(check("config.json"), tp=(2,))
    assert without_repetitions([other], [refusal])[1] == (refusal,)
    assert without_repetitions([check("config.json", "values")], [refusal])[1] == (refusal,)


def test_ranks_share_refusal() -> None:
    refusals = [
        loader(f"checkpoint (tp {tp})", f"size {512 // tp} must match {tp}", tp=tp) for tp in (1, 2)
    ]
    _, (left,) = without_repetitions([], refusals)
    assert left.places == ("checkpoint (tp 1)", "checkpoint (tp 2)")


def test_wrong_copies_of_known_tensors() -> None:
    places = (f"{LAYER}.weight", f"{LAYER}.weight_scale", "model.norm.weight")
    fault = replace(loader(places[0], "int8", "values"), places=places)
    static = [check(LAYER, "values")]
    _, (left,) = without_repetitions(static, [fault])
    assert left.every_place == ("model.norm.weight",)
    assert without_repetitions([], [fault])[1] == (fault,)
