"""Flower's SuperLink and SuperNodes as real processes on loopback, for tests, measurements and a first deployment."""

from fedcomp_simulations.deployment.errors import DeploymentError
from fedcomp_simulations.deployment.local import Deployment, Run
from fedcomp_simulations.deployment.proxy import CountingProxy, Exchange
from fedcomp_simulations.deployment.supernode import SuperNode

__all__ = ["CountingProxy", "Deployment", "DeploymentError", "Exchange", "Run", "SuperNode"]
