"""What `/set` changes: the sampling options, by their names on the command line.

Invariant: a value is parsed and checked as the command line's, by what the command line gave, and a
value that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Parse = Callable[[str, str], Any]  # name, text -> value; raises UsageError
Make = Callable[[Mapping[str, Any]], dict[str, Any]]  # values -> options of a turn; checks them
SEED_LIMIT = 2**64


class Settings:
    """Values in force, by option name: `temp`, `top-p`, `new-tokens`."""

    def __init__(self, values: Mapping[str, Any], parse: Parse, make: Make) -> None:
        """`parse` reads a value; given no text it returns the option's default."""
        self.values = dict(values)
        self._parse, self._make = parse, make

    def name(self, word: str) -> str | None:
        """Return the option that a user means by `--top-p`, `top_p` or `top-p`; None: no such."""
        name = word.lstrip("-").replace("_", "-").lower()
        name = "new-tokens" if name == "n" else name
        return name if name in self.values else None

    def set(self, name: str, text: str) -> None:
        """Set a value from text, `default` as it is without the option. Raises UsageError."""
        value = self._parse(name, "" if text == "default" else text)
        self._make(self.values | {name: value})
        self.values[name] = value

    def restored(self, values: Mapping[str, Any]) -> Settings:
        """Return settings with the values of a saved chat, checked alike. Raises UsageError."""
        found = Settings(self.values, self._parse, self._make)
        for name, value in values.items():
            found.values[name] = self._parse(name, "" if value is None else str(value))
        self._make(found.values)
        return found

    def options(self, again: int = 0) -> dict[str, Any]:
        """Return the options of a turn. again: how often this message was answered before; a seed
        that was given goes up by as much, else the answer would be the same."""
        values = dict(self.values)
        if again and values.get("seed") is not None:
            values["seed"] = (values["seed"] + again) % SEED_LIMIT
        return self._make(values)

    def lines(self) -> list[str]:
        """Return name and value of each."""
        width = max(map(len, self.values), default=0)
        shown = {n: "new each time" if v is None else f"{v}" for n, v in self.values.items()}
        return [f"{name:{width}}  {text}" for name, text in shown.items()]
