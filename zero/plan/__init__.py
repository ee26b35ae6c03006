"""``zero plan``: predict, by formulas, which configuration trains a model fastest on a cluster.

In:  a model's shape, a cluster's links and memory, and what a rank computes in a step.
Out: every configuration with its bytes and seconds, the fastest that fits first.
Called by: ``zero plan``, zero.estimate, and scripts.

    Model, Cluster, Job --choices--> configurations --zero.estimate--> bytes in memory   --fits?--+
                                                    --exchanges-->     bytes sent --times--> seconds --> ranked Rows

Formulas with their sources: bytes in memory in :mod:`zero.plan.formulas`, bytes sent in :mod:`zcomm.volume`, seconds in
:mod:`zero.plan.times`, DDP, FSDP2 and HSDP in :mod:`zero.plan.peers`.
"""

from zero.plan.cluster import CLUSTERS, Cluster
from zero.plan.model import MODELS, Model
from zero.plan.planner import Job, Row, largest_model, plan, plan_peers

__all__ = ["CLUSTERS", "MODELS", "Cluster", "Job", "Model", "Row", "largest_model", "plan", "plan_peers"]
