"""Depth for free: the repeated blocks of a model are recorded a few times and copied as often as it has them."""

from metapeak.tracer.depth.recording import recorded_in_depth
from metapeak.tracer.depth.repeats import Repeats, repeats_of, shortened
from metapeak.tracer.depth.splice import splice
from metapeak.tracer.depth.table import CannotSplice

__all__ = ["CannotSplice", "Repeats", "recorded_in_depth", "repeats_of", "shortened", "splice"]
