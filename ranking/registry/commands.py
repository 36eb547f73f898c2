"""`gemline registry`: the features of a lake."""

from typing import Annotated

import tyro

from etl.cli.runner import LakeArgs


class RegistryArgs(LakeArgs):
    """Arguments of `registry`."""

    contains: Annotated[
        str,
        tyro.conf.arg(help="only features with this in their name, key, sources, owners or models"),
    ] = ""
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="print a JSON list")] = False


def registry(args: RegistryArgs) -> None:
    """List the features of a spec: type, owner, sources, newest day, and models that read them."""
    from rich.console import Console

    from ranking.registry.features import (
        registered_features,
        registry_json,
        registry_table,
        select_features,
    )

    features = select_features(registered_features(args.open_lake()), args.contains)
    if args.as_json:
        print(registry_json(features))
    else:
        Console(width=200).print(registry_table(features))


COMMANDS = {"registry": registry}
