from flows.topologies.colocated import colocated
from flows.topologies.stages import Stages

TOPOLOGIES = {"colocated": colocated}

__all__ = ["TOPOLOGIES", "Stages"]
