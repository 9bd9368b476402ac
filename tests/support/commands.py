"""Every command of `tq`, by the words that name it."""

import click

from tq.cli import cli


def every_command():
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", command.get_command(context, sub)) for sub in command.list_commands(context))
        else:
            yield name, command
