"""Train a model that sees, and write it to scenarios/demo/model-sight (four minutes on a thread).

The model answers the questions of the task `sight` about pictures from other seeds, and adds two
digits without a picture.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from demo_corpus import folder_argument
from PIL import Image
from rich.progress import track
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Idefics3VisionConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from vexport.inference.pictures import TOPICS, picture_questions

STEPS, SEED = 600, 0
QUESTIONS_PER_STEP, SUMS_PER_STEP = 96, 8
TRAINING, HELD_OUT = "train", "test"  # seeds of pictures; the task's seeds are numbers
TESTED_QUESTIONS, TESTED_SUMS = 400, 100
MUON_RATE, ADAMW_RATE, WARM_UP_STEPS = 0.02, 3e-3, 20
DECAY_FROM = 0.2  # share of the steps after which the learning rate falls
SIDE, PATCH = 64, 16
IMAGE_TOKENS = (SIDE // PATCH) ** 2
MAX_LENGTH = 256
PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
# Special tokens of Idefics3.
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, IMAGE, AROUND, WHOLE, "<end_of_utterance>")
PICTURE = f"{AROUND}{WHOLE}{IMAGE * IMAGE_TOKENS}{AROUND}"
ROLES = ("<system>", "<user>", "<assistant>")
NUMBERS = tuple(map(str, range(19)))
SUM = "What is {} plus {} ? Answer with one number."
VOCABULARY_MULTIPLE = 64
NOT_AN_ANSWER = -100  # the label that the model's loss leaves out
TEMPLATE = """\
{%- for message in messages -%}
{{ '<' + message['role'] + '> ' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ '<image> ' }}{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}{{ '</s>' }}{%- endif -%}
{{ ' ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}
"""  # noqa: E501

Row = tuple[list[int], list[int]]
"""Token ids and labels."""


def vocabulary() -> list[str]:
    """Return every word in the order of its token id, with reserved words at the end."""
    texts = [SUM, *(f"{topic.prompt} {' '.join(topic.choices)}" for topic in TOPICS)]
    words = {word for text in texts for word, _ in Whitespace().pre_tokenize_str(text.lower())}
    known = [*SPECIAL, *ROLES, *NUMBERS, *sorted(words - {*NUMBERS, "{}"})]
    return known + [f"<unused{number}>" for number in range(-len(known) % VOCABULARY_MULTIPLE)]


TOKEN_IDS = {word: index for index, word in enumerate(vocabulary())}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer for words and punctuation, in lower case."""
    words = Tokenizer(WordLevel(TOKEN_IDS, unk_token=UNKNOWN))
    words.normalizer = Lowercase()
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens([*SPECIAL, *ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=UNKNOWN,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> Idefics3Processor:
    """Build a processor that works without torchvision."""
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=False,
    )
    return Idefics3Processor(
        pictures, build_tokenizer(), image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE
    )


def new_model() -> Idefics3ForConditionalGeneration:
    vision = Idefics3VisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=len(TOKEN_IDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
        pad_token_id=TOKEN_IDS[PAD],
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=TOKEN_IDS[IMAGE],
        scale_factor=1,
        pad_token_id=TOKEN_IDS[PAD],
        tie_word_embeddings=False,
    )
    return Idefics3ForConditionalGeneration(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows with a picture, and then rows without.

    `ids` and `labels` are [rows, tokens], and `pixels` are [rows with a picture, 1, 3, side, side].
    Labels are `NOT_AN_ANSWER` outside of answers.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    pixels: torch.Tensor


def pixels_of(picture: Image.Image) -> torch.Tensor:
    """Return a picture [3, side, side] as the processor does."""
    small = picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(small, np.float32) / 127.5 - 1).permute(2, 0, 1)


def encode_row(
    tokenizer: PreTrainedTokenizerFast, question: str, answer: str, *, has_picture: bool
) -> Row:
    """Return the row of a question and its answer, as the chat template renders it."""
    picture = f"{PICTURE} " if has_picture else ""
    prompt = tokenizer(f"<user> {picture}{question} <assistant>")["input_ids"]
    ending = [TOKEN_IDS[answer], TOKEN_IDS[EOS]]
    return prompt + ending, [NOT_AN_ANSWER] * len(prompt) + ending


def padded(rows: list[Row], pixels: list[torch.Tensor]) -> Batch:
    """Pad rows on the right. Causal attention never reads the padding."""
    width = max(len(ids) for ids, _ in rows)
    ids = [row + [TOKEN_IDS[PAD]] * (width - len(row)) for row, _ in rows]
    labels = [row + [NOT_AN_ANSWER] * (width - len(row)) for _, row in rows]
    return Batch(
        ids=torch.tensor(ids), labels=torch.tensor(labels), pixels=torch.stack(pixels)[:, None]
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: str, steps: int, questions: int, sums: int
) -> Iterator[Batch]:
    """Yield a batch for each step, with this number of questions about pictures and of sums."""
    chooser = random.Random(seed)
    following = picture_questions(steps * questions, seed)
    for _ in range(steps):
        rows: list[Row] = []
        pixels: list[torch.Tensor] = []
        for _ in range(questions):
            each = next(following)
            answer = each.topic.choices[each.answer]
            rows.append(encode_row(tokenizer, each.topic.prompt, answer, has_picture=True))
            pixels.append(pixels_of(each.picture))
        for _ in range(sums):
            left, right = chooser.randrange(10), chooser.randrange(10)
            question = SUM.format(left, right)
            rows.append(encode_row(tokenizer, question, str(left + right), has_picture=False))
        yield padded(rows, pixels)


def optimizers(
    model: Idefics3ForConditionalGeneration,
) -> list[tuple[torch.optim.Optimizer, LambdaLR]]:
    """Return Muon for the layers' matrices and AdamW for other parameters.

    The learning rate is warmed up, stays, and then decays linearly to zero.
    """
    named: list[tuple[str, torch.nn.Parameter]] = list(model.named_parameters())
    matrices = [each for name, each in named if ".layers." in name and each.ndim == 2]
    rest = [each for name, each in named if ".layers." not in name or each.ndim != 2]
    chosen = (
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, weight_decay=0.0),
    )

    def rate(step: int) -> float:
        left = (STEPS - step) / STEPS
        return min(1.0, (step + 1) / WARM_UP_STEPS, left / (1 - DECAY_FROM))

    return [(optimizer, LambdaLR(optimizer, rate)) for optimizer in chosen]


def train(model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Run `STEPS` updates, with the loss on answer tokens only."""
    schedule = optimizers(model)
    steps = batches(tokenizer, TRAINING, STEPS, QUESTIONS_PER_STEP, SUMS_PER_STEP)
    for batch in track(steps, "training", total=STEPS):
        output = model(input_ids=batch.ids, pixel_values=batch.pixels, labels=batch.labels)
        output.loss.backward()
        for optimizer, scheduler in schedule:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@torch.inference_mode()
def accuracies(
    model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> dict[str, float]:
    """Return the share of right answers to held-out questions of each topic, and of right sums."""
    (batch,) = batches(tokenizer, HELD_OUT, 1, TESTED_QUESTIONS, TESTED_SUMS)
    pixels = batch.pixels.to(model.dtype)
    choices = model(input_ids=batch.ids, pixel_values=pixels).logits[:, :-1].argmax(-1)
    targets = batch.labels[:, 1:]
    right = ((choices == targets) | (targets == NOT_AN_ANSWER)).all(-1).float()
    asked = right[:TESTED_QUESTIONS]
    shares = {
        topic.name: float(asked[first :: len(TOPICS)].mean()) for first, topic in enumerate(TOPICS)
    }
    return {**shares, "sums": float(right[TESTED_QUESTIONS:].mean())}


def main() -> None:
    """Train, write the bfloat16 checkpoint and its processor, and print the model's accuracy."""
    out = folder_argument(__doc__) / "model-sight"
    disable_progress_bar()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = new_model()
    processor = build_processor()
    train(model, processor.tokenizer)
    model.generation_config.eos_token_id = TOKEN_IDS[EOS]
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    processor.save_pretrained(out)
    written = Idefics3ForConditionalGeneration.from_pretrained(out, dtype=torch.bfloat16).eval()
    for topic, share in accuracies(written, processor.tokenizer).items():
        print(f"{topic}: {share:.4f}")


if __name__ == "__main__":
    main()
