"""The command line's part in a configuration, as scripts for DeepSpeed have it."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser.

    Args:
        parser: what it parses is for `initialize`, as ``args``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "as scripts for DeepSpeed have them")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script itself; changes nothing here"
    )
    group.add_argument(
        "--deepspeed_config", metavar="PATH", help="JSON file with the configuration"
    )
    return parser
