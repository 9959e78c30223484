"""Hydra's overrides as text."""

import re


def quote_override(value: object) -> str:
    """Quote a value for a Hydra override; a backslash is doubled only before a quote."""
    doubled = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value))
    return "'" + doubled.replace("'", "\\'") + "'"
