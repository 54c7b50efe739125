"""Keep the secrets of a plan out of what a server prints: SGLang logs its own arguments, keys and all."""

from __future__ import annotations

from collections.abc import Callable

from nsysk3.launch.plan import Plan
from nsysk3.run.redact import REDACTED, redact, redact_argv

# Shorter ones would take innocent words with them.
_SHORTEST = 4


def secrets_of(plan: Plan) -> set[str]:
    """Values in the commands and environments of a plan whose names say that they are secret."""
    found = set()
    for node in plan.nodes:
        found |= {value for name, value in node.env.items() if redact(name, value) == REDACTED}
        for word, shown in zip(node.server_argv, redact_argv(node.server_argv), strict=True):
            if shown == REDACTED:
                found.add(word)
            elif shown.endswith(f"={REDACTED}"):
                found.add(word.partition("=")[2])
    return {value for value in found if len(value) >= _SHORTEST}


def hiding(plan: Plan) -> Callable[[str], str]:
    """A function that replaces the plan's secrets in a text.

    By their values: by names, half of a log about tokens would go.
    """
    secrets = sorted(secrets_of(plan), key=len, reverse=True)  # one may hold another

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, REDACTED)
        return text

    return hide
