"""``zero plan``: which configuration trains a model fastest on a cluster, by formulas, before anything is rented.

In:  a model's shape, a cluster's links and memory, and what a rank computes in a step.
Out: every configuration with its bytes and seconds, the fastest that fits first.
Called by: ``zero plan``, zero.estimate, and scripts.

    Model, Cluster, Job --choices--> configurations --zero.estimate--> bytes in memory   --fits?--+
                                                    --exchanges-->     bytes sent --times--> seconds --> ranked Rows

Bytes in memory are those of :mod:`zero.plan.formulas`, bytes sent those of :mod:`zcomm.volume`; what they take in time is in
:mod:`zero.plan.times`, with its sources.
"""

from zero.plan.cluster import CLUSTERS, Cluster
from zero.plan.model import MODELS, Model
from zero.plan.planner import Job, Row, largest_model, plan

__all__ = ["CLUSTERS", "MODELS", "Cluster", "Job", "Model", "Row", "largest_model", "plan"]
