"""The parser of the plugin's commands: argparse whose complaints are exceptions, with the nearest flag in them."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from relax_tq_rdma.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` where argparse ends the process, and takes a description as it is written.

    ``--help`` (unless ``add_help=False``) prints and ends with 0. Flags are never guessed from a beginning.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **named)

    def parse_args(  # type: ignore[override]  # a namespace to fill is of no use here
        self, argv: Sequence[str]
    ) -> argparse.Namespace:
        """
        Raises:
            UsageError: an unknown flag (the message names the closest one), a bad value or a missing one.
        """
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            raise UsageError(self._unknown(unknown[0]))
        return args

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument ") + (f" (see {self.prog} --help)" if self.add_help else ""))

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        known = {option.lstrip("-"): option for option in self._option_string_actions}
        close = difflib.get_close_matches(name.lstrip("-"), known, n=1)
        if not close:
            self.error(f"unknown flag {name}")
        return f"unknown flag {name}: did you mean {known[close[0]]}?"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        """As argparse does it, but a flag is never cut at a hyphen: it could not be searched for or pasted."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def positive(text: str) -> int:
    """Type of an argument: a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def whole(lowest: int, highest: int) -> Callable[[str], int]:
    """Type of an argument: a whole number in a range, both ends included."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} to {highest}, got {text!r}")
        return int(text)

    return number
