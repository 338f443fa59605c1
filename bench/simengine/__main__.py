"""Entry point: `python -m bench.simengine [options]`."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from bench.simengine.options import parse_options

EXIT_FAILED_START = 7


def main() -> int:
    """Serve until SIGTERM or SIGINT and return the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)  # Until the event loop takes the signals over.
    options = parse_options()
    if options.fail_start:
        print("error: engine could not start: no usable device (simulated)", file=sys.stderr, flush=True)
        return EXIT_FAILED_START
    if options.hang_start:
        _sleep_forever()
    # Imported only now: the two failing starts above need neither an event loop nor a parser.
    from bench.simengine.serve import serve

    serve(options)
    return 0


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _sleep_forever() -> NoReturn:
    """Wait for a signal without using the CPU."""
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
