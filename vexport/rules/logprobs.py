"""Rules of vLLM's log-probabilities, compared with a reference model's."""

from vexport.rules.book import Rule

NOT_A_NUMBER = Rule(
    "logprobs/not-a-number",
    claim="values",
    got="NaN at {wrong:,} of {count:,} positions",
    need="finite log-probabilities",
    do="look for scales that are zero, infinite or missing with `vexport check`",
)
DISTANCE = Rule(
    "logprobs/distance",
    claim="values",
    got="a mean KL of {mean_kl:.4g} over {count:,} positions",
    need="a mean KL of at most {limit:g} to {reference}",
    do="run `vexport check`: vLLM computes with other values than the checkpoint stores",
)
