"""The entry point of the command `meshrunner`, and of `python -m meshrunner`.

Ctrl-C ends the command with one line and exit status 130, from here on. While Python itself starts, it cannot.
"""

import os
import sys


def main() -> None:
    """Run the command line; never returns."""
    try:
        import signal

        signal.signal(signal.SIGINT, _interrupted)
    except KeyboardInterrupt:
        _interrupted()
    from meshrunner.runner.cli import main as command_line

    command_line()


def _interrupted(*_: object) -> None:
    try:
        os.write(2, b"interrupted; nothing was started\n")
    finally:  # stderr may be closed
        # The module may be half imported: then there is no forkserver to kill.
        forkserver = sys.modules.get("meshrunner.runner.process.forkserver")
        getattr(forkserver, "exit_now", os._exit)(130)


if __name__ == "__main__":
    main()
