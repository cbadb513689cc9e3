"""Lets a trace run the schedule of a single pipeline rank, and logs the rank's forward and backward passes."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining.stage import _PipelineStageBase

from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import PipelinePass
from meshrunner.runner.process.lone_stages import replace_neighbours


def trace_passes(in_torch: Replacements, recorder: Recorder) -> None:
    """Log when the host begins and ends each pass of a micro batch through a stage. Nothing is sent or received."""
    replace_neighbours(in_torch.replace, on_host=recorder.on_host)

    def logged(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: _PipelineStageBase, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            this = PipelinePass(name, stage.stage_index, micro_batch, begins=True)
            recorder.device.write(this)
            try:
                return method(stage, micro_batch, *args, **kwargs)
            finally:
                recorder.device.write(this._replace(begins=False))

        return run

    methods = {"forward": "forward_one_chunk", "backward": "backward_one_chunk", "weights": "backward_weight_one_chunk"}
    for name, method in methods.items():
        in_torch.replace(_PipelineStageBase, method, logged(name, vars(_PipelineStageBase)[method]))
