"""`freight doctor`: is this machine fit to run?"""

import click

from freight.config import config_file, data_folder


@click.command()
def doctor() -> int:
    """Check this machine and say what is wrong with it.

    Exit status: 0 when everything needed works, 1 when something does not.
    """
    from freight.control.doctor import examine

    failed = False
    for finding in examine(config_file(), data_folder()):
        failed = failed or not finding.good
        click.echo(f"{'ok  ' if finding.good else 'FAIL'} {finding.what}: {finding.found}")
        if finding.fix and not finding.good:
            click.echo(f"     {finding.fix}")
    return 1 if failed else 0
