"""When this process began to read jaxblt, which imports this module first."""

import time

BEGAN = time.time()
"""In seconds since 1970."""
