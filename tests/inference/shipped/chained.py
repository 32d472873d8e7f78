"""A model that always writes the same call of a tool: each token has one successor.

The attention and the MLP of the only layer are zero, and the embeddings are unit vectors. Therefore
the head chooses the next token by the current token alone.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vexport.inference.shipped.base import JsonObject

TOOL: JsonObject = {
    "type": "function",
    "function": {"name": "ping", "description": "Ping the server."},
}
CALL = ("<tool_call>", '{"name":', '"ping",', '"arguments":', "{}}", "</tool_call>", "<eos>")
MALFORMED = ('<tool_call>{"name"', "<eos>")
WORDS = ("<unk>", "<few>", "<many>", *CALL, MALFORMED[0])
# The last token of the prompt tells the model the number of tools.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{{ '<many>' if (tools or []) | length >= 40 else '<few>' }}"
)
_SIZE = 64


def make_model(folder: Path, *, breaks: bool, template: str = TEMPLATE) -> Path:
    """Write the model. With `breaks`, its call is malformed if there are at least 40 tools."""
    ids = {word: number for number, word in enumerate(WORDS)}
    chain = ("<few>", *CALL)
    successors = dict(zip(chain, chain[1:], strict=False))
    successors["<many>"] = MALFORMED[0] if breaks else CALL[0]
    successors[MALFORMED[0]] = "<eos>"
    config = LlamaConfig(
        vocab_size=_SIZE,
        hidden_size=_SIZE,
        intermediate_size=_SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_SIZE,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids["<eos>"],
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    _fill(model, {ids[word]: ids[next_] for word, next_ in successors.items()})
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return folder


def _fill(model: LlamaForCausalLM, successors: Mapping[int, int]) -> None:
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(_SIZE))
        model.lm_head.weight.zero_()
        for token, next_ in successors.items():
            model.lm_head.weight[next_, token] = 10.0
