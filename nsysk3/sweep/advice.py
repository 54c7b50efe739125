"""The way out of a failed layout, as options of a sweep."""

from __future__ import annotations

from nsysk3.sweep.matrix import Layout

# Seen with deep pipelines; what they change has no part in a prefill of one token.
_ARGUMENTS = {
    "decode-graph-ipc": "--disable-decode-cuda-graph",
    "watchdog": "--watchdog-timeout 3600",
}


def further(kind: str, advice: str | None, layout: Layout) -> str | None:
    """The advice of failures.toml, and where a server argument helps the option that gives it to this layout alone."""
    if advice:
        advice = advice.replace("after `--`", "in [server] args, or for one depth with --layout-args")
    argument = _ARGUMENTS.get(kind)
    if argument is None or argument.split()[0] in layout.args:
        return advice
    option = f"--resume --layout-args 'PP{layout.pp}={argument}'"
    return f"{advice}; in a sweep: {option}" if advice else f"in a sweep: {option}"
