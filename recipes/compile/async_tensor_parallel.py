"""Asynchronous tensor parallelism (Wang et al. 2023). Inductor fuses an all-gather with the matmuls that use its result, or a
matmul with the reduce-scatter of its result. The fused operator computes on one piece of the data while it transfers another."""

import torch._inductor.config
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import ProcessGroup
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from meshrunner.recipes.compile.base import ASYNC_TP_FUSED


def fuse_collectives(group: ProcessGroup) -> None:
    """Fuse the collectives of a tensor-parallel group in code that is compiled after this call."""
    enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_post_pass = _CountFused()


class _CountFused(CustomGraphPass):
    """Count fused operators. Inductor caches the counts with each graph, so operators of cached graphs are counted, too."""

    def __call__(self, graph: fx.Graph) -> None:
        counters["inductor"][ASYNC_TP_FUSED] += sum("symm_mem.fused" in str(node.target) for node in graph.nodes)

    def uuid(self) -> str:
        return ASYNC_TP_FUSED
