"""Bases with quantised weights: nf4, fp4 and int8 of bitsandbytes, GPTQ, AWQ, and checkpoints that come quantised."""

from metapeak.strategies.quantization.schemes import SCHEMES, check_scheme
from metapeak.strategies.quantization.strategy import Quantization

__all__ = ["SCHEMES", "Quantization", "check_scheme"]
