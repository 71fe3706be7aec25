"""Arguments and options that several commands take."""

from typing import Annotated

import typer

Store = Annotated[
    str | None,
    typer.Option(
        help="s3://bucket/prefix or a directory. Default: ROLLBOOK_STORE, else the local server.",
        show_default=False,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Address of an S3 server that is not AWS.", show_default=False),
]
Run = Annotated[str, typer.Argument(help="Name of the run.", show_default=False)]

after_interrupt: list[str] = []
"""What the command that runs would have a person do after Ctrl-C."""
