"""A process that is alone but counts as one rank of a tensor parallel group of any size."""

import torch.distributed
from torch._C._distributed_c10d import HashStore


def join_group(tp: int, rank: int) -> None:
    """Set up vLLM's groups for one process, then let the tensor parallel one claim to be `rank` of `tp`.

    Nothing may communicate: the other ranks do not exist.
    """
    from vllm.distributed import parallel_state

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(1)
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = tp, rank
