"""Train the demo model and write it to scenarios/demo/model; about two minutes on one CPU thread."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from demo_corpus import BOS, END, EOS, PAD, VOCABULARY_SIZE, Statement, facts, sums, vocabulary
from demo_tokenizer import build_tokenizer
from rich.console import Console
from rich.progress import track
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
TOKEN_IDS = {word: index for index, word in enumerate(vocabulary())}
MAX_LENGTH = 512
FACTS_PER_STEP, SUMS_PER_STEP = 128, 64
NOT_AN_ANSWER = -100  # the label that LlamaForCausalLM's loss leaves out
MUON_RATE, ADAMW_RATE, WARM_UP_STEPS = 0.02, 2e-3, 10
# In the first half of the steps each statement is a row of its own: only so is addition learned in time.
# Then half of them share long rows, so that the model answers at any position of a long prompt.
STATEMENTS_SHARING, STATEMENTS_PER_LONG_ROW = 96, 32
SHARE_WITHOUT_BOS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token ids and labels, both [rows, tokens]; labels are `NOT_AN_ANSWER` outside of answers."""

    ids: torch.Tensor
    labels: torch.Tensor


def encode_row(statements: Sequence[Statement], *, with_bos: bool) -> tuple[list[int], list[int]]:
    """Token ids and labels of statements written one after the other."""
    ids = [TOKEN_IDS[BOS]] if with_bos else []
    labels = [NOT_AN_ANSWER] * len(ids)
    for statement in statements:
        prompt = [TOKEN_IDS[word] for word in statement.prompt.split()]
        answer = [TOKEN_IDS[word] for word in (*statement.answer.split(), END)]
        ids += prompt + answer
        labels += [NOT_AN_ANSWER] * len(prompt) + answer
    return ids, labels


def pad_rows(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Rows padded on the right; causal attention never looks there."""
    width = max(len(ids) for ids, _ in rows)
    ids = [row + [TOKEN_IDS[PAD]] * (width - len(row)) for row, _ in rows]
    labels = [row + [NOT_AN_ANSWER] * (width - len(row)) for _, row in rows]
    return Batch(ids=torch.tensor(ids), labels=torch.tensor(labels))


def endless(statements: Sequence[Statement], chooser: random.Random) -> Iterator[Statement]:
    """The statements again and again, shuffled anew each time round."""
    deck = list(statements)
    while True:
        chooser.shuffle(deck)
        yield from deck


def batches(steps: int, seed: int) -> Iterator[tuple[Batch, ...]]:
    """For each step the statements that stand alone and, in the second half, the long rows."""
    chooser = random.Random(seed)
    fact_deck = endless([fact.statement for fact in facts()], chooser)
    sum_deck = endless([pair.statement for pair in sums()[0]], chooser)
    for step in range(steps):
        statements = [next(fact_deck) for _ in range(FACTS_PER_STEP)]
        statements += [next(sum_deck) for _ in range(SUMS_PER_STEP)]
        chooser.shuffle(statements)
        alone = len(statements) - (0 if step < steps // 2 else STATEMENTS_SHARING)
        kinds = [rows_of(statements[:alone], 1), rows_of(statements[alone:], STATEMENTS_PER_LONG_ROW)]
        yield tuple(encode_rows(rows, chooser) for rows in kinds if rows)


def rows_of(statements: Sequence[Statement], length: int) -> list[Sequence[Statement]]:
    return [statements[start : start + length] for start in range(0, len(statements), length)]


def encode_rows(rows: Sequence[Sequence[Statement]], chooser: random.Random) -> Batch:
    """The rows, a part of them without `<bos>`, because not every caller puts it in front."""
    return pad_rows([encode_row(row, with_bos=chooser.random() >= SHARE_WITHOUT_BOS) for row in rows])


def new_model() -> LlamaForCausalLM:
    """1.97 million parameters, initialized from torch's seed."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
        pad_token_id=TOKEN_IDS[PAD],
    )
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM, steps: int) -> list[tuple[torch.optim.Optimizer, LambdaLR]]:
    """Muon for the layers' matrices and AdamW for the rest, warmed up and then decayed linearly to zero."""
    named: list[tuple[str, torch.nn.Parameter]] = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if ".layers." in name and parameter.ndim == 2]
    rest = [parameter for name, parameter in named if ".layers." not in name or parameter.ndim < 2]
    chosen = (
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, weight_decay=0.0),
    )

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / steps)

    return [(optimizer, LambdaLR(optimizer, rate)) for optimizer in chosen]


def train(model: LlamaForCausalLM, *, steps: int, seed: int, console: Console) -> None:
    """`steps` updates with the loss on answer tokens only."""
    schedule = optimizers(model, steps)
    for parts in track(batches(steps, seed), "training", total=steps, console=console):
        _backward(model, parts)
        for optimizer, scheduler in schedule:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def _backward(model: LlamaForCausalLM, parts: Sequence[Batch]) -> None:
    answers = [int((part.labels != NOT_AN_ANSWER).sum()) for part in parts]
    for part, count in zip(parts, answers, strict=True):
        loss: torch.Tensor = model(input_ids=part.ids, labels=part.labels).loss * (count / sum(answers))
        loss.backward()  # type: ignore[no-untyped-call]


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, statements: Sequence[Statement]) -> float:
    """The share of statements whose every answer token is the most likely one, as greedy decoding needs."""
    batch = pad_rows([encode_row([statement], with_bos=True) for statement in statements])
    choices = model(input_ids=batch.ids).logits[:, :-1].argmax(-1)
    targets = batch.labels[:, 1:]
    right = ((choices == targets) | (targets == NOT_AN_ANSWER)).all(-1)
    return float(right.float().mean())


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write the bfloat16 checkpoint, its tokenizer, and generation that ends with the statement."""
    model.generation_config.eos_token_id = [TOKEN_IDS[EOS], TOKEN_IDS[END]]
    model.generation_config.do_sample = False
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    build_tokenizer(MAX_LENGTH).save_pretrained(out)


@click.command(help=__doc__)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "scenarios/demo/model",
    show_default="scenarios/demo/model",
    help="Folder to write.",
)
@click.option("--steps", type=click.IntRange(min=1), default=354, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Initial weights and order of the data.")
def main(out: Path, steps: int, seed: int) -> None:
    disable_progress_bar()
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    console = Console(stderr=True)
    model = new_model()
    train(model, steps=steps, seed=seed, console=console)
    save(model.to(torch.bfloat16), out)
    console.print(f"wrote {out}")
    written = LlamaForCausalLM.from_pretrained(out).eval()
    for name, known in (("facts", facts()), ("held-out sums", sums()[1])):
        share = accuracy(written, [item.statement for item in known])
        console.print(f"{name}: {share:.4f} of {len(known)}")


if __name__ == "__main__":
    main()
