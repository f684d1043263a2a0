"""Which rail, or which sum of rails, is the power of a whole module.

Invariant: an input rail is the total and its branches are never added to it; a sum is a total only
when every rail of it is there. Names match as whole words: VIN and VIN_SYS_5V0 are two rails.

VDD_IN (TX1, TX2, Xavier NX, Orin NX and Nano) feeds the module, POM_5V_IN (Nano) and VIN (Thor's
carrier) the board. AGX modules have no such rail. VDDQ_VDD2_1V8AO hangs on VIN_SYS_5V0 and is not
added; VDD_MUX is the carrier board beside VDD_IN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TotalRule:
    """The rails whose sum is the total, and what that total covers."""

    rails: tuple[str, ...]
    scope: str

    @property
    def name(self) -> str:
        """What reports call the total, e.g. `VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0`."""
        return "+".join(self.rails)

    def total(self, rails: Mapping[str, int]) -> int | None:
        """Return the total in mW, or None when one of its rails is unknown."""
        if any(name not in rails for name in self.rails):
            return None
        return sum(rails[name] for name in self.rails)


RULES = (
    TotalRule(("VDD_IN",), "module"),
    TotalRule(("POM_5V_IN",), "board"),
    TotalRule(("VIN",), "board"),
    TotalRule(("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"), "module"),
    TotalRule(("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), "module"),
    TotalRule(("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"), "module"),
)
INPUT_RAILS = tuple(rule.rails[0] for rule in RULES if len(rule.rails) == 1)


def total_rule(names: Collection[str]) -> TotalRule | None:
    """Return the rule for a module that has these rails; None when none is known."""
    return next((rule for rule in RULES if all(name in names for name in rule.rails)), None)
