"""A way to write a test that waits more than it works: it runs side by side with the others of its kind."""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, Final

_GIVEN: Final = ("box", "folder", "sim")


def side_by_side(scenario: Callable[..., None]) -> Callable[..., None]:
    """Turn a scenario into a test that waits for the scenario, which runs in a thread.

    It may take `box` (a box of its own), `folder` (a folder of its own, around the box), `sim` (a simulated
    engine that its module's scenarios share, which counts prompts) and what the test is parametrized by.
    """
    takes = tuple(signature(scenario).parameters)

    def test(request: Any, started: Any, **_: Any) -> None:
        started.join(request.node.nodeid)

    names = ("request", "started", *(name for name in takes if name not in _GIVEN))
    test.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
    test.__name__ = test.__qualname__ = scenario.__name__
    test.__doc__, test.__module__ = scenario.__doc__, scenario.__module__
    test.scenario = scenario  # type: ignore[attr-defined]
    test.takes = takes  # type: ignore[attr-defined]
    return test
