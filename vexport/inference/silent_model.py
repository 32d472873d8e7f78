"""A model without an engine, for work that only needs lm-eval's prompts."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

from vexport.inference.model import Model, Question, TokenIds
from vexport.inference.row_scores import RowScores
from vexport.inference.stored_responses import StoredResponses
from vexport.records import DraftCounts, silent
from vexport.scenario.serve import EngineArguments


class SilentModel(Model):
    """A model that cannot run prompts, for building prompts without an engine.

    It has the config that vLLM makes from an engine's arguments, because vLLM chooses the chat
    template by this config.
    """

    def __init__(self, arguments: EngineArguments) -> None:
        from vllm.engine.arg_utils import EngineArgs

        super().__init__(StoredResponses(None), silent)
        config = EngineArgs(**arguments).create_model_config()
        self.llm_engine = SimpleNamespace(model_config=config)

    def ask(self, questions: Mapping[str, Question]) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def score_rows(self, rows: Sequence[TokenIds]) -> Iterator[RowScores]:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def count_draft(self, prompt: TokenIds) -> DraftCounts:
        """Raise NotImplementedError."""
        raise NotImplementedError
