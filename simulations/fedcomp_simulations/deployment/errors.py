"""What can go wrong outside of our own code when real processes are started."""

from fedcomp.errors import FedcompError


class DeploymentError(FedcompError):
    """A SuperLink, SuperNode or run did not do what was asked of it; the message ends with its last log lines."""
