"""Errors of the plugin. Each message is one sentence a user can act on; the CLI prints it without a stack trace."""

from __future__ import annotations


class DataplaneError(Exception):
    """Base of everything the plugin raises on purpose."""


class UsageError(DataplaneError):
    """A flag or argument is wrong: the CLI exits with 2."""


class StartError(DataplaneError):
    """The data plane could not be brought up as asked: the job must not start (exit 1)."""


class SeamError(StartError):
    """A seam of a host or library is not as expected while a layer that needs it is on."""


class TransferError(DataplaneError):
    """A put or get failed after READY. The job fails; the backend is never switched (RFC §4.8, rule 1)."""
