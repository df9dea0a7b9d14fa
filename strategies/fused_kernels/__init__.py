"""Modules' forwards as libraries of fused kernels replace them; see strategies/kernels.py."""
