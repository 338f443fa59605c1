"""Who asks."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# No "/", which divides a user from a job's name, and no beginning that means something in [paths].
_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+|:=-]{0,127}")
_MOST_GROUP: Final = 128
GROUP_RULE: Final = f"1 to {_MOST_GROUP} printable characters, without a space at either end"
USER_RULE: Final = "128 at most of A-Z, a-z, 0-9 and _ . @ + | : = -, the first a letter, a digit or _"


class Role(StrEnum):
    """What somebody may do: everything, or what is theirs."""

    ADMIN = "admin"
    USER = "user"


@dataclass(frozen=True, slots=True)
class Account:
    """Who asks: a user, and the groups that their token or an identity provider says they are in.

    `is_local` says that they came by the Unix socket, which is the owner's alone: nothing there is limited.
    """

    user: str
    role: Role = Role.USER
    groups: frozenset[str] = frozenset()
    is_local: bool = False

    def is_admin(self) -> bool:
        """Return whether the user may see and change what is others'."""
        return self.role is Role.ADMIN

    def may_see(self, user: str) -> bool:
        """Return whether what belongs to `user` is there for this account."""
        return self.role is Role.ADMIN or self.user == user


def is_group_name(text: str) -> bool:
    """Return whether a group may be called so."""
    return 1 <= len(text) <= _MOST_GROUP and text.isprintable() and text == text.strip()


def is_user_name(text: str) -> bool:
    """Return whether somebody may be called so."""
    return bool(_USER.fullmatch(text))
