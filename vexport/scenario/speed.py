"""What is timed."""

from typing import Annotated

from pydantic import Field

from vexport.scenario.section import Section
from vexport.types import Workload
from vexport.types.counts import Positive

_DEFAULT = Workload()


class Speed(Section):
    """How both models are timed: with so many requests at once, of `input_len` and `output_len` tokens."""

    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1)] = _DEFAULT.concurrency
    input_len: Positive = _DEFAULT.input_len
    output_len: Positive = _DEFAULT.output_len

    @property
    def workload(self) -> Workload:
        """The same, each concurrency once."""
        concurrency = tuple(dict.fromkeys(self.concurrency))
        return Workload(concurrency=concurrency, input_len=self.input_len, output_len=self.output_len)
