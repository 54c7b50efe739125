"""The errors a user sees: one line each, and the exit code that goes with it.

Everything that can go wrong because of input, environment or a failed run is raised as one of these and caught
once, in the command line.  Anything else that escapes is a bug of ours.
"""


class NsysK3Error(Exception):
    """Root of every error that nsysk3 raises on purpose; its text is one line fit for a terminal."""

    exit_code = 2


class InputError(NsysK3Error):
    """The files or arguments given cannot be used; the text names the file and the way out."""

    exit_code = 2


class MissingToolError(NsysK3Error):
    """The environment lacks something: no nsys, an nsys too old for the report, no room on the disk."""

    exit_code = 3


class RunFailedError(NsysK3Error):
    """A run that nsysk3 launched did not finish."""

    exit_code = 4


class InterruptedRunError(RunFailedError):
    """Somebody ended the run: Ctrl-C, or a signal to end."""

    exit_code = 130
