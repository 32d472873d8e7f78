"""Rules of the machine and of the installed packages."""

from vexport.rules.book import Rule

FREE_SPACE = "free disk space in the output folder and in TMPDIR (default /tmp), then run it again"
UNINSTALL = "run `pip uninstall torchvision torchaudio torchcodec`: text models do not need them"

DISK = Rule(
    "environment/disk",
    got="{reason}",
    do="check the disk, its free space, the memory and the limits (`ulimit -a`)",
)
MEMORY = Rule(
    "environment/memory",
    got="out of memory",
    do="free memory, or use a machine with more of it",
)
MAPPED_FILE = Rule(
    "environment/mapped-file",
    got="a part of a mapped file cannot be read: the disk failed, or another program wrote to the "
    "file",
    do="check the disk, and run the command again while no other process writes to the file",
)
DISK_FULL = Rule("environment/disk-full", got="the disk is full ({message})", do=FREE_SPACE)
MISMATCHED_PACKAGE = Rule(
    "environment/mismatched-package",
    got="built for another version of torch ({message})",
    do=UNINSTALL,
)
MODULE = Rule(
    "environment/module",
    got="the Python module {module} is not installed",
    do="run `pip install {requirement}` for {interpreter}",
)
NOISE = Rule(
    "environment/noise",
    got="{found} when the same model ran again",
    need="at most {most}",
    do="use greedy decoding (or --seeds for sampled responses), a single kind of GPU, "
    "VLLM_BATCH_INVARIANT=1, or fewer sequences at once (--max-num-seqs)",
)
LOST_RANK = Rule(
    "environment/lost-rank",
    got="a rank was lost: {message}",
    do="check torchrun's error summary, then run the same command again to resume",
)
DISK_SPACE = Rule(
    "environment/disk-space",
    got="{free} of free disk space",
    need="{least} for {build}",
    do="free disk space, or set XDG_CACHE_HOME to a folder on another disk",
)
INSTALL = Rule(
    "environment/install",
    got="the installation failed: {message}",
    do="read the log ({log}), then run the same command again",
)
NO_CACHE = Rule(
    "environment/no-cache",
    got="no home folder, in which environments are kept",
    do="set XDG_CACHE_HOME to a folder",
)
NO_VERSION = Rule(
    "environment/no-version",
    got="no environment with {versions:and}",
    do="run `{command}`, which makes them (4 GB each, or 10 GB without a CPU build), or name an "
    "interpreter with --vllm-python",
)
