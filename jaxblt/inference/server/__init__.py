"""An HTTP server over an engine, in the shapes that clients of OpenAI's API know; the extra `serve` installs it."""

from jaxblt.inference.server.app import make_app
from jaxblt.inference.server.process import listen, run_server
from jaxblt.inference.server.service import Limits, Service

__all__ = ["Limits", "Service", "listen", "make_app", "run_server"]
