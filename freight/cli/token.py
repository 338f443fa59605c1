"""`freight token`: what users of the service on TCP are known by."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from freight.cli.parameters import Duration, json_option, service_options
from freight.cli.service import Service
from freight.cli.tables import local_time, moment, print_json, print_table
from freight.core.account import Role

if TYPE_CHECKING:
    from freight.core.view import TokenInfo


@click.group()
def token() -> None:
    """Make, list and revoke the tokens by which users of the service are known on TCP."""


@token.command()
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.USER.value,
    help="An admin sees and changes everybody's jobs. [default: user]",
)
@click.option("--expires", type=Duration(), metavar="D", help="It is good for so long. [default: until it is revoked]")
@click.option("--group", "groups", multiple=True, metavar="G", help="A group that USER is in (repeatable).")
@click.option("--name", default="", metavar="LABEL", help="What it is for, as `freight token list` shows it.")
@json_option
@service_options(starts=True)
def create(
    user: str, role: str, expires: float | None, groups: tuple[str, ...], name: str, as_json: bool, service: Service
) -> None:
    """Make a token for USER and print it, this once: the service keeps no more than its digest.

    Models and pools may be for groups; a token whose groups are others is made anew.

    Give it to the client in FREIGHT_TOKEN, or in a file that FREIGHT_TOKEN_FILE names and nobody else may read:

    (umask 077; freight token create USER > FILE)

    Exit status: 2 no user can be called so; 4 only admins may.
    """
    with service.connect() as client:
        made = client.create_token(user, role, expires, name, groups)
    if as_json:
        print_json(made)
        return
    until = f"until {local_time(made.info.expires_at)}" if made.info.expires_at else "until it is revoked"
    click.echo(made.token)
    click.echo(f"{made.info.id}: a token for {user} ({role}), good {until}; it is not shown again", err=True)


@token.command("list")
@json_option
@service_options(starts=True)
def list_tokens(as_json: bool, service: Service) -> None:
    """List the tokens that were not revoked, without themselves.

    Exit status: 4 only admins may.
    """
    with service.connect() as client:
        tokens = client.tokens()
    if as_json:
        print_json(tokens)
    elif tokens:
        headings = ("ID", "USER", "ROLE", "GROUPS", "NAME", "CREATED", "EXPIRES", "LAST USED")
        print_table(headings, [_row(one) for one in tokens], shrinks=("NAME", "GROUPS"))
    else:
        click.echo("no tokens", err=True)


@token.command()
@click.argument("which", metavar="ID|USER")
@service_options(starts=True)
def revoke(which: str, service: Service) -> None:
    """End a token, or all tokens of a user; from now on they are refused.

    Exit status: 2 there is no such token or user; 4 only admins may.
    """
    with service.connect() as client:
        for one in client.revoke_tokens(which):
            click.echo(f"{one.id}: revoked ({one.user})", err=True)


def _row(one: "TokenInfo") -> tuple[str, ...]:
    expires = local_time(one.expires_at) if one.expires_at else "never"
    until = moment(one.expires_at)
    if until is not None and until <= datetime.now(UTC):
        expires = f"{expires} (expired)"
    groups, used = ", ".join(one.groups) or "-", one.used_on or "never"
    return one.id, one.user, one.role, groups, one.label or "-", local_time(one.created_at), expires, used
