"""No test reads or writes the cache of whoever runs it; tests of the cache name a folder of their own."""

import os

os.environ["METAPEAK_CACHE"] = "off"
