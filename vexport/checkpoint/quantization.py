"""Places of a checkpoint's quantization config, in the order in which vLLM looks for it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vexport.files import read_json_object
from vexport.records import Json

KEY = "quantization_config"
# compressed-tensors' older name.
OLDER_KEY = "compression_config"
# ModelOpt 0.29 and before wrote it to a separate file, which newer versions still write as well.
SEPARATE_FILE = "hf_quant_config.json"
TEXT = "text_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """A quantization config, and the place that names it in messages."""

    place: str
    values: Mapping[str, Json]


def find_quantization(root: Path, config: Mapping[str, Json]) -> StoredQuantization | None:
    """The quantization config of a checkpoint folder whose config.json is `config`; None where it has none.

    Sources: get_config in vllm/transformers_utils/config.py, get_quantization_config in
    model_arch_config_convertor.py next to it.
    """
    for place, value in _places(root, config):
        if value is not None:
            return StoredQuantization(place=place, values=value) if isinstance(value, dict) else None
    return None


def _places(root: Path, config: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    file = root / "config.json"
    yield f"{file}: {KEY}", config.get(KEY)
    if (root / SEPARATE_FILE).is_file():
        yield str(root / SEPARATE_FILE), dict(read_json_object(root / SEPARATE_FILE))
    yield f"{file}: {OLDER_KEY}", config.get(OLDER_KEY)
    text = config.get(TEXT)
    if isinstance(text, dict):
        yield f"{file}: {TEXT}.{KEY}", text.get(KEY)
        yield f"{file}: {TEXT}.{OLDER_KEY}", text.get(OLDER_KEY)
