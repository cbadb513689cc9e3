"""Combinations of options with which no held-out loss can be computed."""

from meshrunner.recipes.compatibility.conflict import Conflict
from meshrunner.recipes.parallelism.megatron_fsdp import MegatronFSDP

ROWS = [
    Conflict(
        when=lambda r, p, d: p.pipeline > 1 and p.schedule.is_v and r.eval.evaluates,
        where="eval",
        reason="torch cannot run zbv and dualpipe_v without the backward",
        instead="another parallelism.pipeline_schedule, or eval=none",
    ),
    Conflict(
        when=lambda r, p, d: r.eval.evaluates and (p.plans_buffers or isinstance(p, MegatronFSDP)),
        where="eval",
        reason="planned buffers and megatron_fsdp need a backward after each forward, but an evaluation runs only the forward",
        instead="parallelism=fsdp2 with parallelism.buffers=dynamic, or eval=none",
    ),
    Conflict(
        when=lambda r, p, d: r.eval.evaluates and r.compile.cuda_graph,
        where="eval",
        reason="a forward pass outside of the CUDA graph moves buffers that the graph expects at fixed addresses",
        instead="compile.cuda_graph=false, or eval=none",
    ),
]
