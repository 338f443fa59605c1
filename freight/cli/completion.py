"""`freight completion`: a script that completes commands in a shell."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, options, jobs and models in SHELL.

    \b
      bash   echo 'eval "$(freight completion bash)"' >> ~/.bashrc
      zsh    echo 'eval "$(freight completion zsh)"' >> ~/.zshrc
      fish   freight completion fish > ~/.config/fish/completions/freight.fish
    """
    from freight.cli.main import freight

    kind = get_completion_class(shell)
    assert kind is not None, shell
    click.echo(kind(freight, {}, "freight", "_FREIGHT_COMPLETE").source())
