"""Serving: weights, the cache of keys and values, and what an engine leaves for it."""

from metapeak.strategies.serving.engines import ENGINES
from metapeak.strategies.serving.serve import Serving, ServingSpec, serve

__all__ = ["ENGINES", "Serving", "ServingSpec", "serve"]
