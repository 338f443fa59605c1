"""A worker process: `python -m freight.worker`, started by a launcher."""

import argparse
import asyncio
import logging
import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop

from freight.launchers.cgroup import enter
from freight.launchers.standby import STANDBY, wait_to_be_told, write_to
from freight.worker.agent import ORPHAN_S, Agent
from freight.worker.supervise import become_subreaper

# Internal, for tests: seconds without a control plane after which a worker ends itself.
GRACE: Final = "_FREIGHT_ORPHAN_S"
OPEN_FILES: Final = 65_536


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line. It names sockets and folders, never records."""
    parser = argparse.ArgumentParser(prog="freight-worker")
    parser.add_argument("--control", required=True, help="the control plane's Unix socket")
    parser.add_argument("--worker", required=True, help="this worker's id")
    parser.add_argument("--folder", type=Path, required=True, help="a folder of this worker's own")
    parser.add_argument("--log", type=Path, required=True, help="where this process's output goes")
    parser.add_argument("--parent", type=int, help="the process to end with; without one it outlives its starter")
    parser.add_argument("--cgroup", type=Path, help="the control group to move into")
    parser.add_argument("--keep-open", type=int, action="append", default=[], help="a lock that the server shares")
    return parser.parse_args(words)


async def serve(args: argparse.Namespace) -> int:
    """Run the agent until it ends, is told to, or its parent is gone."""
    orphan_s = float(os.environ.get(GRACE, ORPHAN_S))
    agent = Agent(args.control, args.worker, args.folder, args.log, tuple(args.keep_open), orphan_s)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.stopping.set)
    if args.parent is None:
        await agent.run()
        shutil.rmtree(args.folder, ignore_errors=True)
        return 0
    return await _serve_with(agent, args)


async def _serve_with(agent: Agent, args: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    parent_gone = asyncio.Event()
    try:
        parent = os.pidfd_open(args.parent)
    except ProcessLookupError:
        return 1
    loop.add_reader(parent, parent_gone.set)
    running = asyncio.create_task(agent.run())
    orphaned = asyncio.create_task(parent_gone.wait())
    await asyncio.wait((running, orphaned), return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(parent)
    if running.done():
        running.result()
        return 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await agent.end_at_once()
    shutil.rmtree(args.folder.parent, ignore_errors=True)
    return 1


def allow_many_connections() -> None:
    """Let this process have many files open, as far as it may: each request in flight is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Run one worker."""
    stood_by = sys.argv[1:] == [STANDBY]
    words = wait_to_be_told() if stood_by else sys.argv[1:]
    if words is None:
        return
    args = arguments(words)
    if stood_by:
        write_to(args.log)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    allow_many_connections()
    become_subreaper()
    if args.cgroup is not None:
        enter(args.cgroup)
    if args.parent is not None and os.getppid() != args.parent:
        sys.exit(1)
    status = uvloop.run(serve(args))
    logging.shutdown()
    # The control plane waits for this process: there is nothing left that would have to be taken apart.
    os._exit(status)


if __name__ == "__main__":
    main()
