"""Interrupts of a command."""

from __future__ import annotations

import signal
import time
import weakref

import pytest

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.process.signals import interruptible


class Held:
    """An object with a finalizer."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_that_arrives_in_a_finalizer_is_not_lost(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Held()
    weakref.finalize(held, signal.raise_signal, number)
    with pytest.raises(Interrupted, match=number.name), interruptible():
        del held
        time.sleep(30)
    assert not capsys.readouterr().err
