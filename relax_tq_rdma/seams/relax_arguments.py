"""Seam R1: the plugin's flags on the host's command line.

The host's ``parse_args(add_custom_arguments=...)`` calls back before its own groups are added: a flag that both have is
the host's, and its value is checked after the parse. The host's parser drops in silence what it does not know (contract
§1); what looks like a flag of ours is an error here.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from relax_tq_rdma.errors import DataplaneError, SeamError, UsageError
from relax_tq_rdma.flags import FLAGS, add_arguments
from relax_tq_rdma.say import say
from relax_tq_rdma.seams.base import SeamReport
from relax_tq_rdma.seams.host_code import installed_host, problem
from relax_tq_rdma.seams.wrapping import Wrappers
from relax_tq_rdma.summary import PREFIX

MODULE = "relax.utils.arguments"
_PREFIXES = ("--tq-", "--no-tq-", "--dataplane-")
_WAY_OUT = "use relax_tq_rdma.install(args) with flags from a parser of your own, or a host line named in docs/relax.md"

Register: TypeAlias = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class RelaxArguments:
    """See :class:`relax_tq_rdma.seams.base.Seam`.

    Args:
        then: called with the parsed arguments, once they are complete.
    """

    name = "R1 (the host's parse_args)"
    modules = (MODULE,)

    def __init__(self, then: Callable[[argparse.Namespace], None] = lambda args: None) -> None:
        self._then = then
        self._wrappers = Wrappers()

    def check(self) -> SeamReport:
        try:
            found = problem(MODULE, "parse_args", ("add_custom_arguments",))
        except Exception as exc:  # a broken host must become a sentence, whatever it raises
            found = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=not found,
            installed=installed_host(),
            expected="parse_args(add_custom_arguments)",
            found=found,
            way_out=_WAY_OUT,
        )

    def apply(self) -> None:
        """Whoever takes ``parse_args`` from the module from now on gets the plugin's flags with it, and what is wrong
        with them ends the process as a wrong flag of the host does."""
        module = sys.modules.get(MODULE)
        if module is not None:
            self._wrappers.put(module, "parse_args", lambda parse: _or_exit(self._with_flags(parse)))

    def remove(self) -> None:
        self._wrappers.take_back()

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line as the host does; ``sys.argv`` is left as the host's entry point would have it.

        Raises:
            UsageError: a flag that nobody knows although it looks like one of the plugin's.
            SeamError: the host does not register the plugin's flags.
        """
        sys.argv[1:] = argv
        parse = importlib.import_module(MODULE).parse_args
        args: argparse.Namespace = self._with_flags(parse)()
        return args

    def _with_flags(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parse)
        def parse_args(add_custom_arguments: Register | None = None, *rest: Any, **named: Any) -> Any:
            parsers: list[argparse.ArgumentParser] = []

            def register(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
                parser = parser if add_custom_arguments is None else add_custom_arguments(parser)
                parsers.append(parser)
                return add_arguments(parser)

            args = parse(register, *rest, **named)
            missing = [flag.name for flag in FLAGS if not hasattr(args, flag.dest)]
            if missing:
                why = "did not call add_custom_arguments" if not parsers else f"lost {missing[0]}"
                raise SeamError(f"seam {self.name}: the host's parser {why} ({installed_host()}): {_WAY_OUT}")
            known = [option for parser in parsers for option in parser._option_string_actions]
            complain_of_unknown(sys.argv[1:], known)
            complain_of_unknown_keys(vars(args), [option.strip("-").replace("-", "_") for option in known])
            self._then(args)
            return args

        return parse_args


def _or_exit(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parse_args(*args: Any, **named: Any) -> Any:
        try:
            return parse(*args, **named)
        except DataplaneError as exc:
            for line in str(exc).splitlines():
                say(f"{PREFIX} ERROR {line}")
            raise SystemExit(2 if isinstance(exc, UsageError) else 1) from None

    return parse_args


def complain_of_unknown(argv: Iterable[str], known: Sequence[str]) -> None:
    """
    Raises:
        UsageError: a flag has a prefix of the plugin, however it is spelt, or is all but one of its flags, and no
            parser knows it.
    """
    ours = [flag.name for flag in FLAGS]
    for word in argv:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in known:
            continue
        spelt = name.lower().replace("_", "-")
        close = difflib.get_close_matches(spelt, ours, n=1, cutoff=0.65 if spelt.startswith(_PREFIXES) else 0.9)
        if close or spelt.startswith(_PREFIXES):
            hint = f"did you mean {close[0]}?" if close else "relax-tq-rdma doctor --explain-flags lists them all"
            raise UsageError(f"unknown flag {name}: {hint}")


def complain_of_unknown_keys(keys: Iterable[str], known: Sequence[str]) -> None:
    """The host's ``--custom-config-path`` file makes an attribute of whatever it holds.

    Raises:
        UsageError: an attribute that no parser knows is all but one of the plugin's settings.
    """
    for key in keys:
        spelt = key.lower().replace("-", "_")
        close = difflib.get_close_matches(spelt, [flag.dest for flag in FLAGS], n=1, cutoff=0.9)
        if close and key not in known:
            raise UsageError(f"unknown key {key} in the file of --custom-config-path: did you mean {close[0]}?")
