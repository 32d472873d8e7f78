"""The demo model's word-level tokenizer: whitespace separates words, `<bos>` is put in front."""

from demo_corpus import BOS, EOS, PAD, SPECIAL, UNKNOWN, vocabulary
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer over `vocabulary()` that AutoTokenizer and vLLM can load once it is saved."""
    ids = {word: index for index, word in enumerate(vocabulary())}
    words = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    words.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=UNKNOWN,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
