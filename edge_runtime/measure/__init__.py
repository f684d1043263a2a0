"""Measurements with what makes them comparable: state, spread, memory, energy."""
