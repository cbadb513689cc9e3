"""The entry point of the command `meshrunner`, and of `python -m meshrunner`.

Once this module runs, Ctrl-C ends the command with a one-line message and exit status 130, even during imports.
"""

import os
import sys


def main() -> None:
    """Run the command line. This function never returns."""
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
        # If the module is only partly imported, there is no forkserver to kill.
        forkserver = sys.modules.get("meshrunner.runner.process.forkserver")
        getattr(forkserver, "exit_now", os._exit)(130)


if __name__ == "__main__":
    main()
