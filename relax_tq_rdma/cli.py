"""``relax-tq-rdma``: one entry, one sub-command a task. Exit codes: 0 ok, 1 a check or the job failed, 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from relax_tq_rdma.errors import DataplaneError, StartError, UsageError
from relax_tq_rdma.say import delivering
from relax_tq_rdma.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as plain as the help of the commands
    help="The data plane of a Relax job: probe it, run it, measure it.",
)

# The sub-commands take the job's own flags, so they parse with argparse, the parser of the host.
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _version(show: bool) -> None:
    if show:
        typer.echo(f"relax-tq-rdma {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def train(ctx: typer.Context) -> None:
    """Run a Relax job with the plugin: train -- ARGUMENTS."""
    from relax_tq_rdma.launch.cli import run

    _exit_with(run, ctx.args)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def status(ctx: typer.Context) -> None:
    """Show the processes of the running job, and which of them differ."""
    from relax_tq_rdma.coverage.cli import run

    _show(run, ctx.args)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def doctor(ctx: typer.Context) -> None:
    """Say what a job would run on here, or on the cluster, and why."""
    from relax_tq_rdma.doctor.cli import run

    _show(run, ctx.args)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def demo(ctx: typer.Context) -> None:
    """Run a small job on real pictures through real TransferQueue."""
    from relax_tq_rdma.demo.cli import run

    _show(run, ctx.args)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def metrics(ctx: typer.Context) -> None:
    """Show the byte and stage totals of a job on this node."""
    from relax_tq_rdma.accounting.cli import run

    _show(run, ctx.args)


bench = typer.Typer(no_args_is_help=True, help="Measure the data plane.")
app.add_typer(bench, name="bench")


@bench.command("path", context_settings=_PASS_THROUGH, add_help_option=False)
def bench_path(ctx: typer.Context) -> None:
    """What a batch costs, without the plugin and layer by layer."""
    from relax_tq_rdma.bench.path.cli import run

    _show(run, ctx.args)


@bench.command("soak", context_settings=_PASS_THROUGH, add_help_option=False)
def bench_soak(ctx: typer.Context) -> None:
    """Whether all stays correct under random load at the pool's cap."""
    from relax_tq_rdma.bench.soak.cli import run

    _show(run, ctx.args)


@bench.command("payload", context_settings=_PASS_THROUGH, add_help_option=False)
def bench_payload(ctx: typer.Context) -> None:
    """What the row format costs on many small rows."""
    from relax_tq_rdma.bench.payload import main as run

    _show(run, ctx.args)


@bench.command("accounting", context_settings=_PASS_THROUGH, add_help_option=False)
def bench_accounting(ctx: typer.Context) -> None:
    """What accounting costs on a real TransferQueue."""
    from relax_tq_rdma.bench.accounting import main as run

    _show(run, ctx.args)


def _show(run: Callable[[list[str]], int], argv: list[str]) -> None:
    """A command whose result is what it prints; ``train`` belongs to the host."""

    def showing(argv: list[str]) -> int:
        with delivering():
            return run(argv)

    _exit_with(showing, argv)


def _exit_with(run: Callable[[list[str]], int], argv: list[str]) -> None:
    try:
        code = run(list(argv))
    except UsageError as exc:
        _complain(exc)
        code = 2
    except DataplaneError as exc:
        _complain(exc)
        code = 1
    except ImportError as exc:
        _complain(StartError(f"a package cannot be imported ({exc}): install relax-tq-rdma with its dependencies"))
        code = 1
    except KeyboardInterrupt:
        typer.echo("relax-tq-rdma: interrupted", err=True)
        code = 130
    except BrokenPipeError:
        # The reader (head, less) is gone: not an error of ours, and nothing more can be said to it.
        sys.stderr.close()
        code = 141
    raise typer.Exit(code)


def _complain(error: DataplaneError) -> None:
    for line in str(error).splitlines():
        typer.echo(f"relax-tq-rdma: error: {line}", err=True)


def main() -> None:
    """Console entry point."""
    app()


if __name__ == "__main__":
    main()
