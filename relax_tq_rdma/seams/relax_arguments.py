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
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias

from relax_tq_rdma.errors import DataplaneError, SeamError, UsageError
from relax_tq_rdma.flags import FLAGS, Flag, add_arguments
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
            complain_of_unknown_keys(args, {action.dest for parser in parsers for action in parser._actions})
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


def complain_of_unknown(argv: Iterable[str], known: Container[str]) -> None:
    """
    Raises:
        UsageError: a flag has a prefix of the plugin, however it is spelt, or is all but one of its flags, and no
            parser knows it.
    """
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            _complain(f"flag {name}", name, lambda flag: flag.name)


def complain_of_unknown_keys(args: argparse.Namespace, known: Container[str]) -> None:
    """The same for the YAML file of the host's ``--custom-config-path``, of which every key becomes an attribute.

    The file is read, and not the attributes: the host may set some for itself that no parser knows (``tq_config``).
    """
    for key in _keys_of_file(getattr(args, "custom_config_path", None)):
        if key not in known:
            _complain(f"key {key} in the file of --custom-config-path", key, lambda flag: flag.dest)


def _complain(what: str, name: str, shown: Callable[[Flag], str]) -> None:
    spelt = "--" + name.lstrip("-").lower().replace("_", "-")
    is_ours = spelt.startswith(_PREFIXES)
    ours = {flag.name: flag for flag in FLAGS}
    close = difflib.get_close_matches(spelt, ours, n=1, cutoff=0.65 if is_ours else 0.9)
    if close:
        raise UsageError(f"unknown {what}: did you mean {shown(ours[close[0]])}?")
    if is_ours:
        raise UsageError(f"unknown {what}: relax-tq-rdma doctor --explain-flags lists them all")


def _keys_of_file(path: str | None) -> list[str]:
    """Top-level keys. A file that cannot be read is the host's business, which has read it before."""
    if not path:
        return []
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return []
    return [str(key) for key in found] if isinstance(found, dict) else []
