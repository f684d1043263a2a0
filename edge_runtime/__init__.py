"""bitnest-edge: one copy of the weights, a 4-bit draft inside an 8-bit target, exact decoding."""

__version__ = "0.1.0"
