"""The prediction of one configuration, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshrunner.runner.config.devices import Described, described, described_type
from meshrunner.runner.config.experiment import Experiment, check, fit

if TYPE_CHECKING:
    from meshrunner.runner.predict.replay.timeline import Timeline


def fitting(config: dict[str, Any]) -> tuple[Experiment, Described]:
    """A run and the device that it is planned for; raises ConfigError where they do not go together."""
    as_configured = check(config)
    experiment = as_configured.on(described_type(as_configured.hardware))
    device = described(experiment)
    fit(experiment, device.workers)
    return experiment, device


def predicted(
    config: dict[str, Any], *, active_only: bool, over_time: bool = False
) -> tuple[dict[str, Any], Timeline | None]:
    """The prediction as JSON, and memory over its step where that is wanted and there is any; raises as `predict`."""
    experiment, device = fitting(config)
    from meshrunner.runner.predict.predict import predict

    prediction = predict(experiment, device, active_only=active_only, over_time=over_time)
    return prediction.as_json(), prediction.over_time
