"""Who may read and write where: what the configuration grants, and what everybody may read."""

import pwd
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from freight.config import PathGrant
from freight.core.account import Account
from freight.errors import FreightError, NotAllowed, UserError
from freight.store.beneath import FOLDERS_MOST, below, parts
from freight.store.roots import PUBLIC, Root, open_below

EVERYBODY: Final = "*"
GROUP: Final = "@"
_PATH_BYTES: Final = 4095
_NAME_BYTES: Final = 255
_SHOWN_MOST: Final = 200
_ROOTS_SHOWN: Final = 5
_ABSOLUTE: Final = "write the whole path, from / on and without .."


def uid_of(user: str) -> int | None:
    """Return the UID that the user of that name has on this machine; None for nobody and for the superuser."""
    try:
        # The superuser's files are no one's to give, whatever an identity provider calls its users.
        return pwd.getpwnam(user).pw_uid or None
    except (KeyError, ValueError):
        return None


class Grants:
    """The granted folders. What is asked about is only opened, never looked at by name."""

    def __init__(self, paths: Mapping[str, PathGrant], uid_of: Callable[[str], int | None] = uid_of) -> None:
        """Take over the configuration's [paths]."""
        self._paths = paths
        self._uid_of = uid_of

    def readable(self, account: Account, shown: str) -> Root:
        """Return the root to open an input below: the innermost granted one, else that of what everybody may read.

        Folders for output are for input, too. Raises UserError for a path that no file can have.
        """
        path = checked_path(shown, "input file")
        return (*self._around(account, path), PUBLIC)[0]

    def open_input(self, account: Account, shown: str) -> int:
        """Return a descriptor of the input file that the user named, by any grant that allows it.

        Of what lies outside nothing is said, not even whether it is there. Raises UserError, NotAllowed, and
        OperationError for what the system cannot do now.
        """
        path = checked_path(shown, "input file")
        refused: FreightError | None = None
        for root in self._around(account, path):
            try:
                return open_below(root, path)
            except NotAllowed as error:
                refused = refused or error
        try:
            return open_below(PUBLIC, path)
        except (NotAllowed, UserError):
            # No cause is kept: it would say what is there.
            raise refused or self._not_readable(account, shown) from None

    def output_root(self, account: Account, folder: str | None = None) -> tuple[Root, Path]:
        """Return a root for output and the folder in it that the user named; for None, the user's first root itself.

        A grant to the user comes before one to a group, and that before one to everybody. Raises
        UserError for a path that no folder can have, NotAllowed for one that is not granted.
        """
        roots = self._roots(account, "write")
        if folder is None:
            if not roots:
                raise NotAllowed("no folder for output is granted to you", _accepting("output", roots))
            return roots[0], roots[0].path
        path = checked_path(folder, "output folder", is_folder=True)
        around = _innermost(roots, path)
        if not around:
            raise NotAllowed(
                f"the output folder {_printable(folder)} is not below a folder granted to you for output",
                _accepting("output", roots),
            )
        return around[0], path

    def _around(self, account: Account, path: Path) -> list[Root]:
        return _innermost(self._roots(account, "read", "write"), path)

    def _roots(self, account: Account, *keys: str) -> list[Root]:
        groups = (GROUP + group for group in sorted(account.groups))
        # A user cannot take another's grant by being called like a group.
        own = () if account.user.startswith((GROUP, EVERYBODY)) else (account.user,)
        granted = [self._paths[who] for who in (*own, *groups, EVERYBODY) if who in self._paths]
        folders = [folder for grant in granted for key in keys for folder in getattr(grant, key)]
        owner = self._uid_of(account.user)
        return [Root(Path(folder), owner) for folder in dict.fromkeys(folders)]

    def _not_readable(self, account: Account, shown: str) -> NotAllowed:
        return NotAllowed(
            f"the input file {_printable(shown)} is neither below a folder granted to you "
            "nor one that everybody may read",
            _accepting("input", self._roots(account, "read", "write"))
            + "; or a file that everybody may read, in folders that everybody may enter",
        )


def checked_path(shown: str, what: str, *, is_folder: bool = False) -> Path:
    """Return the path that the user wrote; raise UserError, which calls it `what`, where it cannot be one."""
    told = f"the path of the {what}"
    if not shown:
        raise UserError(f"{told} is empty", _ABSOLUTE)
    name = _printable(shown)
    try:
        size = len(shown.encode("utf-8"))
    except UnicodeEncodeError:
        raise UserError(f"{told}, {name}, is not valid UTF-8", "rename the file, or copy it to another name") from None
    if size > _PATH_BYTES:
        raise UserError(f"{told}, {name}, has {size} bytes; the most is {_PATH_BYTES}", "use a shorter path")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown):
        raise UserError(f"{told}, {name}, has a control character in it", "rename the file, or copy it to another name")
    if not shown.startswith("/"):
        raise UserError(f"{told}, {name}, is not absolute", _ABSOLUTE)
    names = parts(shown)
    if ".." in names:
        raise UserError(f"{told}, {name}, has .. in it", _ABSOLUTE)
    if not is_folder and (shown.endswith(("/", "/.")) or not names):
        raise UserError(f"{told}, {name}, names a folder", "name one JSON Lines file")
    _check_names(told, names)
    return Path("/", *names)


def _check_names(told: str, names: list[str]) -> None:
    if len(names) > FOLDERS_MOST:
        raise UserError(f"{told} has {len(names)} names in it; the most is {FOLDERS_MOST}", "move it further up")
    longest = max((len(name.encode()) for name in names), default=0)
    if longest > _NAME_BYTES:
        raise UserError(f"{told} has a name of {longest} bytes in it; the most is {_NAME_BYTES}", "use shorter names")


def _innermost(roots: Iterable[Root], path: Path) -> list[Root]:
    around = [root for root in roots if below(str(root.path), str(path)) is not None]
    return sorted(around, key=lambda root: len(root.path.parts), reverse=True)


def _accepting(what: str, roots: list[Root]) -> str:
    if not roots:
        return f"no folder is granted to you for {what}; ask whoever runs the service ([paths] in its configuration)"
    names = ", ".join(str(root.path) for root in roots[:_ROOTS_SHOWN])
    more = f" and {len(roots) - _ROOTS_SHOWN} more" if len(roots) > _ROOTS_SHOWN else ""
    return f"{what} may lie below {names}{more}"


def _printable(shown: str) -> str:
    """Return a path as the user wrote it, fit for a message: cut where it is very long, odd characters as escapes."""
    cut = shown[:_SHOWN_MOST] + "…" if len(shown) > _SHOWN_MOST else shown
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
