"""One trace predicts the speeds on several variants of a device."""

from __future__ import annotations

import pytest

from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.predict.predict import predict
from tests.composed import SMALL, experiment


@pytest.mark.slow
def test_speeds_on_variants_equal_those_on_devices_with_these_rates() -> None:
    chosen = experiment("hardware=h100_80gb", "launch.workers=2", "parallelism=fsdp2", *SMALL)
    device = expected_devices(chosen)
    assert isinstance(device.hardware, GPU)
    efficiency = device.hardware.efficiency
    slow_host = efficiency.model_copy(update={"host_s": 2 * efficiency.host_s})
    slower = device.hardware.model_copy(update={"efficiency": slow_host})
    forecast = predict(chosen, device, active_only=True, variants=[device.hardware, slower])
    speeds = [predict(chosen, device._replace(hardware=each)).speed for each in (device.hardware, slower)]
    assert list(forecast.wps_on) == [speed.wps for speed in speeds if speed] and forecast.wps_on[0] > forecast.wps_on[1]
    full = predict(chosen, device._replace(memory_gib=1e-3), variants=[slower])
    assert full.verdict.answer == "does not fit" and full.wps_on == ()
