"""Builds the draft model of speculative decoding next to its target, as vLLM's proposers do."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Begins the names of its layers in a report.
DRAFTER = "drafter."
_METHOD = re.compile(r"(?P<method>[a-z][\w-]*)(?:=(?P<model>.+))?")
# Parameters that MTP layers take from the target, whatever the checkpoint has: `_maybe_share_embeddings` and
# `_maybe_share_lm_head` in vllm/v1/spec_decode/llm_base_proposer.py.
_SHARED = re.compile(r"(?:^|\.)(?P<shared>embed_tokens|lm_head|shared_head\.head)\.")


def speculative_config(speculative: str, tokens: int = 1) -> dict[str, JsonValue] | None:
    """The `speculative_config` of vLLM for `METHOD` or `METHOD=FOLDER`, with drafts of so many tokens; None
    without a method.
    """
    parts = _METHOD.fullmatch(speculative)
    if parts is None:
        return None
    model: dict[str, JsonValue] = {"model": parts["model"]} if parts["model"] else {}
    return {"method": parts["method"], "num_speculative_tokens": tokens, **model}


def build_drafter(config: "VllmConfig") -> torch.nn.Module | None:
    """The draft model of a configuration; None where nothing drafts, or a method without weights does."""
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.model_loader.utils import initialize_model

    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is None or draft.runner_type != "draft":
        return None
    with set_model_tag("eagle_head"):
        drafter: torch.nn.Module = initialize_model(config, model_config=draft)
    return drafter


def shared_parameters(drafter: torch.nn.Module) -> Iterator[str]:
    """The parameters that a loaded drafter takes from its target where the checkpoint has none for it."""
    own = {
        "embed_tokens": getattr(drafter, "has_own_embed_tokens", False),
        "lm_head": getattr(drafter, "has_own_lm_head", False),
        "shared_head.head": False,
    }
    for name, _ in drafter.named_parameters():
        if (part := _SHARED.search(name)) and not own[part["shared"]]:
            yield name
