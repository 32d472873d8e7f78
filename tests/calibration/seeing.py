"""Micro models that take pictures, with tokenizers, processors and chat templates."""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import PIL.Image
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.architectures.families import (
    FAMILIES,
    ONE_LAYER,
    PATCHES,
    QWEN_VISION,
    Family,
    Values,
    save,
)
from vexport.calibration import Samples
from vexport.calibration.pictures import PictureSample

SPECIALS = ("<pad>", "<s>", "</s>", "<image>", "<start>", "<end>", "<video>")
FIRST_SPECIAL = 256
PAD, BOS, EOS, IMAGE, START, END, VIDEO = range(FIRST_SPECIAL, FIRST_SPECIAL + len(SPECIALS))
IDS: Values = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
# Attributes of the tokenizer that processors read.
NAMED = {
    "image_token": "<image>",
    "boi_token": "<start>",
    "eoi_token": "<end>",
    "video_token": "<video>",
    "start_image_token": "<start>",
    "end_image_token": "<end>",
    "context_image_token": "<image>",
    "vision_start_token": "<start>",
    "vision_end_token": "<end>",
}
TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
  {{- message.role + ": " -}}
  {%- if message.content is string -%}{{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == "image" -%}{{- "PICTURE" -}}{%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- "\\n" -}}
{%- endfor -%}"""
QWEN_SIZES: Values = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
MEANS: Values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# transformers always interleaves the sections, vLLM only if the config says so.
QWEN3_ROPE: Values = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
SQUARE: Values = {"size": {"height": 56, "width": 56}}


@dataclass(frozen=True, kw_only=True)
class Seeing:
    """A family, its processor, the text of a picture in the chat template, and further tokens."""

    family: Family
    image_processor: Values
    processor: Values = field(default_factory=dict)
    picture: str = "<image>"
    tokens: Sequence[str] = ()


def _with_ids(family: Family, **ids: object) -> Family:
    return Family(
        family.model_type,
        {**family.text, **IDS},
        towers=family.towers,
        values={**(family.values or {}), **ids},
        without=family.without,
    )


SEEING: Mapping[str, Seeing] = {
    "qwen2.5-vl": Seeing(
        family=_with_ids(
            FAMILIES["qwen2.5-vl"],
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        ),
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
            **QWEN_SIZES,
            **MEANS,
        },
        processor={"processor_class": "Qwen2_5_VLProcessor"},
        picture="<start><image><end>",
    ),
    "qwen3-vl": Seeing(
        family=Family(
            "qwen3_vl",
            {**IDS, "num_hidden_layers": 3, "rope_scaling": QWEN3_ROPE},
            towers={
                "vision_config": {
                    **QWEN_VISION,
                    "depth": 2,
                    "deepstack_visual_indexes": [0, 1],
                    "num_position_embeddings": 64,
                }
            },
            values={
                "image_token_id": IMAGE,
                "video_token_id": VIDEO,
                "vision_start_token_id": START,
                "vision_end_token_id": END,
                "tie_word_embeddings": False,
            },
        ),
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128},
            **QWEN_SIZES,
            "patch_size": 16,
            **MEANS,
        },
        processor={"processor_class": "Qwen3VLProcessor"},
        picture="<start><image><end>",
    ),
    "llava": Seeing(
        family=Family(
            "llava",
            {**IDS, "model_type": "llama"},
            towers={"vision_config": {**ONE_LAYER, **PATCHES, "model_type": "clip_vision_model"}},
            values={"image_token_index": IMAGE, "image_seq_length": 16, "vision_feature_layer": -1},
        ),
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    ),
    "gemma3": Seeing(
        family=_with_ids(
            FAMILIES["gemma3-vision"],
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        image_processor={"image_processor_type": "Gemma3ImageProcessor", **SQUARE, **MEANS},
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        picture="<start>",
        tokens=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),  # vLLM looks for them
    ),
    "internvl": Seeing(
        family=Family(
            "internvl",
            {**IDS, "model_type": "qwen2"},
            towers={
                "vision_config": {
                    **ONE_LAYER,
                    "model_type": "internvl_vision",
                    "image_size": [56, 56],
                    "patch_size": [14, 14],
                }
            },
            values={"image_token_id": IMAGE, "image_seq_length": 4},
        ),
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            **SQUARE,
            **MEANS,
            "crop_to_patches": True,
            "max_patches": 2,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "idefics3": Seeing(
        family=_with_ids(FAMILIES["idefics3"], image_token_id=IMAGE),
        image_processor={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            **MEANS,
        },
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
}


def save_seeing(name: str, folder: Path) -> Path:
    """Save a micro model that takes pictures, with all files that a server needs."""
    save_with_processor(SEEING[name], folder)
    _correct_tensors(folder / "model.safetensors", name)
    return folder


def save_with_processor(seeing: Seeing, folder: Path) -> None:
    """Save a model of random weights, its tokenizer, its chat template and its processor."""
    save(seeing.family, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens(list(seeing.tokens))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=NAMED,
    )
    fast.save_pretrained(folder)
    template = TEMPLATE.replace("PICTURE", seeing.picture)
    (folder / "chat_template.jinja").write_text(template)
    processor = {**seeing.image_processor, "processor_class": seeing.processor["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps(seeing.processor))


Inputs = Mapping[str, torch.Tensor]


def _gemma4(width: int, height: int) -> tuple[int, Inputs]:
    processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    made = processor(picture(width, height), return_tensors="pt")
    tokens = int(made["num_soft_tokens_per_image"][0])
    return tokens, {name: made[name] for name in ("pixel_values", "image_position_ids")}


def _mistral3(width: int, height: int) -> tuple[int, Inputs]:
    processor = PixtralImageProcessorPil(
        size={"longest_edge": 56}, patch_size={"height": 28, "width": 28}
    )
    made = processor(picture(width, height), return_tensors="pt")
    sizes = torch.as_tensor(made["image_sizes"])
    tokens = int((sizes[0] // 28).prod())
    return tokens, {"pixel_values": torch.as_tensor(made["pixel_values"]), "image_sizes": sizes}


def _llama4(width: int, height: int) -> tuple[int, Inputs]:
    tiles = 1 + (height > width)
    generator = torch.Generator().manual_seed(width)
    return 4 * tiles, {"pixel_values": torch.randn(tiles, 3, 56, 56, generator=generator)}


LLAMA4_VISION: Values = {
    **{"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4},
    **{"num_hidden_layers": 1, "vision_output_dim": 128, "pixel_shuffle_ratio": 0.5},
    **{"projector_input_dim": 128, "projector_output_dim": 128},
    **PATCHES,
}
# Families whose processors need torchvision. Their functions return the number of tokens of a
# picture and the model's inputs for it.
NEEDING_TORCHVISION: Mapping[str, tuple[Family, Callable[[int, int], tuple[int, Inputs]]]] = {
    "gemma4": (_with_ids(FAMILIES["gemma4-vision"], image_token_id=IMAGE), _gemma4),
    "mistral3": (_with_ids(FAMILIES["mistral3"], image_token_index=IMAGE), _mistral3),
    "llama4": (
        Family(
            "llama4",
            FAMILIES["llama4"].text,
            towers={"vision_config": LLAMA4_VISION},
            values={"image_token_index": IMAGE},
        ),
        _llama4,
    ),
}


class PreparedPicture(PictureSample):
    """A sample whose inputs exist already."""

    def __init__(self, made: Inputs) -> None:
        object.__setattr__(self, "digest", "made")
        self.__dict__["made"] = made

    def inputs(self) -> Inputs:
        made: Inputs = self.__dict__["made"]
        return made


def save_needing_torchvision(name: str, folder: Path) -> Samples:
    """Save a micro model whose processor needs torchvision, and return samples for it."""
    family, prepare = NEEDING_TORCHVISION[name]
    save(family, folder)
    _correct_tensors(folder / "model.safetensors", name)
    rows: list[tuple[int, ...]] = [(5, 6, 7, 8, 9)]
    pictures: list[PictureSample | None] = [None]
    for size in ((90, 70), (60, 150)):
        tokens, made = prepare(*size)
        ids = (60, 61, *[IMAGE] * tokens, 70, 71)
        if name == "gemma4":
            made = {**made, "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).long()}
        rows.append(ids)
        pictures.append(PreparedPicture(made))
    return Samples(token_ids=tuple(rows), rows=(1, 2, 3), pictures=tuple(pictures))


def _correct_tensors(file: Path, name: str) -> None:
    """Name LLaVA's tower as on the hub, and fill weights of zeros, such as Gemma 3's projector."""
    tensors = load_file(file)
    if name == "llava":
        old, new = "vision_tower.", "vision_tower.vision_model."
        tensors = {key.replace(old, new): value for key, value in tensors.items()}
    generator = torch.Generator().manual_seed(0)
    for key, value in tensors.items():
        if value.dim() > 1 and not value.any():
            random = torch.randn(value.shape, generator=generator) * 0.05
            tensors[key] = random.to(value.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Return a picture with stripes of two colors."""
    image = PIL.Image.new("RGB", (width, height), (40 * seed % 256, 90, 160))
    image.paste((250, 70 * seed % 256, 20), (0, 0, width // 2, height // (2 + seed % 3)))
    return image


def png(image: PIL.Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def address(image: PIL.Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def question(*pictures: str, text: str = "what is it?", answer: str = "a box") -> dict[str, object]:
    """Return a row in OpenAI's form with pictures at these addresses."""
    parts: list[object] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    parts.append({"type": "text", "text": text})
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
