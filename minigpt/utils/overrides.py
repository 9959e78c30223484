"""Hydra's overrides as text."""

import re


def quote_override(value: object) -> str:
    """A text as Hydra's overrides quote it: a backslash is doubled before a quote, and only there."""
    doubled = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value))
    return "'" + doubled.replace("'", "\\'") + "'"
