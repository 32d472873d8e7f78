"""Rules of the safetensors files and their index."""

from vexport.rules.book import Rule

_ONE_FILE = "each tensor in one file"
_WRITE_INDEX = "write the index again: loaders other than vLLM's use these entries"

PATTERN_IN_PATH = Rule(
    "shards/pattern-in-path",
    "warning",
    "refused",
    got="a path that vLLM reads as a pattern, and that does not match these weights",
    need="a path without [, ], * and ?",
    do="rename the folder, or give vLLM a link to it (ln -s)",
)
OTHER_FILES = Rule(
    "shards/other-files",
    claim="values",
    got="{names:and}, and vLLM loads only files with such names if a folder has them",
    need="a folder without consolidated*.safetensors, whose other files vLLM loads",
    do="remove {names:and}, or set vLLM's load_format to safetensors and its config_format to hf",
)
UNLISTED_FILE = Rule(
    "shards/unlisted-file",
    "warning",
    "values",
    got="a tensor in {file}, which vLLM loads, too",
    need="a single safetensors file, or an index of all files",
    do="remove the file that does not belong to the checkpoint, or write an index",
)
UNKNOWN_TENSOR_IN_UNLISTED_FILE = Rule(
    "shards/unknown-tensor-in-unlisted-file",
    claim="refused",
    got="a tensor in {file}, which vLLM loads, too",
    need="a single safetensors file, or an index of all files",
    do="remove the file that does not belong to the checkpoint, or write an index",
)
EQUAL_COPIES = Rule(
    "shards/equal-copies",
    "warning",
    "values",
    got="the same values in {first} and {second}",
    need=_ONE_FILE,
    do="remove one of the two copies",
)
UNREAD_COPY = Rule(
    "shards/unread-copy",
    "warning",
    "values",
    got="different values in {first} and {second}; vLLM uses the values in {second}",
    need=_ONE_FILE,
    do="remove {first}",
)
DIFFERENT_COPIES = Rule(
    "shards/different-copies",
    claim="values",
    got="different values in {first} and {second}",
    need=_ONE_FILE,
    do="remove the wrong copy: vLLM uses the copy that it reads last, which can be either",
)
ENTRY_WITHOUT_TENSOR = Rule(
    "shards/entry-without-tensor",
    "warning",
    got="an entry, but no such tensor",
    need="an index with the file of each tensor",
    do=_WRITE_INDEX,
)
TENSOR_WITHOUT_ENTRY = Rule(
    "shards/tensor-without-entry",
    "warning",
    got="a tensor, but no entry",
    need="an index with the file of each tensor",
    do=_WRITE_INDEX,
)
ENTRY_OF_OTHER_FILE = Rule(
    "shards/entry-of-other-file",
    "warning",
    got="an entry that is not the name of the tensor's file",
    need="an index with the file of each tensor",
    do=_WRITE_INDEX,
)
