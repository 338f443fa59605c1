"""`freight batch validate`: every problem of a file."""

import sys
from typing import Any

import click

from freight.cli.settings import settings


@click.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a line per problem.")
def validate(file: str, as_json: bool) -> int:
    """Check every line of FILE (- for standard input) and list every problem; nothing runs.

    Exit status: 0 when every line is good, 2 when any is not.
    """
    import msgspec

    from freight.control.validate import report

    found = report(file, settings())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        for problem in found.problems:
            place = f"{found.file}:{problem.line}" if problem.line else found.file
            column = f" (column {problem.column})" if problem.column else ""
            click.echo(f"{place}: {problem.code}: {problem.message}{column}")
        click.echo(_verdict(found), file=sys.stderr)
    return 2 if found.problems else 0


def _verdict(found: Any) -> str:
    if not found.problems:
        return f"{found.file}: {found.records} records, all good"
    return f"{found.file}: {len(found.problems)} problem(s) in {found.records} records"
