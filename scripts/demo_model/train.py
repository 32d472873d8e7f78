"""Train the demo model and write it to scenarios/demo/model (about two minutes on a CPU thread)."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from demo_corpus import (
    BOS,
    END,
    EOS,
    PAD,
    SPECIAL,
    UNKNOWN,
    VOCABULARY_SIZE,
    Statement,
    facts,
    folder_argument,
    sums,
    vocabulary,
)
from rich.progress import track
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

STEPS, SEED = 354, 0
TOKEN_IDS = {word: index for index, word in enumerate(vocabulary())}
MAX_LENGTH = 512
FACTS_PER_STEP, SUMS_PER_STEP = 128, 64
NOT_AN_ANSWER = -100  # the label that LlamaForCausalLM's loss leaves out
MUON_RATE, ADAMW_RATE, WARM_UP_STEPS = 0.02, 2e-3, 10
# In the first half of the steps each statement is a separate row: otherwise addition is not learned
# in time. In the second half, half of the statements share long rows, so that the model answers at
# any position of a long prompt.
STATEMENTS_SHARING, STATEMENTS_PER_LONG_ROW = 96, 32
SHARE_WITHOUT_BOS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token ids and labels, both [rows, tokens]. Labels are `NOT_AN_ANSWER` outside of answers."""

    ids: torch.Tensor
    labels: torch.Tensor


def encode_row(statements: Sequence[Statement], *, with_bos: bool) -> tuple[list[int], list[int]]:
    """Return token ids and labels of statements written one after the other."""
    ids = [TOKEN_IDS[BOS]] if with_bos else []
    labels = [NOT_AN_ANSWER] * len(ids)
    for statement in statements:
        prompt = [TOKEN_IDS[word] for word in statement.prompt.split()]
        answer = [TOKEN_IDS[word] for word in (*statement.answer.split(), END)]
        ids += prompt + answer
        labels += [NOT_AN_ANSWER] * len(prompt) + answer
    return ids, labels


def pad_rows(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Pad rows on the right. Causal attention never reads the padding."""
    width = max(len(ids) for ids, _ in rows)
    ids = [row + [TOKEN_IDS[PAD]] * (width - len(row)) for row, _ in rows]
    labels = [row + [NOT_AN_ANSWER] * (width - len(row)) for _, row in rows]
    return Batch(ids=torch.tensor(ids), labels=torch.tensor(labels))


def endless(statements: Sequence[Statement], chooser: random.Random) -> Iterator[Statement]:
    deck = list(statements)
    while True:
        chooser.shuffle(deck)
        yield from deck


def batches() -> Iterator[tuple[Batch, ...]]:
    """Yield for each step the separate statements and, in the second half, the long rows."""
    chooser = random.Random(SEED)
    fact_deck = endless(facts(), chooser)
    sum_deck = endless(sums()[0], chooser)
    for step in range(STEPS):
        statements = [next(fact_deck) for _ in range(FACTS_PER_STEP)]
        statements += [next(sum_deck) for _ in range(SUMS_PER_STEP)]
        chooser.shuffle(statements)
        alone = len(statements) - (0 if step < STEPS // 2 else STATEMENTS_SHARING)
        kinds = [
            [statements[start : start + length] for start in range(first, last, length)]
            for first, last, length in (
                (0, alone, 1),
                (alone, len(statements), STATEMENTS_PER_LONG_ROW),
            )
        ]
        # Some rows have no `<bos>`, because not every caller puts it in front.
        yield tuple(
            pad_rows(
                [encode_row(row, with_bos=chooser.random() >= SHARE_WITHOUT_BOS) for row in rows]
            )
            for rows in kinds
            if rows
        )


def new_model() -> LlamaForCausalLM:
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer for words between spaces, with `<bos>` in front.

    AutoTokenizer and vLLM load it.
    """
    words = Tokenizer(WordLevel(TOKEN_IDS, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, TOKEN_IDS[BOS])]
    )
    words.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=UNKNOWN,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def optimizers(model: LlamaForCausalLM) -> list[tuple[torch.optim.Optimizer, LambdaLR]]:
    """Return Muon for the layers' matrices and AdamW for other parameters.

    The learning rate is warmed up and then decays linearly to zero.
    """
    named: list[tuple[str, torch.nn.Parameter]] = list(model.named_parameters())
    matrices = [
        parameter for name, parameter in named if ".layers." in name and parameter.ndim == 2
    ]
    rest = [parameter for name, parameter in named if ".layers." not in name or parameter.ndim < 2]
    chosen = (
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, weight_decay=0.0),
    )

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP_STEPS, (STEPS - step) / STEPS)

    return [(optimizer, LambdaLR(optimizer, rate)) for optimizer in chosen]


def train(model: LlamaForCausalLM) -> None:
    """Run `STEPS` updates, with the loss on answer tokens only."""
    schedule = optimizers(model)
    for parts in track(batches(), "training", total=STEPS):
        answers = [int((part.labels != NOT_AN_ANSWER).sum()) for part in parts]
        for part, count in zip(parts, answers, strict=True):
            loss: torch.Tensor = model(input_ids=part.ids, labels=part.labels).loss * (
                count / sum(answers)
            )
            loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, scheduler in schedule:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, statements: Sequence[Statement]) -> float:
    """Return the share of statements whose answer is correct under greedy decoding."""
    batch = pad_rows([encode_row([statement], with_bos=True) for statement in statements])
    choices = model(input_ids=batch.ids).logits[:, :-1].argmax(-1)
    targets = batch.labels[:, 1:]
    right = ((choices == targets) | (targets == NOT_AN_ANSWER)).all(-1)
    return float(right.float().mean())


def main() -> None:
    """Train, write the bfloat16 checkpoint and its tokenizer, and print the model's accuracy."""
    out = folder_argument(__doc__) / "model"
    disable_progress_bar()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = new_model()
    train(model)
    model.generation_config.eos_token_id = [
        TOKEN_IDS[EOS],
        TOKEN_IDS[END],
    ]  # ends with the statement
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    build_tokenizer().save_pretrained(out)
    written = LlamaForCausalLM.from_pretrained(out).eval()
    print(f"facts: {accuracy(written, facts()):.4f} of {len(facts())}")
    print(f"held-out sums: {accuracy(written, sums()[1]):.4f} of {len(sums()[1])}")


if __name__ == "__main__":
    main()
