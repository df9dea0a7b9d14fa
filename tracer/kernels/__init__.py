"""Memory that kernels take behind the dispatcher's back: rules by operator, with the source of each.

registry.py says what a rule is; the rules are in reductions.py, attention.py, sorting.py, normalization.py and
convolution.py, operators without a workspace in none.py, and cuBLAS's kept workspaces in cublas.py.
`KernelWorkspaces.of(graph, device).added_to(liveness)` puts them all in.
"""

from metapeak.tracer.kernels import attention, convolution, normalization, reductions, sorting  # noqa: F401  (rules)
from metapeak.tracer.kernels.cublas import cublas_workspace_bytes, with_cublas_workspaces
from metapeak.tracer.kernels.device import device_of
from metapeak.tracer.kernels.registry import Device
from metapeak.tracer.kernels.workspaces import KernelWorkspaces

# What a GPU does when the user names none.
DEFAULT_COMPUTE_CAPABILITY = Device().compute_capability

__all__ = [
    "DEFAULT_COMPUTE_CAPABILITY",
    "Device",
    "KernelWorkspaces",
    "cublas_workspace_bytes",
    "device_of",
    "with_cublas_workspaces",
]
