"""The few kinds of error, by whose fault they are. A bug is none of them and is never caught."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Self


class FreightError(Exception):
    """Something a person can act on: what went wrong and where, and what to do next."""

    exit_code = 1
    # Stable, for programs: what the service's API calls it.
    code = "failed"
    # The field of the request that is wrong, where an API tells it apart.
    param: str | None = None

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def about(self, param: str) -> Self:
        """Return this error, as one about a field of the request."""
        self.param = param
        return self


class UserError(FreightError):
    """The input or the command is wrong: fix it and try again. Nothing ran."""

    exit_code = 2
    code = "invalid_request"


class Conflict(UserError):
    """A name or a key is taken by something else."""

    code = "conflict"


class NoSuchUpload(UserError):
    """There is no upload of that id, or none that may be used."""

    code = "no_such_upload"


class Unknown(UserError):
    """The request names something that is not there: a model, a cluster."""

    code = "not_found"


class NoSuchFile(UserError):
    """There is no file of that id, or it is another user's."""

    code = "no_such_file"


class TooLarge(UserError):
    """What was sent has more bytes than a setting allows."""

    code = "too_large"


class NoSuchJob(FreightError):
    """No job is called so."""

    exit_code = 3
    code = "no_such_job"


class NoSuchModel(FreightError):
    """No model is called so, or none that the one who asks may run."""

    code = "model_not_found"


class NotAllowed(FreightError):
    """The service knows who asks, or does not, and says no."""

    exit_code = 4
    code = "not_allowed"


class Unauthenticated(NotAllowed):
    """Nothing that came with the request shows who asks."""

    code = "unauthenticated"


class NoServer(FreightError):
    """There is no service to talk to."""

    exit_code = 5
    code = "no_server"


class OperationError(FreightError):
    """The operation could not be done now, though the request was well formed."""

    code = "operation_failed"


class WrongState(OperationError):
    """The job's state does not allow what was asked."""

    code = "wrong_state"


class TooMany(OperationError):
    """Somebody has, or asks for, as much as they may.

    `retry_after_s` says when time alone will mend it, None where it will not.
    """

    code = "too_many"

    def __init__(self, message: str, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class Unavailable(OperationError):
    """Something that an answer depends on, and that is not the service's own, does not work now."""

    code = "unavailable"


class Interrupted(FreightError):
    """The user or the system asked us to stop; work done so far is kept."""

    exit_code = 130


class EngineError(FreightError):
    """A model server failed. `transient` says whether another try may succeed."""

    def __init__(self, message: str, *, transient: bool, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.transient = transient


class LauncherError(FreightError):
    """A worker could not be placed or started. `transient` as in EngineError."""

    def __init__(self, message: str, *, transient: bool, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.transient = transient


class OutOfResources(LauncherError):
    """The machine has run out of something that others may give back: descriptors, processes, memory."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=True)


@contextmanager
def refusing(what: str, hint: str) -> Generator[None]:
    """Turn what the system raises in the block about a path or an address into a UserError that begins with `what`.

    Python raises OSError, RuntimeError (a loop of links, no home folder) and ValueError (no valid name) for these.
    """
    try:
        yield
    except FreightError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{what}: {reason}", hint) from error
