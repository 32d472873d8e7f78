"""Rules of the shapes of layers that vLLM can run quantized."""

from vexport.rules.book import Rule

UNSUPPORTED = Rule("shape/unsupported", claim="refused", got="{reason}", do="{advice}")
