"""Model definitions of other packages, behind one interface: a reference `litgpt:phi-1_5` builds litgpt's own class.

`base.py` says what a package gives (module, batch, loss, adapters); one file a package; `registry.py` finds them.
None of the packages is needed otherwise: they are optional extras, imported when a reference names one.
"""

from metapeak.tracer.packages.registry import PACKAGES, installed_version, load_package, split_reference

__all__ = ["PACKAGES", "installed_version", "load_package", "split_reference"]
