"""`bitnest-edge doctor`: what was found, what was not, and why."""

from __future__ import annotations

import click

from edge_runtime.cli.options import json_option, print_document


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Say what was found, what was not, and why.

    The report goes to stdout; with --json it goes to stderr and stdout ends with the document.
    """
    from edge_runtime import doctor

    document = doctor.examine()
    for line in doctor.describe(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)
