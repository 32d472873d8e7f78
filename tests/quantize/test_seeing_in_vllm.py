"""Micro models that take pictures: quantized, checked, loaded dry, and run with pictures in vLLM.

vLLM imports torchvision for most families. VEXPORT_VISION_VLLM_PYTHON names an interpreter with
vLLM's CPU build and torchvision, which `scripts/setup-vllm VERSION FOLDER --torchvision` creates.
Without this variable, these tests are skipped.

Idefics3 needs no torchvision. The demo's model is one, and runs in tests/run/test_sight_in_vllm.py.
Here, one picture has more tokens than the micro model's longest sequence.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file

from tests.calibration.seeing import SEEING, address, picture, question, save_seeing, write_rows
from tests.command import vexport
from tests.engine.pictured import PicturePrompt, PicturePrompts, PromptTokens
from tests.texts import assert_contains
from vexport.calibration.pictures import PictureProcessor
from vexport.engine.reference import load_dequantized
from vexport.engine.session import Worker
from vexport.errors.extras import is_installed
from vexport.numerics.metrics import kl_divergence
from vexport.records import silent
from vexport.rules import engine as rules

PYTHON = os.environ.get("VEXPORT_VISION_VLLM_PYTHON", "")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
needs_torchvision = pytest.mark.skipif(
    not PYTHON, reason="VEXPORT_VISION_VLLM_PYTHON is not set to an interpreter"
)
FAMILIES = [family for family in SEEING if family != "idefics3"]
# Sizes that processors do not change, because Pillow and torchvision scale differently.
SIZES: Mapping[str, tuple[int, int]] = {"qwen2.5-vl": (84, 56), "qwen3-vl": (64, 128)}
# vLLM's CPU attention is causal inside pictures, as transformers' is without these inputs.
LEFT_OUT: Mapping[str, str] = {"gemma3": "token_type_ids"}
URLS = [address(picture(90, 70, seed)) for seed in range(4)]
ROWS = [question(URLS[0]), question(URLS[1], URLS[2], text="which of the two?"), question(URLS[3])]


def prompts_of(family: str, folder: Path) -> tuple[PicturePrompt, ...]:
    """Return prompts with one picture and with two."""
    folder.mkdir()
    prompts = []
    for count in (1, 2):
        files = tuple(folder / f"{count}-{number}.png" for number in range(count))
        for number, file in enumerate(files):
            picture(*SIZES.get(family, (56, 56)), seed=count + number).save(file)
        text = f"<s>user: {SEEING[family].picture * count}what is it?\nassistant: a box"
        prompts.append(PicturePrompt(text=text, pictures=files))
    return tuple(prompts)


class Reference:
    """The checkpoint in transformers, with dequantized weights and the stored inputs' rounding."""

    def __init__(self, checkpoint: Path, left_out: str) -> None:
        self._left_out = left_out
        self._model = load_dequantized(checkpoint)
        self._processor = PictureProcessor(checkpoint, trust_remote_code=False)

    def run(self, text: str, images: list[PIL.Image.Image]) -> tuple[list[int], torch.Tensor]:
        """Return the token ids, and the log-probabilities after each token but the last."""
        inputs = self._processor.run(text, images, adds_special_tokens=False)
        given = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in inputs.items()
            if name != self._left_out
        }
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            logits: torch.Tensor = self._model(**given).logits[0, :-1]
        return inputs["input_ids"][0].tolist(), torch.log_softmax(logits.float(), dim=-1)


@needs_torchvision
@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_model_sees_in_vllm_as_in_transformers(
    family: str, scheme: str, tmp_path: Path
) -> None:
    model, out = save_seeing(family, tmp_path / "model"), tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    options = ("--calibration", data, "--on-unsupported-shape", "keep", "--quiet")
    assert vexport("quantize", model, out, "--scheme", scheme, *options).code == 0
    checked = vexport("check", out, "--static", "--source", model, "--quiet")
    assert checked.code == 0, checked.stdout
    dry = vexport("load", out, "--dry", "--sm", "100", "--vllm-python", PYTHON, "--quiet")
    assert dry.code == 0, dry.stdout
    prompts = prompts_of(family, tmp_path / "pictures")
    file = tmp_path / "logprobs.safetensors"
    worker = Worker(
        module="tests.engine.pictured",
        request=PicturePrompts(checkpoint=out, prompts=prompts, file=file),
        kind=PromptTokens,
        where=family,
        log=tmp_path / "log",
        timeout=900,
        vllm_python=Path(PYTHON),
    )
    ids = worker.run(silent).ids
    reference, served = Reference(out, LEFT_OUT.get(family, "")), load_file(file)
    for number, prompt in enumerate(prompts):
        images = [PIL.Image.open(each).convert("RGB") for each in prompt.pictures]
        tokens, expected = reference.run(prompt.text, images)
        assert list(ids[number]) == tokens
        distance = kl_divergence(expected, served[f"prompt.{number}"]).mean()
        others = [picture(*image.size, seed=9) for image in images]
        change = kl_divergence(expected, reference.run(prompt.text, others)[1]).mean()
        print(f"{family} {scheme} KL {distance:.2e}, other picture {change:.2e}")
        assert distance < 1e-4 if scheme == "W4A16" else distance < change / 4


@needs_torchvision
def test_causal_attention_inside_pictures_is_named(tmp_path: Path) -> None:
    model = save_seeing("gemma3", tmp_path / "model")
    ran = vexport("load", model, "--vllm-python", PYTHON, "--no-canaries", "--quiet")
    assert ran.code == 0, ran.stderr
    assert "both directions inside a picture" in " ".join(ran.stdout.split())


@pytest.mark.skipif(is_installed("torchvision"), reason="torchvision is installed")
def test_missing_torchvision_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    model = save_seeing("llava", tmp_path / "model")
    ran = vexport("load", model, "--no-canaries", "--quiet")
    assert ran.code == 4, ran.stdout
    assert_contains(ran.stderr, "No module named 'torchvision'", rules.NO_PACKAGE.id)
