"""Groups of commands that are imported only when they are used, so that help and completion are quick."""

import importlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

# Each command: the module that has it (with ":NAME" where it is called otherwise there), and its line in the help.
Table: TypeAlias = Mapping[str, tuple[str, str]]


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def __init__(self, *arguments: Any, table: Table, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands' names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, importing its module."""
        if cmd_name not in self._table:
            return None
        module, _, name = self._table[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name or cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self._table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that go on from what was typed, from the table alone."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [
            CompletionItem(name, help=about) for name, (_, about) in self._table.items() if name.startswith(incomplete)
        ]
