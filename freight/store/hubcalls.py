"""What Freight asks of a hub, by way of the hub's library, and what its failures mean to a user.

The library is imported when it is first used: it takes a while, and most commands have no use for it.
"""

import logging
import os
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from freight import __version__
from freight.core.hubfiles import HubId
from freight.errors import FreightError, OperationError, UserError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFile

# The library hands on what it receives in pieces of this size; what is in hand when it is killed is lost.
PIECE_BYTES: Final = 256 * 1024
SAME_COMMAND: Final = "the same command goes on with what is left"
_HASH: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_TOKEN: Final = "set HF_TOKEN to a token of yours from the hub's settings, or run: hf auth login"


class HubUnreachable(OperationError):
    """No hub answers, or none may be asked; what is here already may do."""


@dataclass(frozen=True)
class HubFile:
    """A file of a commit; `digest` is the name of its content in a hub cache: its SHA-256 where the hub has it."""

    path: str
    size: int
    digest: str
    sha256: str | None = None


@dataclass(frozen=True)
class Listing:
    """A commit of a repository and all files that it has."""

    commit: str
    files: tuple[HubFile, ...]


def prepare_library() -> None:
    """Import the hub's library, and keep it from reporting what it is used for and from writing to the terminal."""
    _check_endpoint(os.environ.get("HF_ENDPOINT", ""))
    with warnings.catch_warnings():
        # It has some about settings that are of no effect any more.
        warnings.simplefilter("ignore", FutureWarning)
        from huggingface_hub import constants
    from huggingface_hub.utils.logging import set_verbosity

    constants.HF_HUB_DISABLE_TELEMETRY = True
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    # Its warnings quote addresses, which for some files carry a signature that is as good as a token.
    set_verbosity(logging.CRITICAL)


def _check_endpoint(endpoint: str) -> None:
    """Raise UserError for an HF_ENDPOINT at which the library could not even be imported, or would ask nobody."""
    try:
        found = urlsplit(endpoint)
        is_address = not endpoint or (found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0)
    except ValueError:
        is_address = False
    if not is_address:
        # It is not quoted: some have a password in it.
        raise UserError("HF_ENDPOINT is no address of a hub", "unset it, or set it as in https://hub.example.org")


def list_files(hub_id: HubId, revision: str) -> Listing:
    """Return the commit that a branch, tag or commit is now, and its files."""
    prepare_library()
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with hub_failures(hub_id.repo, revision):
        request_headers()
        hub = HfApi(library_name="freight", library_version=__version__)
        commit = hub.model_info(hub_id.repo, revision=revision, timeout=30).sha
        if commit is None or not _HASH.fullmatch(commit):
            raise ValueError("no commit")
        entries = hub.list_repo_tree(hub_id.repo, recursive=True, revision=commit)
        return Listing(commit, tuple(_file(entry) for entry in entries if isinstance(entry, RepoFile)))


def _file(entry: "RepoFile") -> HubFile:
    sha256 = entry.lfs.sha256 if entry.lfs else None
    digest = sha256 or entry.blob_id
    # Both become names of files here: a hub is not to choose where.
    if not _HASH.fullmatch(digest) or {"", ".", ".."} & set(entry.path.split("/")):
        raise ValueError("no name of a file")
    return HubFile(entry.path, entry.lfs.size if entry.lfs else entry.size, digest, sha256)


def request_headers() -> dict[str, str]:
    """Return the headers of a request: who asks, and the user's token where there is one."""
    from huggingface_hub import utils

    headers: dict[str, str] = cast(Any, utils).build_hf_headers(library_name="freight", library_version=__version__)
    token = headers.get("authorization", "")
    if not (token.isascii() and token.isprintable()):
        raise UserError("the hub token has characters that no token has", "look at HF_TOKEN, or the file it came from")
    # What is compressed on the way has another length, and cannot be gone on with in its middle.
    return {**headers, "Accept-Encoding": "identity"}


def hub_address() -> str:
    """Return the hub's address as it may be shown."""
    from huggingface_hub import constants

    endpoint = urlsplit(constants.ENDPOINT)
    return f"{endpoint.scheme}://{endpoint.netloc.rpartition('@')[2]}" if endpoint.netloc else constants.ENDPOINT


@contextmanager
def hub_failures(repo: str, revision: str) -> Generator[None]:
    """Turn what the hub's library raises in the block into errors that say what to do."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OIDCError

    try:
        yield
    except FreightError:
        raise
    except HfHubHTTPError as error:
        raise _refused(error, repo, revision) from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachable(
            f"{repo} cannot be looked up: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids it",
            "unset it, or pull where there is a network and copy the data folder's models",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _unreachable(error) from error
    except OIDCError as error:
        raise OperationError("the hub gave no token for HF_OIDC_RESOURCE", "unset it to use HF_TOKEN") from error
    except HFValidationError as error:
        raise UserError(f"{repo} at {revision} is no name that a hub can have", "use ORG/NAME") from error
    except (ValueError, KeyError, TypeError) as error:
        # The library takes an answer to pieces without a look at its shape.
        raise OperationError(
            f"what answers at {hub_address()} is no model hub",
            "look at HF_ENDPOINT, and for a proxy that wants a login",
        ) from error


def _unreachable(error: Exception) -> HubUnreachable:
    """Say that no hub answers; only by the kind of the failure, since some quote what was sent, the token with it."""
    import httpx2

    kinds: tuple[tuple[type[Exception], str], ...] = (
        (httpx2.ConnectTimeout, "no answer"),
        (httpx2.TimeoutException, "no answer in time"),
        (httpx2.ProxyError, "the proxy refused"),
        (httpx2.ConnectError, str(error)),
        (httpx2.InvalidURL, "it is no valid address"),
        (httpx2.NetworkError, "the connection was lost"),
        (httpx2.RemoteProtocolError, "the connection was lost"),
    )
    reason = next((words for kind, words in kinds if isinstance(error, kind)), type(error).__name__)
    return HubUnreachable(
        f"cannot reach the hub at {hub_address()}: {reason}",
        "look at the network and its proxy (HTTPS_PROXY); HF_ENDPOINT names another hub or a mirror",
    )


def _refused(error: "HfHubHTTPError", repo: str, revision: str) -> FreightError:
    """Return what a hub's refusal means; the kinds come first, since a hub answers 401 for what is not there."""
    from huggingface_hub import errors

    hub, status = hub_address(), error.response.status_code
    again = "run the same command again"
    kinds: tuple[tuple[type[Exception] | tuple[int, ...], type[FreightError], str, str], ...] = (
        (
            errors.GatedRepoError,
            OperationError,
            f"{repo} is gated: its owners want to know who uses it",
            f"ask for access at {hub}/{repo}, then {_TOKEN}",
        ),
        (
            errors.RepositoryNotFoundError,
            UserError,
            f"there is no model {repo} at {hub}, or it is private",
            f"look at the name; or {_TOKEN}",
        ),
        (
            errors.RevisionNotFoundError,
            UserError,
            f"{repo} has no branch, tag or commit {revision!r}",
            f"see {hub}/{repo}/tree/main",
        ),
        (errors.DisabledRepoError, OperationError, f"the hub has closed {repo}", f"see {hub}/{repo}"),
        (errors.EntryNotFoundError, OperationError, f"{repo} has lost a file that it listed", again),
        ((401, 403), OperationError, f"{hub} refuses the token, or what it may do ({status})", _TOKEN),
        ((404,), UserError, f"there is no model {repo} at {hub}", "look at the name, and at HF_ENDPOINT"),
        (
            (429,),
            OperationError,
            f"{hub} has had too many requests from here (429)",
            f"wait a few minutes; {SAME_COMMAND}",
        ),
    )
    for kind, fault, words, hint in kinds:
        if status in kind if isinstance(kind, tuple) else isinstance(error, kind):
            return fault(words, hint)
    return OperationError(f"{hub} answers {status} for {repo}", f"try again later; {SAME_COMMAND}")
