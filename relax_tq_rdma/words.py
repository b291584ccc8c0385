"""How figures read in sentences for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A length of time in one or two units, rounded down: ``40 s``, ``12 min``, ``3 h 5 min``, ``2 d 7 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes} min" if minutes >= 10 or whole % 60 == 0 else f"{minutes} min {whole % 60} s"
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"


def count(number: int, one: str, more: str = "") -> str:
    """``1 batch``, ``2 batches``; ``more`` is the plural, by default with an ``s``."""
    return f"{number} {one if number == 1 else more or one + 's'}"
