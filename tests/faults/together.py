"""A way to write a fault test that waits more than it works: it runs side by side with the others of its kind."""

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults.services import served

AT_ONCE: Final = 4


def together(plot: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a test that waits for it while it runs in a thread.

    It may take `service` (a box for a service), `tmp_path` (a folder of its own), what the test is parametrized by,
    and any other name for which its module has a context manager of the name `giving_NAME`, called with these two.
    """
    takes = tuple(signature(plot).parameters)

    def test(request: Any, played: Any, **_: Any) -> None:
        played.join(request.node.nodeid)

    module = sys.modules[plot.__module__]
    names = ["request", "played", *(n for n in takes if n not in GIVEN and not hasattr(module, f"giving_{n}"))]
    test.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
    test.__name__ = test.__qualname__ = plot.__name__
    test.__doc__, test.__module__ = plot.__doc__, plot.__module__
    test.plot = plot  # type: ignore[attr-defined]
    return test


GIVEN: Final = ("service", "tmp_path")


class Played:
    """All tests of this kind that were asked for, started together at the first that is waited for."""

    def __init__(self, items: list[pytest.Function], folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._futures: dict[str, Future[None]] = {
            item.nodeid: self._pool.submit(self._play, number, item) for number, item in enumerate(items)
        }

    def _play(self, number: int, item: pytest.Function) -> None:
        folder = self._folder / f"{number}"
        plot = item.function.plot
        params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        with ExitStack() as stack:
            service = stack.enter_context(served(folder))
            given: dict[str, Any] = {"service": service, "tmp_path": folder, **params}
            for name in signature(plot).parameters:
                if name not in given:
                    given[name] = stack.enter_context(getattr(item.module, f"giving_{name}")(service, folder))
            plot(**{name: given[name] for name in signature(plot).parameters})

    def join(self, nodeid: str) -> None:
        """Wait for a test's end; raise what it raised."""
        self._futures[nodeid].result()

    def close(self) -> None:
        """Start no more of them, and wait for those under way."""
        self._pool.shutdown(cancel_futures=True)
